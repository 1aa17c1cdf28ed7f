"""Commands that give texts to a model: generate, chat, translate, fill, score, trace, probe…"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmoi.api.models import probe
from malmoi.cli import shared as cli
from malmoi.errors import UsageError, explained, require_that
from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig
from malmoi.pair import BERT, GPT
from malmoi.report.console import progress_bar
from malmoi.system.paths import names_file, require_path
from malmoi.system.untrusted import read_object

if TYPE_CHECKING:
    from malmoi.tracing.trace import Memorisation, Trace


def generate_command(
    model: cli.Gpt = None,
    texts: cli.Texts = None,
    options: dict[str, Any] = cli.options_of(GenerationConfig, ConstraintOptions),
    parse_special: bool = cli.option(
        False, "Parse control tokens such as <|endoftext|> in the prompt.", "--parse-special"
    ),
    features: Path | None = cli.option(
        None, ".npy file of feature vectors to describe (caption-small).", metavar="FILE"
    ),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Continue prompts with a GPT.

    A single prompt streams; several run as one batch.

    Example: malmoi generate --temperature 0.8 "The state of"
    """
    require_that(
        "length_penalty" not in options or options.get("beams", 1) != 1,
        "--length-penalty scores beams: give --beams 2 or more with it.",
    )
    if features is not None:
        require_that(not texts, "--features takes no prompt: omit the text.")
        _describe(cli.open_model(model, loading, GPT), features, options, json)
        return
    prompts = cli.whole_texts(texts)
    _parse(options)
    lm = cli.open_model(model, loading, GPT)
    _note_empty(lm, prompts)
    if len(prompts) > 1 or options.get("n", 1) > 1 or json:
        _write_all(lm, prompts, {**options, "parse_special": parse_special}, json)
        return
    for piece in lm.stream(prompts[0], parse_special=parse_special, **options):
        print(piece, end="", flush=True)
    print()


def _parse(options: dict[str, Any]) -> None:
    """Replaces the texts of options by their values."""
    if "choices" in options:
        options["choices"] = options["choices"].split(",")
    if "logit_bias" in options:
        options["logit_bias"] = dict(map(_token_bias, options["logit_bias"]))
    if "json_schema" in options:
        options["json_schema"] = read_object(options["json_schema"])


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    with explained(
        ValueError,
        "--logit-bias takes a token's id and a number, such as 50256=-100, not {text!r}.",
        raises=UsageError,
        text=text,
    ):
        return int(token), float(bias)


def _describe(
    lm: "cli.inference.Model", features: Path, options: dict[str, Any], json: bool
) -> None:
    from malmoi.training.data.captions import open_features

    limit = options.get("max_new_tokens", GenerationConfig.max_new_tokens)
    texts = lm.describe(open_features(features), max_new_tokens=limit)
    for row, text in enumerate(texts, start=1):
        cli.print_one(json, {"row": row, "text": text}, cli.one_line(text))


def _note_empty(lm: "cli.inference.Model", prompts: list[str]) -> None:
    """Notes which token an empty prompt starts from; a model without one refuses it."""
    from malmoi.inference.prompt import start_token

    full = (lm.tokenizer.encode(text, specials=False).tokens for text in prompts)
    if "generate" in lm.abilities and not all(full):
        mark = lm.tokenizer.token(start_token(lm.tokenizer))
        cli.note("The prompt is empty, so the text starts after {mark}.", mark=mark)


def _write_all(
    lm: "cli.inference.Model", prompts: list[str], options: dict[str, Any], json: bool
) -> None:
    texts = lm.generate(prompts, **options)
    for i, (prompt, some) in enumerate(zip(prompts, texts, strict=True)):
        for j, text in enumerate([some] if options.get("n", 1) == 1 else some):
            shown = f"---\n{text}" if i or j else text
            cli.print_one(json, {"prompt": prompt, "text": text}, shown)


