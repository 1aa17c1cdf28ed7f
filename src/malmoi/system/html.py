"""Small HTML tables for notebooks, escaped and without external resources."""

from collections.abc import Iterable, Mapping
from html import escape

MAX_SHARES = 12  # bars of one table
CELL = "text-align:left;padding:1px 10px 1px 0;vertical-align:top"
BAR = "display:inline-block;height:0.7em;background:#4c78a8;vertical-align:baseline"


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
        + (f'<td style="{CELL}">{_bar(value)}</td>' if shares else "")
        + "</tr>"
        for name, value in ordered[:MAX_SHARES]
    )
    more = len(ordered) - MAX_SHARES
    return f"<table>{rows}</table>" + (f"… {more} more" if more > 0 else "")


def _bar(share: float) -> str:
    return f'<span style="{BAR};width:{100 * share:.0f}px"></span>'
