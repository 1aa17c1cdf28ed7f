"""`malmoi translate`: texts, or the lines of files, in another language."""

from pathlib import Path

from malmoi.cli import shared as cli
from malmoi.errors import require_that
from malmoi.system.paths import names_file


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
    device: cli.Device = None,
    dtype: cli.Dtype = None,
    json: cli.Json = False,
) -> None:
    """Translate texts, or every line of a file.

    Uses a model that was pre-trained on translations, or a GPT with --to.

    Example: malmoi translate --model runs/en-de "A dog runs on the beach."
    """
    lines = _lines(texts)
    opened = cli.open_model(model, device, dtype)
    if opened.config.encoder_depth:
        require_that(not to, "--to is for a GPT: this model translates into one language only.")
        some = [line for line in lines if line.strip()]
        translations = iter(opened.translate(some, beams=beams, length_penalty=length_penalty))
        found = [next(translations) if line.strip() else "" for line in lines]
    else:
        found = [opened.translate(line, to) if line.strip() else "" for line in lines]
    for line, text in zip(lines, found, strict=True):
        cli.print_json({"text": line, "translation": text}) if json else cli.print_result(
            cli.one_line(text)
        )


def _lines(texts: list[str] | None) -> list[str]:
    """The texts, the lines of those that are files, or the lines of standard input."""
    from malmoi.text.rows import text_lines

    found: list[str] = []
    for text in cli.input_lines(texts, keep_blank=True):
        if names_file(text):
            found += [line for _, line in text_lines(Path(text))]
        else:
            found.append(text)
    return found
