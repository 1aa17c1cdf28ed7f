"""How commands declare options, and the options that several of them share."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.config import parse_number
from malmoi.messages import msg

MINUTES = {"s": 1 / 60, "m": 1.0, "min": 1.0, "h": 60.0, "d": 1440.0}


def whole_number(text: object) -> int:
    """250000, 10M, 1.5B or 1e9."""
    value = parse_number(str(text))
    if not isinstance(value, float) or not value.is_integer():
        raise typer.BadParameter(
            msg("{text!r} is not a whole number such as 250000, 10M or 1.5B", text=text)
        )
    return int(value)


def duration(text: object) -> float:
    """Minutes: 3, 3m, 90s, 1.5h."""
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", str(text).strip())
    unit = MINUTES.get(match[2] or "m") if match else None
    value = parse_number(match[1]) if match else ""
    if unit is None or not isinstance(value, float):
        raise typer.BadParameter(
            msg("{text!r} is not a duration such as 3, 3m, 90s or 1.5h", text=text)
        )
    return value * unit


def seconds(text: object) -> float:
    """Seconds: 30, 30s, 5m."""
    return 60 * duration(text if str(text)[-1:].isalpha() else f"{text}s")


def option(default: Any, help_: str, *names: str, shown: str | None = None, **settings: Any) -> Any:
    """An option as a parameter's default; `shown` describes a default that is not a constant."""
    return typer.Option(default, *names, help=help_, show_default=shown or True, **settings)


def count(default: Any, help_: str, *names: str, shown: str | None = None) -> Any:
    """An option for a number that may be large: 250000, 10M."""
    return option(default, help_, *names, shown=shown, parser=whole_number, metavar="N")


def argument(default: Any, help_: str, **settings: Any) -> Any:
    """An argument as a parameter's default."""
    return typer.Argument(default, help=help_, **settings)


def described(help_: str, *names: str, shown: str | None = None, **settings: Any) -> Any:
    """An option in a type, to be shared by commands or to be required."""
    return typer.Option(*names, help=help_, show_default=shown or True, **settings)


Model = Annotated[str, described("Model folder, or a hub id.", "--model", "-m", metavar="DIR")]
Out = Annotated[Path, described("Output folder.", "--out", "-o", metavar="DIR")]
Overwrite = Annotated[bool, described("Overwrite --out if it exists.", "--overwrite")]
Device = Annotated[
    str | None,
    described(
        "cpu, cuda, cuda:1… or mps.", "--device", shown="a GPU if there is one", metavar="NAME"
    ),
]
Dtype = Annotated[
    str | None,
    described("fp32, bf16, fp16, or int8 on a CPU.", "--dtype", shown="as stored", metavar="NAME"),
]
Json = Annotated[bool, described("Print JSON, one object per line.", "--json")]
Seed = Annotated[int | None, described("Random seed.", "--seed", shown="0")]
Track = Annotated[
    list[str] | None,
    described(
        "Also log the run to tensorboard, wandb, mlflow or trackio; repeatable.",
        "--track",
        metavar="NAME",
    ),
]
Set = Annotated[
    list[str] | None,
    described("Change any other setting; repeatable.", "--set", metavar="NAME=VALUE"),
]
Minutes = Annotated[
    float | None,
    described("Budget as a time: 3, 90s, 2h.", "--minutes", parser=duration, metavar="MINUTES"),
]
Steps = Annotated[
    int | None, described("Budget in steps.", "--steps", parser=whole_number, metavar="N")
]
Epochs = Annotated[
    float | None, described("Budget in epochs of the text.", "--epochs", metavar="N")
]
Tokens = Annotated[
    int | None, described("Budget in tokens.", "--tokens", parser=whole_number, metavar="N")
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT…", help="Texts; omit them, or pass -, to read standard input."),
]

# ------------------------------------------------------------------ rows of a task

Task = Annotated[
    str | None,
    described("Task of the rows in --data (see malmoi tasks).", "--task", metavar="TASK"),
]
Text = Annotated[str | None, described("Column of the text.", "--text", metavar="COLUMN")]
Pair = Annotated[
    str | None, described("Column of a second text or a context.", "--pair", metavar="COLUMN")
]
Label = Annotated[
    str | None,
    described(
        "Column of the label; for multilabel also A,B,… holding 0 and 1.",
        "--label",
        metavar="COLUMN",
    ),
]
Separator = Annotated[
    str | None,
    described(
        "Separator between a row's labels (multilabel).", "--separator", shown=",", metavar="TEXT"
    ),
]
Choices = Annotated[
    str | None, described("Columns of the choices, comma-separated.", "--choices", metavar="A,B,…")
]
SkipBad = Annotated[
    bool, described("Skip bad rows instead of stopping at the first.", "--skip-bad")
]
