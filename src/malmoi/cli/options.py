"""How commands declare options, and the options that several of them share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from malmoi.api.records import LoadOptions, RunOptions
from malmoi.messages import msg
from malmoi.pair import BERT, GPT
from malmoi.settings import Setting, parse_number, settings_of

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


def declared(record: type, name: str) -> Any:
    """An option in a type, as a record declares it."""
    return _option(settings_of(record)[name])


def _option(one: Setting) -> Any:
    """An option's names, help and default in words."""
    more: dict[str, Any] = {"metavar": one.metavar or one.unit.upper() or None}
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
Model = Annotated[str, described(MODEL, "--model", "-m", metavar="DIR")]
Bert = Annotated[str | None, described(MODEL, "--model", "-m", shown=BERT, metavar="DIR")]
Gpt = Annotated[str | None, described(MODEL, "--model", "-m", shown=GPT, metavar="DIR")]
Out = Annotated[Path, described("Output folder.", "--out", "-o", metavar="DIR")]
Overwrite = Annotated[bool, declared(RunOptions, "overwrite")]
Device = Annotated[str | None, declared(LoadOptions, "device")]
Dtype = Annotated[str | None, declared(LoadOptions, "dtype")]
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
