"""Using a model: generate, stream, chat, score, fill, embed, predict, trace.

Each function takes a `Model` or the path of a model folder. A path is loaded at every call; to call
more than once, load the model with `load`.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Unpack, overload

from malmoi.system.progress import ProgressCallback, listening

if TYPE_CHECKING:
    from malmoi.inference.embed import Float32Array, Pool
    from malmoi.inference.generation.keywords import GenerationOptions, GenerationSettings
    from malmoi.inference.model import Asked, ManyAsked, Model, Predicted
    from malmoi.inference.pseudo_likelihood import Fill
    from malmoi.inference.score import Score
    from malmoi.interpret.probe import Probe, ProbeRow
    from malmoi.tokenizer.chat_template import Messages
    from malmoi.tracing.trace import Trace

AnyModel: TypeAlias = "Model | str | Path"
P = TypeVar("P")


def as_model(model: "AnyModel", device: str | None = None) -> "Model":
    """Returns the model, loading it if `model` is a path."""
    from malmoi.inference.model import Model, load

    return model if isinstance(model, Model) else load(model, device=device)


@overload
def generate(  # type: ignore[overload-overlap]  # to Python a text is a sequence of texts
    model: "AnyModel",
    prompt: str,
    *,
    n: Literal[1] = 1,
    parse_special: bool = False,
    **options: "Unpack[GenerationOptions]",
) -> str: ...
@overload
def generate(
    model: "AnyModel",
    prompt: Sequence[str],
    *,
    n: Literal[1] = 1,
    parse_special: bool = False,
    **options: "Unpack[GenerationOptions]",
) -> list[str]: ...
@overload
def generate(
    model: "AnyModel",
    prompt: str | Sequence[str],
    *,
    n: int,
    parse_special: bool = False,
    **options: "Unpack[GenerationOptions]",
) -> str | list[str] | list[list[str]]: ...
def generate(
    model: "AnyModel",
    prompt: str | Sequence[str],
    *,
    n: int = 1,
    parse_special: bool = False,
    **options: "Unpack[GenerationOptions]",
) -> str | list[str] | list[list[str]]:
    """Generates a continuation of a prompt, or of each prompt in a list.

    Options are those of `Model.generate`: max_new_tokens=40, temperature=1.0 (0 is greedy), top_k,
    top_p, stop, seed, beams, regex, choices, json_schema and others. With n > 1,
    returns a list of n continuations for each prompt.

    Examples:
        >>> malmoi.generate("runs/tiny-gpt", "The state of", max_new_tokens=8, seed=0)
        '...'
        >>> len(malmoi.generate("runs/tiny-gpt", ["The", "We"], max_new_tokens=4))
        2
    """
    return as_model(model).generate(prompt, n=n, parse_special=parse_special, **options)


def stream(
    model: "AnyModel",
    prompt: str,
    *,
    parse_special: bool = False,
    **options: "Unpack[GenerationSettings]",
) -> Iterator[str]:
    """Yields the text of `generate` in pieces as it is generated, always whole characters.

    Examples:
        >>> pieces = malmoi.stream("runs/tiny-gpt", "The state of", max_new_tokens=8, seed=0)
        >>> "".join(pieces)
        '...'
    """
    return as_model(model).stream(prompt, parse_special=parse_special, **options)


def chat(
    model: "AnyModel", messages: "Messages | str", **options: "Unpack[GenerationSettings]"
) -> str:
    """Returns the model's reply to a conversation, using its chat template.

    `messages` is a user message, or a list [{"role": "user", "content": "…"}, …]. Options are those
    of `generate`; max_new_tokens defaults to 256.

    Examples:
        >>> malmoi.chat("runs/tiny-gpt", "Are we free?", max_new_tokens=8, seed=0)
        '...'
    """
    return as_model(model).chat(messages, **options)


@overload
def score(  # type: ignore[overload-overlap]
    model: "AnyModel", context: str, continuation: str
) -> "Score": ...
@overload
def score(
    model: "AnyModel", context: str | Sequence[str], continuation: Sequence[str]
) -> "list[Score]": ...
def score(
    model: "AnyModel", context: str | Sequence[str], continuation: str | Sequence[str]
) -> "Score | list[Score]":
    """Returns log p(continuation | context) of a language model; lists are scored in batches.

    Examples:
        >>> found = malmoi.score("runs/tiny-gpt", "The state of the", " union")
        >>> found.logprob < 0, found.tokens
        (True, ...)
    """
    return as_model(model).score(context, continuation)


@overload
def fill(  # type: ignore[overload-overlap]
    model: "AnyModel", text: str, top: int = 5
) -> "list[Fill]": ...
@overload
def fill(model: "AnyModel", text: Sequence[str], top: int = 5) -> "list[list[Fill]]": ...
def fill(
    model: "AnyModel", text: str | Sequence[str], top: int = 5
) -> "list[Fill] | list[list[Fill]]":
    """Returns the `top` most likely tokens for the [MASK] in a text.

    Returns a list for each text of a list. `Model.fill_masks` takes a text with several masks.

    Examples:
        >>> best = malmoi.fill("runs/tiny-bert", "The state of the [MASK] is strong.", top=3)
        >>> best[0]
        Fill(token=..., probability=..., text=...)
    """
    return as_model(model).fill(text, top)


@overload
def embed(  # type: ignore[overload-overlap]
    model: "AnyModel",
    texts: str,
    layers: int | Sequence[int] = (-1,),
    pool: "Pool" = "auto",
    *,
    progress: ProgressCallback | None = None,
    truncate: bool = False,
) -> "Float32Array": ...
@overload
def embed(
    model: "AnyModel",
    texts: Sequence[str],
    layers: int | Sequence[int] = (-1,),
    pool: Literal["auto", "mean", "cls"] = "auto",
    *,
    progress: ProgressCallback | None = None,
    truncate: bool = False,
) -> "Float32Array": ...
@overload
def embed(
    model: "AnyModel",
    texts: Sequence[str],
    layers: int | Sequence[int] = (-1,),
    *,
    pool: Literal["none"],
    progress: ProgressCallback | None = None,
    truncate: bool = False,
) -> "list[Float32Array]": ...
def embed(
    model: "AnyModel",
    texts: str | Sequence[str],
    layers: int | Sequence[int] = (-1,),
    pool: "Pool" = "auto",
    *,
    progress: ProgressCallback | None = None,
    truncate: bool = False,
) -> "Float32Array | list[Float32Array]":
    """Embeds texts: an array [N, D], or [D] for one text.

    Averages the hidden states of `layers`, then pools over the tokens. Layer 0 is the embedding, -1
    the last layer. pool: "auto" (the setting of a sentence encoder's folder, else the mean),
    "mean", "cls" or "none", which returns an array [T, D] for each text.

    Examples:
        >>> vectors = malmoi.embed("runs/tiny-bert", ["a strong union", "free people"])
        >>> vectors.shape
        (2, 16)
    """
    with listening(progress):
        return as_model(model).embed(texts, layers, pool, truncate=truncate)


@overload
def predict(  # type: ignore[overload-overlap]
    model: "AnyModel", texts: "Asked", *, progress: ProgressCallback | None = None
) -> "Predicted": ...
@overload
def predict(
    model: "AnyModel", texts: "ManyAsked", *, progress: ProgressCallback | None = None
) -> "list[Predicted]": ...
@overload
def predict(  # type: ignore[overload-overlap]
    model: "AnyModel", texts: "Asked", kind: type[P], *, progress: ProgressCallback | None = None
) -> P: ...
@overload
def predict(
    model: "AnyModel",
    texts: "ManyAsked",
    kind: type[P],
    *,
    progress: ProgressCallback | None = None,
) -> list[P]: ...
def predict(
    model: "AnyModel",
    texts: "Asked | ManyAsked",
    kind: Any = object,
    *,
    progress: ProgressCallback | None = None,
) -> Any:
    """Predicts with a fine-tuned model for a text, a pair (a, b), a row, or a list of them.

    A row is a dict with the columns of the training table; a DataFrame, a `datasets.Dataset` or a
    file given as a `pathlib.Path` is a list of rows. A classifier returns a `Prediction` (label,
    scores), a multi-label classifier a `MultiLabelPrediction` (labels, scores), a tagger a list of
    `Span`s. A question-answering model takes (question, context) and returns an `Answer`; a
    multiple-choice model takes (text, choices). `kind`, one of these classes or list[Span], tells
    a type checker which of them it is.

    Examples:
        >>> malmoi.predict("runs/reviews", "a strong and free film")
        Prediction(label=..., scores={...})
    """
    with listening(progress):
        return as_model(model).predict(texts, kind)


def trace(  # noqa: PLR0913  # the keywords of Model.trace
    model: "AnyModel",
    text: str,
    *,
    words: str = "",
    top: int = 5,
    sentences: int = 3,
    nearest: int = 0,
    data: str | Sequence[str] = (),
) -> "Trace":
    """Finds the longest pieces of a text in the text that a model was trained on.

    Each match has how often and in how many documents it occurs, and some of its `sentences`;
    `novelty` is the share of n-grams that are new, by n. With `words`, a part of the text, only
    matches that have some of them; with `nearest`, also that many sentences with similar hidden
    states. The training text is that of the run's folder, or `data`.

    Examples:
        >>> found = malmoi.trace("runs/tiny-gpt", "the state of the union", sentences=1)
        >>> found.matches[0].count > 0, found.novelty
        (True, {...})
    """
    return as_model(model).trace(
        text, words=words, top=top, sentences=sentences, nearest=nearest, data=data
    )


def probe(  # noqa: PLR0913  # the command's options
    model: "AnyModel",
    rows: "Iterable[ProbeRow] | Path",
    *,
    test: "Iterable[ProbeRow] | Path | None" = None,
    label: str | None = None,
    max_examples: int = 4000,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> "Probe":
    """Trains a linear probe on each layer, with the most frequent label and a control task.

    A row is (text, label), or (words, labels) with one label for each word; a `pathlib.Path` is a
    CoNLL-U file, whose `label` is upos, xpos or deprel, or a table. Without `test`, a fifth of the
    rows is held out.

    Examples:
        >>> rows = [(["we", "work"], ["PRON", "VERB"]), (["people", "work"], ["NOUN", "VERB"])] * 4
        >>> found = malmoi.probe("runs/tiny-bert", rows)
        >>> [one.layer for one in found.layers]
        [0, 1, 2]
    """
    from malmoi.interpret.probe import probe_model, read_probe_rows

    rows = read_probe_rows(rows, label) if isinstance(rows, Path) else rows
    test = read_probe_rows(test, label) if isinstance(test, Path) else test
    found = as_model(model)
    with listening(progress):
        return probe_model(found, rows, test=test, max_examples=max_examples, seed=seed)
