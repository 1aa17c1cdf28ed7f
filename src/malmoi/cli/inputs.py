"""Inputs of commands: tasks and columns, models, settings, texts of standard input."""

import sys
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

from malmoi.cli.options import duration
from malmoi.cli.output import note
from malmoi.errors import UsageError
from malmoi.messages import msg
from malmoi.pair import introduction
from malmoi.report.console import waiting

if TYPE_CHECKING:
    from malmoi.inference import Model


def parsed_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that were given; several choices or labels are comma-separated."""
    found = dict(columns)
    for name in ("choices", "label"):
        if name == "choices" in found or "," in found.get(name, ""):
            found[name] = tuple(found[name].split(","))
    return found


def complete_tasks(incomplete: str) -> Iterable[str]:
    """Shell completion of task names."""
    from malmoi.evaluation.tasks import KIND_METRICS, TASKS

    return [name for name in (*KIND_METRICS, *TASKS) if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> Iterable[str]:
    """Shell completion of recipe names."""
    from malmoi.training.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


# ------------------------------------------------------------------ models and settings


def load_torch() -> None:
    """Imports torch, which takes seconds, with a status message on a terminal."""
    with waiting("Starting"):
        import torch  # noqa: F401


def open_model(
    given: str | None, device: str | None, dtype: str | None, default: str = ""
) -> "Model":
    """Loads a model, or the default, and prints the notes of loading on stderr."""
    if given is None:
        note(introduction(default))
    path = given or default
    with waiting(msg("Loading {path}", path=path)):
        from malmoi.inference import load

        model = load(path, device=device, dtype=dtype)
    for sentence in model.notes:
        note(sentence)
    return model


def changes_of(settings: list[str] | None) -> dict[str, str]:
    """The changes given by --set, such as `train.lr=3e-4`."""
    changes = {}
    for text in settings or []:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise UsageError(
                "--set {text} is not NAME=VALUE; write for example --set train.lr=3e-4.", text=text
            )
        name, value = name.strip(), value.strip()
        changes[name] = f"{duration(value):g}" if name == "train.minutes" else value
    return changes


# ------------------------------------------------------------------ texts


def whole_texts(texts: list[str] | None) -> list[str]:
    """The texts of the command line; else all of standard input as one text."""
    return texts if texts and texts != ["-"] else [_standard_input().rstrip("\r\n")]


def input_lines(texts: list[str] | None, *, keep_blank: bool = False) -> list[str]:
    """The texts of the command line; else the lines of standard input, blank ones on request."""
    if texts and texts != ["-"]:
        return texts
    return [line for line in _lines(_standard_input()) if keep_blank or line.strip()]


def input_pairs(texts: list[str] | None, *, keep_blank: bool = False) -> list[tuple[str, str]]:
    """Arguments two by two; else lines of two texts with a tab between."""
    if texts and texts != ["-"]:
        if len(texts) % 2:
            raise UsageError(
                "Pairs need an even number of texts; there are {texts}.", texts=len(texts)
            )
        return list(zip(texts[::2], texts[1::2], strict=True))
    return [
        _pair(number, line) if line.strip() else ("", "")
        for number, line in enumerate(_lines(_standard_input()), 1)
        if keep_blank or line.strip()
    ]


def _pair(number: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise UsageError(
            "Line {number} of standard input has no tab; write two texts with a tab between them.",
            number=number,
        )
    return first, second


def _lines(text: str) -> list[str]:
    """Lines end where an editor ends them; a text may have U+0085 or U+2028 within."""
    return [line.removesuffix("\n") for line in StringIO(text, newline=None)]


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("There is no text: write one after the options, or pipe one in.")
    content = sys.stdin.buffer.read()
    if not content.strip():
        raise UsageError("There is no text: standard input is empty.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(
            "Standard input is not UTF-8: byte 0x{content:02x} in line {line}; convert it "
            "first, for example with: iconv -f EUC-KR -t UTF-8",
            content=content[error.start],
            line=line,
        ) from error
