"""Results on stdout: JSON lines, a table for eyes on a terminal, tab-separated columns
elsewhere.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    print("\t".join(columns))
    for row in rows:
        print("\t".join(one_line(str(cell)) for cell in row))


def one_line(text: str) -> str:
    """The text without line breaks and tabs, which would break a row apart."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _rich_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell))) for cell in row))
    Console().print(table)


def format_size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def format_span(seconds: float) -> str:
    """A time in words."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.{int(seconds < 10 * length)}f} {unit}"
    return f"{seconds:.0f} seconds"
