"""What commands share: options, inputs, and results on stdout with the status on stderr.

A result is JSON lines, a table on a terminal, or tab-separated columns elsewhere; the status is in
the user's language.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from io import StringIO
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from malmoi.api.run_options import BuildOptions, LoadOptions
from malmoi.errors import UsageError, require_that
from malmoi.messages import Message, logger, msg, translate
from malmoi.pair import BERT, GPT, introduction
from malmoi.report.console import end_status, waiting
from malmoi.settings import Setting, parse_number, settings_of
from malmoi.system.storage import address

if TYPE_CHECKING:
    from malmoi import inference as inference  # its Model, which this package annotates

say = logger.info  # a line on the console that `run_command` attaches
note = logger.warning  # something the user should know
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
    return typer.Argument(default, help=help_, **settings)


def described(help_: str, *names: str, shown: str | None = None, **settings: Any) -> Any:
    """An option in a type, to be shared by commands or to be required."""
    return typer.Option(*names, help=help_, show_default=shown or True, **settings)


@dataclass(frozen=True)
class RecordOptions:
    """The options of a record's settings, in the place of one parameter of a command."""

    settings: Mapping[str, Setting]
    defaults: Mapping[str, Any]  # the command's own

    def parameters(self) -> list[Parameter]:
        return [
            Parameter(
                one.name,
                Parameter.KEYWORD_ONLY,
                annotation=_typed(one),
                default=False if one.kind is bool else None,
            )
            for one in self.settings.values()
        ]

    def collect(self, values: dict[str, Any]) -> dict[str, Any]:
        """Removes the options from a command's values, and returns those that were given."""
        found = dict(self.defaults)
        for name, one in self.settings.items():
            value = values.pop(name)
            if value is not None and value != [] and (value is not False or one.kind is not bool):
                found[name] = tuple(value) if isinstance(value, list) else value
        return found


def options_of(*records: type, names: str = "", **defaults: Any) -> Any:
    """The options of records: those of their settings that are options, or the ones named.

    The parameter that has it as its default gets a dict of the options that were given;
    `defaults` are the command's own.
    """
    known = settings_of(*records)
    chosen = names.split() or [name for name, one in known.items() if one.option]
    found = {name: known[name] for name in chosen}
    own = {n: replace(found[n], default=value, shown="") for n, value in defaults.items() if value}
    return RecordOptions(found | own, defaults)


def _typed(one: Setting) -> Any:
    kind = one.typed or _value_type(one.kind)
    return Annotated[kind if one.kind is bool else kind | None, _option(one)]


def _option(one: Setting) -> Any:
    """An option's names, help and default in words."""
    named = one.metavar or one.unit.upper()
    more: dict[str, Any] = {"metavar": one.bounded(named or "N") if one.bounds else named or None}
    if one.env:
        more |= {"envvar": one.env, "show_envvar": True}
    if one.unit:
        more["parser"] = duration if one.unit == "minutes" else seconds
    elif (one.typed or _value_type(one.kind)) is int:
        more["parser"] = whole_number
    elif get_origin(one.typed or one.kind) is Literal:
        more["autocompletion"] = _completion(get_args(one.typed or one.kind))
    names = one.flags or (f"--{one.name.replace('_', '-')}",)
    return typer.Option(*names, help=one.help, show_default=one.shown_default or False, **more)


def _value_type(kind: Any) -> Any:
    """The type of one value on the command line: of X | None, X; of a tuple of X, a list of X."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is tuple:
        return list[get_args(kind)[0]]  # type: ignore[misc]
    return str if get_origin(kind) is Literal else kind


def _completion(choices: tuple[str, ...]) -> Any:
    return lambda incomplete: [one for one in choices if one.startswith(incomplete)]


MODEL = "Model folder, or a hub id."
PART = "Do only this part of a folder's files, as one of several cluster jobs."
Model = Annotated[str, described(MODEL, "--model", "-m", metavar="DIR")]
Bert = Annotated[str | None, described(MODEL, "--model", "-m", shown=BERT, metavar="DIR")]
Gpt = Annotated[str | None, described(MODEL, "--model", "-m", shown=GPT, metavar="DIR")]
Out = Annotated[Path, described("Output folder.", "--out", "-o", metavar="DIR")]
Overwrite = Annotated[bool, _option(settings_of(BuildOptions)["overwrite"])]
LOADING = options_of(LoadOptions)  # device and dtype
Json = Annotated[bool, described("Print JSON, one object per line.", "--json")]
Set = Annotated[
    list[str] | None,
    described("Change any other setting; repeatable.", "--set", metavar="NAME=VALUE"),
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT…", help="Texts; omit them, or pass -, to read standard input."),
]
Task = Annotated[
    str | None,
    described("Task of the rows in --data (see malmoi tasks).", "--task", metavar="TASK"),
]


# ------------------------------------------------------------------ inputs


def parsed_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that were given; several choices or labels are comma-separated."""
    found = dict(columns)
    for name in ("choices", "label"):
        if name == "choices" in found or "," in found.get(name, ""):
            found[name] = tuple(found[name].split(","))
    return found


