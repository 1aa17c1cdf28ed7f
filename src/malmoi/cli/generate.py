"""`malmoi generate`: continue prompts with a language model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmoi.cli import options as opt
from malmoi.cli.inputs import given, open_model, whole_texts
from malmoi.cli.options import count, option
from malmoi.cli.output import note, one_line, print_json, print_result
from malmoi.errors import UsageError
from malmoi.messages import msg
from malmoi.system.untrusted import read_object

if TYPE_CHECKING:
    from malmoi.inference import Model

OPTIONS = (
    "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed", "n",
    "regex", "banned", "beams", "length_penalty", "speculate", "parse_special",
    "frequency_penalty", "presence_penalty", "min_p", "min_tokens", "ignore_eos",
)  # fmt: skip


def generate_command(
    model: opt.Model,
    texts: opt.Texts = None,
    max_new_tokens: int = count(40, "Maximum new tokens."),
    temperature: float | None = option(
        None, "0 is greedy; above 1 is more random.", shown="1; 0 with --beams or --speculate"
    ),
    top_k: int | None = option(None, "Sample from the k most likely tokens only."),
    top_p: float | None = option(
        None, "Sample from the smallest set of tokens whose probabilities reach p."
    ),
    min_p: float | None = option(
        None, "Sample only from tokens at least this fraction as likely as the best."
    ),
    repetition_penalty: float = option(1.0, "Above 1 makes repetition less likely."),
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's score each time it was generated."
    ),
    presence_penalty: float = option(
        0.0, "Subtracted from the score of every token generated before."
    ),
    logit_bias: list[str] | None = option(
        None, "Added to a token's score; repeatable.", metavar="ID=BIAS"
    ),
    ignore_eos: bool = option(False, "Do not end at the end-of-text token.", "--ignore-eos"),
    min_tokens: int | None = count(None, "Minimum new tokens."),
    stop: list[str] | None = option(None, "Stop before this text; repeatable."),
    seed: int | None = option(None, "Random seed.", shown="random"),
    n: int = option(1, "Continuations of each prompt.", "--samples", "-n"),
    choices: str | None = option(
        None, "Generate exactly one of these; spaces are significant.", metavar="A,B,…"
    ),
    regex: str | None = option(
        None, "Regular expression that the whole text must match.", metavar="PATTERN"
    ),
    json_schema: Path | None = option(
        None, "JSON schema that the text must follow.", metavar="FILE"
    ),
    banned: list[str] | None = option(None, "Text never to generate; repeatable."),
    beams: int = option(1, "Number of beams; more than 1 enables beam search."),
    length_penalty: float | None = option(
        None, "Beams are scored by log p / length^penalty.", shown="1"
    ),
    speculate: bool = option(
        False, "Prompt-lookup decoding: the same greedy text, faster.", "--speculate"
    ),
    parse_special: bool = option(
        False, "Parse control tokens such as <|endoftext|> in the prompt.", "--parse-special"
    ),
    features: Path | None = option(
        None, ".npy file of feature vectors to describe (caption-small).", metavar="FILE"
    ),
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    json: opt.Json = False,
) -> None:
    """Continue prompts with a GPT.

    A single prompt streams; several run as one batch.

    Example: malmoi generate --model runs/tiny-gpt --temperature 0.8 "The state of"
    """
    if length_penalty is not None and beams == 1:
        raise UsageError("--length-penalty scores beams: give --beams 2 or more with it.")
    if temperature is None and (beams > 1 or speculate):
        temperature = 0.0
    if features is not None:
        if texts:
            raise UsageError("--features takes no prompt: omit the text.")
        _describe(open_model(model, device, dtype), features, max_new_tokens, json)
        return
    prompts = whole_texts(texts)
    options = given(locals(), *OPTIONS)
    if choices:
        options["choices"] = choices.split(",")
    if logit_bias:
        options["logit_bias"] = dict(map(_token_bias, logit_bias))
    if json_schema:
        options["json_schema"] = read_object(json_schema)
    lm = open_model(model, device, dtype)
    _note_empty(lm, prompts)
    if len(prompts) > 1 or n > 1 or json:
        _write_all(lm, prompts, options, json)
        return
    for piece in lm.stream(prompts[0], **options):
        print(piece, end="", flush=True)
    print()


def _token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(
            "--logit-bias takes a token's id and a number, such as 50256=-100, not {text!r}.",
            text=text,
        ) from None


def _describe(lm: "Model", features: Path, max_new_tokens: int, json: bool) -> None:
    from malmoi.training.data.captions import open_features

    texts = lm.describe(open_features(features), max_new_tokens=max_new_tokens)
    for row, text in enumerate(texts, start=1):
        print_json({"row": row, "text": text}) if json else print_result(one_line(text))


def _note_empty(lm: "Model", prompts: list[str]) -> None:
    """Prints on stderr which token an empty prompt starts from; a model without one refuses it."""
    from malmoi.inference.prompt import start_token

    if "generate" in lm.abilities and not all(
        lm.tokenizer.encode(text, specials=False).tokens for text in prompts
    ):
        mark = lm.tokenizer.token(start_token(lm.tokenizer))
        note(msg("The prompt is empty, so the text starts after {mark}.", mark=mark))


def _write_all(lm: "Model", prompts: list[str], options: dict[str, Any], json: bool) -> None:
    texts = lm.generate(prompts, **options)
    for i, (prompt, some) in enumerate(zip(prompts, texts, strict=True)):
        for j, text in enumerate([some] if options["n"] == 1 else some):
            if json:
                print_json({"prompt": prompt, "text": text})
            else:
                print_result(f"---\n{text}" if i or j else text)
