"""The base of what `malmoi`'s functions return: frozen records that convert to plain values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

PlainValue: TypeAlias = (
    str | int | float | bool | list["PlainValue"] | dict[str, "PlainValue"] | None
)


class Result:
    """The base of results: write `@dataclass(frozen=True, repr=False)` on a subclass."""

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if f.repr)  # type: ignore[arg-type]
        values = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in shown)
        return f"{type(self).__name__}({values})"

    def _repr_html_(self) -> str:
        """The fields as a small table, for notebooks."""
        shown = [f for f in fields(self) if f.repr]  # type: ignore[arg-type]
        values = [(f.name, getattr(self, f.name)) for f in shown]
        return fact_table(
            type(self).__name__,
            [(name, v if isinstance(v, str | Mapping) else _short(v)) for name, v in values],
        )

    def to_dict(self) -> dict[str, PlainValue]:
        """The fields as JSON values; a list of these makes a pandas table."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


def plain(value: object) -> PlainValue:
    """A value as JSON types: records and mappings as objects, sequences as lists."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Result):
        return value.to_dict()
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(one) for one in value]
    if callable(tolist := getattr(value, "tolist", None)):  # an array
        return plain(tolist())
    return str(value)


def _short(value: object) -> str:
    """Rounds numbers to four digits and cuts long sequences, so that a result fits on one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_short(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        shown = [_short(one) for one in value[:8]] + ["…"] * (len(value) > 8)
        opening, closing = "[]" if isinstance(value, list) else "()"
        comma = "," * (isinstance(value, tuple) and len(value) == 1)
        return opening + ", ".join(shown) + comma + closing
    return repr(value)


# ------------------------------------------------------------------ tables for notebooks

MAX_SHARES = 12  # bars of one table
CELL = "text-align:left;padding:1px 10px 1px 0;vertical-align:top"
BAR = "display:inline-block;height:0.7em;background:#4c78a8;vertical-align:baseline"
SHARE_CELL = f'<td style="{CELL}"><span style="{BAR};width:{{:.0f}}px"></span></td>'


def fact_table(title: str, facts: Iterable[tuple[str, object]]) -> str:
    """A title and rows of name and value; a mapping of numbers becomes a nested table."""
    rows = "".join(
        f'<tr><td style="{CELL}">{escape(name)}</td><td style="{CELL}">{_value(value)}</td></tr>'
        for name, value in facts
    )
    return f"<b>{escape(title)}</b><table>{rows}</table>"


def _value(value: object) -> str:
    if isinstance(value, Mapping) and value and all(map(_is_number, value.values())):
        return _numbers(value)
    return escape(str(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: Mapping[str, float]) -> str:
    """Numbers by name, the largest first; shares of one have bars."""
    ordered = sorted(values.items(), key=lambda one: -one[1])
    shares = all(0 <= value <= 1 for value in values.values())
    rows = "".join(
        f'<tr><td style="{CELL}">{escape(str(name))}</td><td style="{CELL}">{value:.4g}</td>'
        + (SHARE_CELL.format(100 * value) if shares else "")
        + "</tr>"
        for name, value in ordered[:MAX_SHARES]
    )
    more = len(ordered) - MAX_SHARES
    return f"<table>{rows}</table>" + (f"… {more} more" if more > 0 else "")
