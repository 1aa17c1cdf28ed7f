"""`malmoi generate`: continue prompts with a language model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmoi.cli import shared as cli
from malmoi.errors import UsageError, require_that
from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig
from malmoi.pair import GPT
from malmoi.system.untrusted import read_object

if TYPE_CHECKING:
    from malmoi.inference import Model


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
    device: cli.Device = None,
    dtype: cli.Dtype = None,
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
        _describe(cli.open_model(model, device, dtype, GPT), features, options, json)
        return
    prompts = cli.whole_texts(texts)
    _parse(options)
    lm = cli.open_model(model, device, dtype, GPT)
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
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(
            "--logit-bias takes a token's id and a number, such as 50256=-100, not {text!r}.",
            text=text,
        ) from None


def _describe(lm: "Model", features: Path, options: dict[str, Any], json: bool) -> None:
    from malmoi.training.data.captions import open_features

    limit = options.get("max_new_tokens", GenerationConfig.max_new_tokens)
    texts = lm.describe(open_features(features), max_new_tokens=limit)
    for row, text in enumerate(texts, start=1):
        cli.print_json({"row": row, "text": text}) if json else cli.print_result(cli.one_line(text))


def _note_empty(lm: "Model", prompts: list[str]) -> None:
    """Prints on stderr which token an empty prompt starts from; a model without one refuses it."""
    from malmoi.inference.prompt import start_token

    if "generate" in lm.abilities and not all(
        lm.tokenizer.encode(text, specials=False).tokens for text in prompts
    ):
        mark = lm.tokenizer.token(start_token(lm.tokenizer))
        cli.note("The prompt is empty, so the text starts after {mark}.", mark=mark)


def _write_all(lm: "Model", prompts: list[str], options: dict[str, Any], json: bool) -> None:
    texts = lm.generate(prompts, **options)
    for i, (prompt, some) in enumerate(zip(prompts, texts, strict=True)):
        for j, text in enumerate([some] if options.get("n", 1) == 1 else some):
            if json:
                cli.print_json({"prompt": prompt, "text": text})
            else:
                cli.print_result(f"---\n{text}" if i or j else text)
