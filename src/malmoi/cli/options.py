"""Options that commands share, and reading texts from arguments or standard input."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.cli.output import note
from malmoi.config import parse_number
from malmoi.errors import UsageError
from malmoi.report.console import waiting

if TYPE_CHECKING:
    from malmoi.evaluation.tasks import Task
    from malmoi.inference import Model

MINUTES = {"s": 1 / 60, "m": 1.0, "min": 1.0, "h": 60.0, "d": 1440.0}


def whole_number(text: object) -> int:
    """250000, 10M, 1.5B or 1e9."""
    value = parse_number(str(text))
    if not isinstance(value, float) or not value.is_integer():
        raise typer.BadParameter(f"{text!r} is not a whole number such as 250000, 10M or 1.5B.")
    return int(value)


def duration(text: str) -> float:
    """Minutes: 3, 3m, 90s, 1.5h."""
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip())
    unit = MINUTES.get(match[2] or "m") if match else None
    value = parse_number(match[1]) if match else text
    if unit is None or not isinstance(value, float):
        raise typer.BadParameter(f"{text!r} is not a duration such as 3, 3m, 90s or 1.5h.")
    return value * unit


def number_option(help_: str) -> Any:
    """An option that takes 10M as well as 10000000."""
    return typer.Option(help=help_, parser=whole_number, metavar="N")


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Model folder, or a hub id.", metavar="DIR")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Output folder.", metavar="DIR")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace what --out holds instead of refusing.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1… or mps.", metavar="NAME", show_default="a GPU if there is one"
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="fp32, bf16, fp16, or int8 on a CPU.", metavar="NAME", show_default="as stored"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
SeedOption = Annotated[int | None, typer.Option(help="Random seed.", show_default="0")]
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Track the run too with tensorboard, wandb, mlflow or trackio; repeatable.",
        metavar="NAME",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change any other setting; repeatable.", metavar="NAME=VALUE"),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="Budget as a time: 3, 90s, 2h.", parser=duration, metavar="MINUTES"),
]
StepsOption = Annotated[int | None, number_option("Budget in steps.")]
EpochsOption = Annotated[
    float | None, typer.Option(help="Budget in epochs of the text.", metavar="N")
]
TokensOption = Annotated[int | None, number_option("Budget in tokens.")]
TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT…", help="Texts; omit them, or pass -, to read standard input."),
]

# ------------------------------------------------------------------ rows of a task

TaskOption = Annotated[
    str | None, typer.Option(help="Task of the rows in --data (see malmoi tasks).", metavar="TASK")
]
TextOption = Annotated[
    str | None, typer.Option("--text", help="Column of the text.", metavar="COLUMN")
]
PairOption = Annotated[
    str | None,
    typer.Option("--pair", help="Column of a second text or a context.", metavar="COLUMN"),
]
LabelOption = Annotated[
    str | None,
    typer.Option(
        "--label",
        help="Column of the label; for multilabel also A,B,… holding 0 and 1.",
        metavar="COLUMN",
    ),
]
SeparatorOption = Annotated[
    str | None,
    typer.Option(
        "--separator",
        help="Separator between a row's labels (multilabel).",
        metavar="TEXT",
        show_default=",",
    ),
]
ChoicesOption = Annotated[
    str | None,
    typer.Option("--choices", help="Columns of the choices, comma-separated.", metavar="A,B,…"),
]
SkipOption = Annotated[
    bool, typer.Option("--skip-bad", help="Skip bad rows instead of stopping at the first.")
]


def chosen_task(name: str, **columns: Any) -> "Task":
    """A named task, or one on the user's columns: text, pair, label, choices."""
    from malmoi.evaluation.guess import task_on_columns

    return task_on_columns(name, **split_columns(columns))


def split_columns(columns: Mapping[str, str | None]) -> dict[str, Any]:
    """The columns that were given; several choices or labels are comma-separated."""
    found: dict[str, Any] = {key: value for key, value in columns.items() if value is not None}
    if "choices" in found:
        found["choices"] = tuple(found["choices"].split(","))
    if "," in found.get("label", ""):
        found["label"] = tuple(found["label"].split(","))
    return found


def complete_tasks(incomplete: str) -> Iterable[str]:
    """Shell completion of task names."""
    from malmoi.evaluation.tasks import KINDS, TASKS

    return [name for name in (*KINDS, *TASKS) if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> Iterable[str]:
    """Shell completion of recipe names."""
    from malmoi.training.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


# ------------------------------------------------------------------ models, settings, output


def load_torch() -> None:
    """Imports torch, which takes seconds, and says so on a terminal."""
    with waiting("Starting"):
        import torch  # noqa: F401


def open_model(path: str, device: str | None, dtype: str | None) -> "Model":
    """Loads a model and prints the notes of loading on stderr."""
    with waiting(f"Loading {path}"):
        from malmoi.inference import load

        model = load(path, device=device, dtype=dtype)
    for sentence in model.notes:
        note(sentence)
    return model


def given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def changes_of(settings: list[str] | None) -> dict[str, str]:
    """The changes given by --set, such as `train.lr=3e-4`."""
    changes = {}
    for text in settings or []:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise UsageError(
                f"--set {text} is not NAME=VALUE; write for example --set train.lr=3e-4."
            )
        changes[name.strip()] = value.strip()
    return changes


# ------------------------------------------------------------------ texts


def whole_texts(texts: list[str] | None) -> list[str]:
    """The texts of the command line; else all of standard input as one text."""
    return texts if texts and texts != ["-"] else [_standard_input().rstrip("\r\n")]


def input_lines(texts: list[str] | None, *, keep_blank: bool = False) -> list[str]:
    """The texts of the command line; else the lines of standard input, blank ones on request."""
    if texts and texts != ["-"]:
        return texts
    return [line for line in _standard_input().splitlines() if keep_blank or line.strip()]


def input_pairs(texts: list[str] | None, *, keep_blank: bool = False) -> list[tuple[str, str]]:
    """Arguments two by two; else lines of two texts with a tab between."""
    if texts and texts != ["-"]:
        if len(texts) % 2:
            raise UsageError(f"Pairs need an even number of texts; there are {len(texts)}.")
        return list(zip(texts[::2], texts[1::2], strict=True))
    return [
        _pair(number, line) if line.strip() else ("", "")
        for number, line in enumerate(_standard_input().splitlines(), 1)
        if keep_blank or line.strip()
    ]


def _pair(number: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise UsageError(
            f"Line {number} of standard input has no tab; write two texts with a tab between them."
        )
    return first, second


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
            f"Standard input is not UTF-8: byte 0x{content[error.start]:02x} in line {line}; "
            "convert it first, for example with: iconv -f EUC-KR -t UTF-8"
        ) from error