def complete_tasks(incomplete: str) -> Iterable[str]:
    from malmoi.evaluation.tasks import KIND_METRICS, TASKS

    return [name for name in (*KIND_METRICS, *TASKS) if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> Iterable[str]:
    from malmoi.training.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


# ------------------------------------------------------------------ models and settings


def load_torch() -> None:
    """Imports torch, which takes seconds, with a status message on a terminal."""
    with waiting("Starting"):
        import torch  # noqa: F401


def open_model(
    given: str | None, loading: Mapping[str, Any], default: str = ""
) -> "inference.Model":
    """Loads a model, or the default, and prints the notes of loading on stderr."""
    if given is None:
        note(introduction(default))
    path = given or default
    with waiting(msg("Loading {path}", path=path)):
        from malmoi.inference import load

        model = load(path, **loading)
    for sentence in model.notes:
        note(sentence)
    return model


def changes_of(settings: list[str] | None) -> dict[str, str]:
    """The changes given by --set, such as `train.lr=3e-4`."""
    changes = {}
    for text in settings or []:
        name, sign, value = text.partition("=")
        require_that(
            sign and name.strip(),
            "--set {text} is not NAME=VALUE; write for example --set train.lr=3e-4.",
            text=text,
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
        require_that(
            len(texts) % 2 == 0,
            "Pairs need an even number of texts; there are {texts}.",
            texts=len(texts),
        )
        return list(zip(texts[::2], texts[1::2], strict=True))
    return [
        _pair(number, line) if line.strip() else ("", "")
        for number, line in enumerate(_lines(_standard_input()), 1)
        if keep_blank or line.strip()
    ]


def _pair(number: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    require_that(
        tab,
        "Line {number} of standard input has no tab; write two texts with a tab between them.",
        number=number,
    )
    return first, second


def _lines(text: str) -> list[str]:
    """Lines end where an editor ends them; a text may have U+0085 or U+2028 within."""
    return [line.removesuffix("\n") for line in StringIO(text, newline=None)]


def _standard_input() -> str:
    require_that(
        sys.stdin is not None and not sys.stdin.isatty(),
        "There is no text: write one after the options, or pipe one in.",
    )
    content = sys.stdin.buffer.read()
    require_that(content.strip(), "There is no text: standard input is empty.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            "Standard input is not UTF-8: byte 0x{content:02x} in line {line}; convert it "
            "first, for example with: iconv -f EUC-KR -t UTF-8",
            content=content[error.start],
            line=content[: error.start].count(b"\n") + 1,
        ) from error


# ------------------------------------------------------------------ results and status


def print_result(text: object) -> None:
    """Prints a result on a line of its own, below a progress bar that is still on the terminal."""
    end_status()
    print(translate(text) if isinstance(text, Message) else text)


def print_one(as_json: bool, facts: Mapping[str, Any], text: object) -> None:
    """Prints one result: its facts as JSON, or a text."""
    print_json(facts) if as_json else print_result(text)


def print_json(value: Any) -> None:
    end_status()
    print(json.dumps(value, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows under their columns; an empty row separates groups.

    On a terminal the first column, a name to copy, is never wrapped; the last one gets the rest.
    """
    end_status()
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    print("\t".join(columns))
    for row in rows:
        if row:
            print("\t".join(one_line(str(cell)) for cell in row))


def print_rows(
    as_json: bool,
    facts: Iterable[Mapping[str, Any]],
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> None:
    """Prints several results: the facts of each as JSON, or all as a table."""
    if as_json:
        for one in facts:
            print_json(one)
    else:
        print_table(columns, rows)


def print_facts(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table of words rather than of data: all of it is translated."""
    print_table([*map(translate, columns)], [[translate(cell) for cell in row] for row in rows])


def one_line(text: str) -> str:
    """The text without line breaks and tabs, which would split a row."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _rich_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        last = number == len(columns) - 1
        table.add_column(translate(column), no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell))) for cell in row))
    Console().print(table)


def format_span(seconds: float) -> str:
    spans = {"{count} days": 86_400, "{count} hours": 3600, "{count} minutes": 60}
    for span, length in spans.items():
        if seconds >= 2 * length:
            return msg(span, count=f"{seconds / length:,.{int(seconds < 10 * length)}f}")
    return msg("{seconds:.0f} seconds", seconds=seconds)


def say_next(use: str, out: Path) -> None:
    """The commands that a finished run is used with; {} in `use` is its folder."""
    folder = shlex.quote(address(out))
    use = f"malmoi {use.format(folder)}"
    say("Next: {use}, malmoi serve -m {folder}, {out}/report.html", use=use, folder=folder, out=out)
