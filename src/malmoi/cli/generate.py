"""`malmoi generate`: continue prompts with a language model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from malmoi.cli import options as opt
from malmoi.cli.inputs import given, open_model, whole_texts
from malmoi.cli.options import option
from malmoi.cli.output import note, one_line, print_json
from malmoi.errors import UsageError
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
    max_new_tokens: Annotated[int, option("Maximum new tokens.")] = 40,
    temperature: Annotated[
        float | None,
        option("0 is greedy; above 1 is more random.", shown="1; 0 with --beams or --speculate"),
    ] = None,
    top_k: Annotated[int | None, option("Sample from the k most likely tokens only.")] = None,
    top_p: Annotated[
        float | None, option("Sample from the smallest set of tokens whose probabilities reach p.")
    ] = None,
    min_p: Annotated[
        float | None, option("Sample from tokens at least this many times as likely as the best.")
    ] = None,
    repetition_penalty: Annotated[float, option("Above 1 makes repetition less likely.")] = 1.0,
    frequency_penalty: Annotated[
        float, option("Subtracted from a token's score each time it was generated.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, option("Subtracted from the score of every token generated before.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, option("Added to a token's score; repeatable.", metavar="ID=BIAS")
    ] = None,
    ignore_eos: Annotated[
        bool, option("Do not end at the end-of-text token.", "--ignore-eos")
    ] = False,
    min_tokens: Annotated[int | None, option("Minimum new tokens.")] = None,
    stop: Annotated[list[str] | None, option("Stop before this text; repeatable.")] = None,
    seed: Annotated[int | None, option("Random seed.", shown="another each time")] = None,
    n: Annotated[int, option("Continuations of each prompt.", "--samples", "-n")] = 1,
    choices: Annotated[
        str | None, option("Generate exactly one of these; spaces count.", metavar="A,B,…")
    ] = None,
    regex: Annotated[
        str | None, option("Regular expression that the whole text must match.", metavar="PATTERN")
    ] = None,
    json_schema: Annotated[
        Path | None, option("JSON schema that the text must follow.", metavar="FILE")
    ] = None,
    banned: Annotated[list[str] | None, option("Text never to generate; repeatable.")] = None,
    beams: Annotated[int, option("More than 1: beam search.")] = 1,
    length_penalty: Annotated[
        float | None, option("Beams are scored by log p / length^penalty.", shown="1")
    ] = None,
    speculate: Annotated[
        bool, option("Prompt-lookup decoding: the same greedy text, faster.", "--speculate")
    ] = False,
    parse_special: Annotated[
        bool, option("Read control tokens such as <|endoftext|> in the prompt.", "--parse-special")
    ] = False,
    features: Annotated[
        Path | None, option("Rows of a .npy file to write about (caption-small).", metavar="FILE")
    ] = None,
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
            raise UsageError("--features are written about without a prompt: leave the text out.")
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
            f"--logit-bias takes a token's id and a number, such as 50256=-100, not {text!r}."
        ) from None


def _describe(lm: "Model", features: Path, max_new_tokens: int, json: bool) -> None:
    from malmoi.training.data.captions import open_features

    texts = lm.describe(open_features(features), max_new_tokens=max_new_tokens)
    for row, text in enumerate(texts, start=1):
        print_json({"row": row, "text": text}) if json else print(one_line(text))


def _note_empty(lm: "Model", prompts: list[str]) -> None:
    """Prints on stderr which token an empty prompt starts from; a model without one refuses it."""
    from malmoi.inference.prompt import start_token

    if "generate" in lm.abilities and not all(
        lm.tokenizer.encode(text, specials=False).tokens for text in prompts
    ):
        mark = lm.tokenizer.token(start_token(lm.tokenizer))
        note(f"The prompt is empty, so the text starts after {mark}.")


def _write_all(lm: "Model", prompts: list[str], options: dict[str, Any], json: bool) -> None:
    texts = lm.generate(prompts, **options)
    for i, (prompt, some) in enumerate(zip(prompts, texts, strict=True)):
        for j, text in enumerate([some] if options["n"] == 1 else some):
            if json:
                print_json({"prompt": prompt, "text": text})
            else:
                print("---" if i or j else "", text, sep="\n" if i or j else "")