def chat_command(
    model: cli.Model,
    texts: list[str] | None = cli.argument(
        None, "Your messages in order; omit them to type interactively.", metavar="TEXT…"
    ),
    system: str | None = cli.option(None, "System prompt."),
    options: dict[str, Any] = cli.options_of(
        GenerationConfig,
        names="max_new_tokens temperature top_p seed",
        max_new_tokens=256,
        temperature=0.7,
    ),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Chat with a language model through its own chat template.

    Example: malmoi chat --model SmolLM2-135M-Instruct.gguf --temperature 0 "What is the capital of
    France?"
    """
    lm = cli.open_model(model, loading)
    messages = [{"role": "system", "content": system}] if system else []
    for message in texts or _typed():
        messages.append({"role": "user", "content": message})
        answer = ""
        for piece in lm.chat_stream(messages, **options):
            piece = piece if answer else piece.lstrip()
            answer += piece
            if not json:
                print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        cli.print_one(json, messages[-1], "")


def _typed() -> Iterator[str]:
    """Lines of standard input as they arrive, with a prompt sign on a terminal."""
    require_that(
        sys.stdin is not None, "There is no text: write one after the options, or pipe one in."
    )
    someone = sys.stdin.isatty()
    while True:
        if someone:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def translate_command(
    model: cli.Model,
    texts: cli.Texts = None,
    to: str = cli.option(
        "", "Target language, for a GPT that is prompted to translate.", metavar="NAME"
    ),
    beams: int = cli.option(4, "1 is greedy."),
    length_penalty: float = cli.option(
        0.6, "Beams are scored by log p / ((5 + length) / 6)^penalty."
    ),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Translate texts, or every line of a file.

    Uses a model that was pre-trained on translations, or a GPT with --to.

    Example: malmoi translate --model runs/en-de "A dog runs on the beach."
    """
    lines = _lines(texts)
    opened = cli.open_model(model, loading)
    some = [line for line in lines if line.strip()]
    if opened.config.encoder_depth:
        require_that(not to, "--to is for a GPT: this model translates into one language only.")
        translations = iter(opened.translate(some, beams=beams, length_penalty=length_penalty))
    else:
        translations = iter([opened.translate(line, to) for line in some])
    for line in lines:
        text = next(translations) if line.strip() else ""
        cli.print_one(json, {"text": line, "translation": text}, cli.one_line(text))


def _lines(texts: list[str] | None) -> list[str]:
    """The texts, the lines of those that are files, or the lines of standard input."""
    from malmoi.text.rows import text_lines

    found: list[str] = []
    for text in cli.input_lines(texts, keep_blank=True):
        found += [line for _, line in text_lines(Path(text))] if names_file(text) else [text]
    return found


def fill_command(
    model: cli.Bert = None,
    texts: cli.Texts = None,
    top: int = cli.option(5, "Candidates for each mask."),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Fill in the [MASK] of each text with a BERT.

    Prints probability, token and the text with it in place.

    Example: malmoi fill "나는 오늘 [MASK] 갔다."
    """
    given = cli.input_lines(texts)
    bert = cli.open_model(model, loading, BERT)
    for text in given:
        masks = bert.fill_masks(text, top=top)
        facts = {"text": text, "fills": [[vars(one) for one in mask] for mask in masks]}
        lines = (
            f"{one.probability:.4f}\t{one.token}\t{cli.one_line(one.text)}"
            for mask in masks
            for one in mask
        )
        cli.print_one(json, facts, "\n".join(lines))


def score_command(
    model: cli.Gpt = None,
    texts: cli.Texts = None,
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Score continuations of a context with a GPT.

    The first text is the context, the others are continuations; on standard input every line is a
    context, a tab and a continuation. Prints the log-probability of each.

    Example: malmoi score --model runs/tiny-gpt "The capital of France is" " Paris" " Rome"
    """
    if texts and texts != ["-"]:
        rows = [(texts[0], text) for text in texts[1:]]
    else:
        rows = cli.input_pairs(None)
    require_that(
        rows, "There is nothing to score: after the context, give at least one continuation."
    )
    contexts, continuations = (list(column) for column in zip(*rows, strict=True))
    found = cli.open_model(model, loading, GPT).score(contexts, continuations)
    for (context, continuation), one in zip(rows, found, strict=True):
        facts = {"context": context, "continuation": continuation, **vars(one)}
        cli.print_one(json, facts, f"{one.logprob:.4f}\t{cli.one_line(continuation)}")


def perplexity_command(
    model: cli.Gpt = None,
    texts: cli.Texts = None,
    bits: bool = cli.option(
        False, "Print bits per byte, which are comparable between tokenizers.", "--bits-per-byte"
    ),
    stride: int | None = cli.option(
        None, "Stride of the sliding window.", shown="half the context"
    ),
    memory: int | None = cli.option(
        None,
        "Tokens of earlier segments that a Transformer-XL attends to; 0: none.",
        shown="as in training",
    ),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Compute a GPT's perplexity on a text or a file of any length.

    Example: malmoi perplexity --model runs/tiny-gpt book.txt
    """
    named = bool(texts) and texts != ["-"]
    whole = [_of_file(text) if named else text for text in cli.whole_texts(texts)]
    lm = cli.open_model(model, loading, GPT)
    for text in whole:
        measure = lm.bits_per_byte if bits else lm.perplexity
        value = measure(text, stride=stride, memory=memory)
        cli.print_one(json, {"bits_per_byte" if bits else "perplexity": value}, f"{value:.4f}")


def _of_file(text: str) -> str:
    """The text of a file that is named, else the text itself."""
    from malmoi.text.lines import refuse_bad_lines, whole_text
    from malmoi.text.sources import format_of

    path = Path(text)
    if not names_file(text) and (len(text.split()) > 1 or not format_of(path)):
        return text
    require_path(path)
    return whole_text(path, refuse_bad_lines(path)).rstrip("\r\n")


# ------------------------------------------------------------------ what it learnt from, and where


def trace_command(
    model: cli.Gpt = None,
    texts: list[str] | None = cli.argument(
        None,
        "The run's folder, unless --model is given, and texts; - reads them from standard input.",
        metavar="[DIR] TEXT…",
    ),
    words: str = cli.option("", "Only matches with some of these words of the text."),
    top: int = cli.option(5, "Longest matches for each text."),
    sentences: int = cli.option(3, "Sentences of the training text for each match."),
    nearest: int = cli.option(0, "Also this many sentences with similar hidden states."),
    data: list[str] | None = cli.option(
        None, "Text to search.", shown="what the run was trained on", metavar="SOURCE"
    ),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Find the words of a text in the text a model was trained on.

    Prints the longest matches, how often the training text has them, and some of its sentences. A
    run's folder may come first instead of --model; without a text, measures how much of its
    training text the model knows by heart and copies, and adds that to report.html.

    Example: malmoi trace runs/tiny-gpt "the state of the union"
    """
    given = list(texts or [])
    if model is None and given and names_file(f"{given[0]}/config.json"):
        model = given.pop(0)
    opened = cli.open_model(model, loading, GPT)
    if not given and not data:
        _show_traced(opened.memorisation(), json)
        return
    trace = partial(
        opened.trace, words=words, top=top, sentences=sentences, nearest=nearest, data=data or ()
    )
    for text in cli.input_lines(given):
        _show_traced(trace(text), json)


def _show_traced(found: "Trace | Memorisation", json: bool) -> None:
    if json:
        cli.print_json(found.to_dict())
        return
    cli.say(found.describe())
    for columns, rows in found.tables():
        if rows:
            cli.print_table(columns, rows)


def probe_command(
    model: cli.Model,
    data: Path = cli.option(..., "Labelled words (.conllu) or texts (csv, jsonl…)."),
    test: Path | None = cli.option(None, "Rows to test on.", shown="a fifth of the data"),
    label: str | None = cli.option(
        None, "Column of the labels; for CoNLL-U, upos, xpos or deprel.", shown="detected; upos"
    ),
    limit: int = cli.count(4000, "Read at most this many words or texts."),
    seed: int = cli.option(0, "Random seed."),
    loading: dict[str, Any] = cli.LOADING,
    json: cli.Json = False,
) -> None:
    """Probe every layer for parts of speech or your own labels.

    A control task with a random label for each word shows how much the probe itself memorises.

    Example: malmoi probe --model runs/tiny-bert --data en_ewt.dev.conllu
    """
    opened = cli.open_model(model, loading)
    found = probe(opened, data, test=test, label=label, max_examples=limit, seed=seed)
    if not json:
        cli.say(
            "{labels} labels; trained on {found.train:,} examples, tested on {found.test:,}. Most "
            "frequent label: {found.majority:.1%}.",
            labels=len(found.labels),
            found=found,
        )
    cells = (
        (one.layer, f"{one.accuracy:.1%}", f"{one.control:.1%}", progress_bar(one.accuracy))
        for one in found.layers
    )
    cli.print_rows(json, [found.to_dict()], ("layer", "accuracy", "control", ""), cells)
