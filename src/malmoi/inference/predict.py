"""Predictions of fine-tuned heads: classes, label sets and choices. N classes, T tokens."""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import explained, require_that
from malmoi.inference.batches import in_order, model_batches
from malmoi.inference.prompt import truncate_text
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores
from malmoi.inference.score import score_pairs
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.system.progress import tracked
from malmoi.system.result import Result
from malmoi.system.untrusted import MAX_CONTEXT_TOKENS, JsonObject
from malmoi.text.columns import text_column
from malmoi.text.rows import BadRow, has_rows, records_of, rows_of
from malmoi.tokenizer import Encoding, Tokenizer, TokenRow

TextOrPair = str | tuple[str, str]
FRAME_TOKENS = 4  # three special tokens of a pair, and one for a space that may become a token
CONTENT_FREE = ("N/A", "", "[MASK]")  # texts that say nothing (Zhao et al. 2021 §5)
MASKED_ENDING = "."  # a BERT reads what follows the words, and without it ends the sentence there
DEFAULT_THRESHOLD = 0.5  # on a label's probability, if the folder has no threshold


@dataclass(frozen=True, repr=False)
class Prediction(Result):
    """A text's label and every label's probability; a regression has one score, the value.

    Examples:
        >>> malmoi.Prediction("good", {"good": 0.9, "bad": 0.1}).label
        'good'
    """

    label: str
    scores: dict[str, float]


@dataclass(frozen=True, repr=False)
class MultiLabelPrediction(Result):
    """The labels of a text, possibly none: those whose probability reaches their threshold.

    Examples:
        >>> malmoi.MultiLabelPrediction(("art",), {"art": 0.9, "war": 0.1}).labels
        ('art',)
    """

    labels: tuple[str, ...]
    scores: dict[str, float]


def encode_rows(tokenizer: Tokenizer, texts: Sequence[TextOrPair], longest: int) -> list[TokenRow]:
    """Encodes texts or pairs as rows, truncating the longer text of a pair, as in fine-tuning."""
    firsts, seconds = split_pairs(texts)
    return tokenizer.rows(firsts, seconds, max_tokens=longest)


def split_pairs(texts: Sequence[TextOrPair]) -> tuple[list[str], list[str] | None]:
    """The first texts, and the second ones if these are pairs."""
    pairs = [text for text in texts if not isinstance(text, str)]
    if not pairs:
        return list(texts), None  # type: ignore[arg-type]
    same = len(pairs) >= len(texts) and all(len(pair) == 2 for pair in pairs)
    require_that(same, "Give either texts or (first, second) pairs, not a mix of both.")
    return [first for first, _ in pairs], [second for _, second in pairs]


@dataclass(frozen=True)
class Verbalizer:
    """A prompt, the words for each label, and the calibration of their log-probabilities."""

    prompt: str  # with {text} and {pair}
    said: tuple[str, ...]  # in the order of the labels
    bias: tuple[float, ...] = ()  # added to each label's log-probability
    scale: float = 1.0  # multiplies them before
    # other prompts for the same labels, whose log-probabilities are averaged with this one's
    also: tuple["Verbalizer", ...] = ()

    def query(self, text: str, pair: str = "") -> str:
        """Fills in only these two names: the prompt comes from an untrusted file."""
        known = {"{text}": text, "{pair}": pair, "{{": "{", "}}": "}"}
        return re.sub(r"\{\{|\}\}|\{text\}|\{pair\}", lambda found: known[found[0]], self.prompt)


@dataclass(frozen=True)
class Predictor:
    """A fine-tuned model and how it encodes its input."""

    network: Network
    tokenizer: Tokenizer
    labels: tuple[str, ...] = ()
    length: int = 0  # maximum number of tokens; 0: the context
    stride: int = 128  # between the windows over a long context
    both: bool = False  # sums the vectors of both orders of a pair (GPT-1 §3.3)
    choice_apart: bool = False  # the delimiter comes before a choice, not before its question
    problem_type: str = ""  # config.json's: what the classification head predicts
    threshold: float = float("inf")  # "no answer" must beat the best span by more than this
    thresholds: tuple[float, ...] = ()  # one per label, for multi-label models
    temperature: float = 1.0  # divides the scores of classes and choices before the softmax
    answer_tokens: int = 0  # maximum length of a written answer; 0: it was not fine-tuned to write
    ends: tuple[int, ...] = ()  # tokens that end a text
    sentence: SentencePooling | None = None  # how a sentence encoder pools
    # names of the columns it was fine-tuned on: text, pair, label…
    columns: Mapping[str, str] = field(default_factory=dict)
    # label words, if it was fine-tuned with its language head
    words: Verbalizer | None = None
    # calls a function that encodes texts with its arguments, or remembers what it gave for them
    encode: Callable[..., Any] = operator.call

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Predictor":
        """The predictor of a checkpoint, with the settings of its fine-tuning if it has them."""
        return cls(
            checkpoint.network,
            checkpoint.required_tokenizer,
            checkpoint.labels,
            ends=checkpoint.end_tokens,
            sentence=checkpoint.sentence,
            **_finetuning_settings(checkpoint),
        )

    @property
    def max_tokens(self) -> int:
        return min(self.length or self.network.config.context, self.network.config.context)


