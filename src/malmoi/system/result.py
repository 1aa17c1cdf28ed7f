"""The base of what `malmoi`'s functions return: frozen records that convert to plain values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

from malmoi.system.untrusted import is_a

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
        values = [(f.name, getattr(self, f.name)) for f in fields(self) if f.repr]  # type: ignore[arg-type]
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

MOST_NUMBERS = 12  # of one table
CELL = '<td style="text-align:left;padding:1px 10px 1px 0;vertical-align:top">{}</td>'
BAR = ' <span style="display:inline-block;height:0.7em;background:#4c78a8;width:{:.0f}px"></span>'


def fact_table(title: str, facts: Iterable[tuple[str, object]]) -> str:
    """A title and rows of name and value; a mapping of numbers becomes a nested table."""
    return f"<b>{escape(title)}</b>" + _table((name, _value(value)) for name, value in facts)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (CELL.format(escape(name)) + CELL.format(value) for name, value in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _value(value: object) -> str:
    """A value as HTML; of numbers by name, the largest first, shares of one with bars."""
    numbers = dict(value) if isinstance(value, Mapping) else {}
    if not numbers or not all(is_a(one, float) for one in numbers.values()):
        return escape(str(value))
    bar = BAR if all(0 <= one <= 1 for one in numbers.values()) else ""
    largest = sorted(numbers.items(), key=lambda one: -one[1])[:MOST_NUMBERS]
    more = f"… {len(numbers) - MOST_NUMBERS} more" if len(numbers) > MOST_NUMBERS else ""
    return _table((str(name), f"{one:.4g}" + bar.format(100 * one)) for name, one in largest) + more