def _finetuning_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fine-tuning settings in the folder's "malmoi" object, as fields of a `Predictor`."""
    extra = JsonObject(checkpoint.extra, f"{checkpoint.source or 'The model'}: malmoi")
    labels = len(checkpoint.labels)
    settings: dict[str, Any] = {
        "length": extra.whole("length", default=None, high=MAX_CONTEXT_TOKENS),
        "stride": extra.whole("stride", default=None, low=1, high=MAX_CONTEXT_TOKENS),
        "both": extra.flag("both", default=None),
        "choice_apart": extra.flag("choice_apart", default=None),
        "problem_type": extra.text("problem_type", default=None),
        "answer_tokens": extra.whole("answer_tokens", default=None, high=MAX_CONTEXT_TOKENS),
        "threshold": extra.get("threshold"),
        # what the last layer is divided by already is a fact, not a setting
        "temperature": None
        if extra.flag("calibrated", default=False)
        else extra.number("temperature", default=None),
        "columns": extra.map_of("columns", str, default={}),
    }
    threshold = settings["threshold"]  # infinite for a model that always answers
    extra.require(
        threshold is None or (isinstance(threshold, float) and threshold == threshold),
        "threshold",
        "a number",
    )
    temperature = settings["temperature"]
    extra.require(temperature is None or temperature > 0, "temperature", "a positive number")
    for_each = msg("a number for each of {labels} labels", labels=labels)
    if extra.get("thresholds") is not None:
        thresholds = tuple(extra.list_of("thresholds", float))
        extra.require(len(thresholds) == labels, "thresholds", for_each)
        settings["thresholds"] = thresholds
    if extra.get("words") is not None:
        settings["words"] = verbalizer_of(extra.object("words"), labels)
    return {name: value for name, value in settings.items() if value is not None}


def verbalizer_of(words: JsonObject, labels: int) -> Verbalizer:
    said = tuple(words.list_of("said", str))
    words.require(
        len(said) == labels and all(said),
        "said",
        msg("a word for each of {labels} labels", labels=labels),
    )
    bias = tuple(words.list_of("bias", float, default=[]))
    words.require(
        not bias or len(bias) == labels,
        "bias",
        msg("a number for each of {labels} labels", labels=labels),
    )
    others = words.list_of("also", dict, default=[])
    also = tuple(verbalizer_of(JsonObject(one, f"{words.where}: also"), labels) for one in others)
    return Verbalizer(words.text("prompt"), said, bias, words.number("scale", default=1.0), also)


def row_texts(rows: Any, columns: Mapping[str, str]) -> list[Any]:
    """The text columns of rows (dicts, a frame, a data set, a `Path`); texts are unchanged."""
    if isinstance(rows, Path):
        with explained(BadRow, "{error}."):
            rows = [row.checked for row in rows_of(rows, columns.values())]
    elif hasattr(rows, "columns") or hasattr(rows, "column_names"):
        rows = records_of(rows)
    found = list(rows) if isinstance(rows, Iterable) else [rows]
    for one in found:
        known = isinstance(one, str | Sequence | Mapping)
        require_that(known, "A model predicts texts, pairs or rows, not {one!r:.40}.", one=one)
    if not columns and found and all(isinstance(row, Mapping) for row in found):
        columns = {"text": text_column(found, list(found[0]), msg("the data"))}
    return [_row_text(row, columns) if isinstance(row, Mapping) else row for row in found]


def refuse_file_name(texts: object) -> None:
    """Raises an error for a text that is the name of a table file, whose rows were meant."""
    is_file = isinstance(texts, str) and has_rows(Path(texts)) and Path(texts).is_file()
    require_that(
        not is_file, "{texts} is a file; call predict(pathlib.Path({texts!r})).", texts=texts
    )


def _row_text(row: Mapping[str, Any], columns: Mapping[str, str]) -> Any:
    names = [columns.get("text", "text"), *([columns["pair"]] if "pair" in columns else [])]
    if isinstance(row.get(names[0]), list):  # a conversation
        return row[names[0]]
    choices = row_choices(row, columns)
    for name in names:
        require_that(
            isinstance(row.get(name), str),
            "A row has no text in column {name!r}, which this model reads; it has: {had}.",
            name=name,
            had=", ".join(map(str, row)),
        )
    texts = tuple(row[name] for name in names)
    return texts[0] if len(texts) == 1 and not choices else (*texts, *choices)


def row_choices(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The choices of a row, in one list or in columns of their own; none without such columns."""
    if "choices" not in columns:
        return ()
    names = columns["choices"].split(",")
    given: Any = row.get(names[0]) if len(names) == 1 else [row.get(name) for name in names]
    listed = isinstance(given, Sequence) and None not in given
    require_that(listed, "A row has no choices in {names}.", names=", ".join(names))
    return (tuple(map(str, given)),)


def classify_texts(reading: Predictor, texts: Sequence[TextOrPair]) -> list[Prediction]:
    """Predicts one label per text."""
    temperature = 1.0 if len(reading.labels) == 1 else reading.temperature
    return [prediction(row / temperature, reading.labels) for row in score_classes(reading, texts)]


def label_texts(reading: Predictor, texts: Sequence[TextOrPair]) -> list[MultiLabelPrediction]:
    """Predicts the set of labels of each text."""
    found = []
    for chances in score_classes(reading, texts).sigmoid().tolist():
        named = {name_of(reading.labels, i): chance for i, chance in enumerate(chances)}
        thresholds = reading.thresholds or [DEFAULT_THRESHOLD] * len(chances)
        found.append(MultiLabelPrediction(held_labels(named, thresholds), named))
    return found


def held_labels(chances: Mapping[str, float], thresholds: Sequence[float]) -> tuple[str, ...]:
    """The labels whose probability reaches their threshold."""
    pairs = zip(chances.items(), thresholds, strict=True)
    return tuple(name for (name, chance), least in pairs if chance >= least)


def score_classes(reading: Predictor, texts: Sequence[TextOrPair]) -> Tensor:
    """Class scores [texts, N]."""
    if reading.words is not None:
        return verbalizer_scores(reading.network, reading.tokenizer, reading.words, texts)
    vectors = _pooled(reading, texts)
    if reading.both and texts and not isinstance(texts[0], str):
        vectors = vectors + _pooled(reading, [(pair[1], pair[0]) for pair in texts])
    with torch.inference_mode():
        scores: Tensor = reading.network.heads["classify"](vectors)
    return scores.float().cpu()


def _pooled(reading: Predictor, texts: Sequence[TextOrPair]) -> Tensor:
    rows = reading.encode(encode_rows, reading.tokenizer, tuple(texts), reading.max_tokens)
    return pool_texts(reading.network, rows)


def answer_choices(reading: Predictor, questions: Sequence[tuple[Any, ...]]) -> list[Prediction]:
    """Predicts the most likely choice of each (text, choices) or (text, question, choices)."""
    known = not any(isinstance(one, str) or isinstance(one[-1], str) for one in questions)
    require_that(known, "This model chooses an answer: give (text, choices), or --choice for each.")
    found = []
    for (*_, choices), scores in zip(questions, score_choices(reading, questions), strict=True):
        chances = (scores / reading.temperature).softmax(-1).tolist()
        best = choices[max(range(len(choices)), key=chances.__getitem__)]
        found.append(Prediction(best, dict(zip(choices, chances, strict=True))))
    return found


def score_choices(reading: Predictor, questions: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """One score per choice of each question; every choice is scored separately after its text."""
    parts = [(q[0], q[1] if len(q) == 3 else "", q[-1]) for q in questions]
    room = reading.max_tokens if reading.choice_apart else None
    vectors = _pooled(reading, list(choice_pairs(reading.tokenizer, parts, room)))
    with torch.inference_mode():
        scores = reading.network.heads["choice"](vectors).float().cpu().squeeze(-1)
    return list(scores.split([len(q[-1]) for q in questions]))


def choice_pairs(
    tokenizer: Tokenizer,
    questions: Sequence[tuple[str, str, Sequence[str]]],
    max_tokens: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields each choice of (text, question, choices) as a pair: after the question, or in its gap.

    With `max_tokens` the choice is a text of its own, as in GPT-1 §3.3 (text question $ choice),
    and the text is truncated first, so that the question stays complete.
    """
    for text, question, choices in questions:
        if max_tokens is not None and question:
            text = f"{_cut(tokenizer, text, (question, *choices), max_tokens)} {question}"
            question = ""
        gap = "_" in question
        for choice in choices:
            yield text, question.replace("_", choice) if gap else f"{question} {choice}".strip()


def _cut(tokenizer: Tokenizer, text: str, others: Sequence[str], max_tokens: int) -> str:
    """The beginning of a text that leaves room for a question and the longest of its choices."""
    question, *choices = map(len, tokenizer.ids(list(others)))
    return truncate_text(tokenizer, text, max_tokens - FRAME_TOKENS - question - max(choices))


@torch.inference_mode()
def pool_texts(network: Network, rows: Sequence[TokenRow]) -> Tensor:
    """Pooled vectors of texts [N, D]."""
    found = torch.empty(len(rows), network.width, device=network.device, dtype=network.dtype)
    for group, given in model_batches(network, rows, "predict"):
        vectors = network.pooler(network.hidden(**given), given["keep"])  # type: ignore[misc, arg-type]
        found[torch.tensor(group, device=network.device)] = vectors.to(found.dtype)
    return found


def token_scores(network: Network, texts: Sequence[Encoding], head: str) -> list[Tensor]:
    """Scores of every token of each text [T, N]."""
    found = in_order((group, scores.cpu()) for group, scores in score_tokens(network, texts, head))
    return [row[: len(text.tokens)] for row, text in zip(found, texts, strict=True)]


@torch.inference_mode()
def score_tokens(
    network: Network, rows: Sequence[Encoding | TokenRow], head: str
) -> Iterator[tuple[list[int], Tensor]]:
    """Yields batches of rows: their indices, and the scores of all their tokens [B, T, N]."""
    for group, given in model_batches(network, rows, "predict"):
        yield group, network(**given, heads=(head,))[head].float()


def name_of(labels: Sequence[str], i: int) -> str:
    return labels[i] if i < len(labels) else f"LABEL_{i}"


def prediction(scores: Tensor, labels: Sequence[str]) -> Prediction:
    """The label with the highest of these scores [N]; of a single one, its value."""
    values = scores if len(scores) == 1 else scores.softmax(-1)
    named = {name_of(labels, i): value for i, value in enumerate(values.tolist())}
    return Prediction(max(named, key=named.__getitem__), named)


# ------------------------------------------------------------------ words for labels


def verbalizer_scores(
    network: Network,
    tokenizer: Tokenizer,
    words: Verbalizer,
    texts: Sequence[str | tuple[str, str]],
) -> Tensor:
    """Calibrated log P(a label's words | the text in its prompt) [texts, N]."""
    asked = [(text, "") if isinstance(text, str) else text for text in texts]
    if not words.also or not asked:
        queries = [words.query(*one) for one in asked]
        return _calibrated(words, word_logprobs(network, tokenizer, queries, words.said))
    ways = (words, *words.also)
    logs = prompt_logprobs(network, tokenizer, ways, asked, "predict")
    scores = (
        torch.stack([_calibrated(*pair) for pair in zip(ways, some, strict=True)]) for some in logs
    )
    return torch.stack([some.log_softmax(-1).mean(0) for some in scores])


def prompt_logprobs(
    network: Network,
    tokenizer: Tokenizer,
    prompts: Sequence[Verbalizer],
    texts: Sequence[tuple[str, str]],
    verb: str,
) -> Tensor:
    """log P of the first prompt's words after each prompt of each text [texts, prompts, N]."""
    # one text at a time: its prompts share its tokens
    each = tracked(([i] for i in range(len(texts))), verb, len(texts))
    queries = ([one.query(*texts[i]) for one in prompts] for [i] in each)
    said = prompts[0].said
    return torch.stack([word_logprobs(network, tokenizer, some, said) for some in queries])


def _calibrated(words: Verbalizer, logprobs: Tensor) -> Tensor:
    """The scores of labels [..., N] by the log-probabilities of their words."""
    scores = words.scale * logprobs.log_softmax(-1)
    return scores + torch.tensor(words.bias) if words.bias else scores


def word_logprobs(
    network: Network,
    tokenizer: Tokenizer,
    queries: Sequence[str],
    said: Sequence[str],
    endings: Sequence[str] = (),
) -> Tensor:
    """log P(words | query) of a GPT, or of a BERT whose words are masked together [Q, N].

    A BERT reads what comes after the words, too: for each query an ending of its own, or a stop.
    """
    pairs = [(query, words) for query in queries for words in said]
    if "lm" in network.heads:
        found = score_pairs(network, tokenizer, pairs)
    else:
        after = [end for end in endings or [MASKED_ENDING] * len(queries) for _ in said]
        parts = [SplitText(*pair, end) for pair, end in zip(pairs, after, strict=True)]
        found = pseudo_scores(network, tokenizer, parts, together=True)
    return torch.tensor([one.logprob for one in found]).view(len(queries), len(said))


def content_free_bias(logprobs: Tensor) -> Tensor:
    """−log of the labels' mean probability after content-free texts [N] (Zhao et al. 2021 §5)."""
    return -logprobs.softmax(-1).mean(0).log()
