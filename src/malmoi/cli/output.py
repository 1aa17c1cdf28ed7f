"""Results on stdout: JSON lines, a table on a terminal, tab-separated columns elsewhere.

Status goes to stderr, in the user's language.
"""

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from malmoi.messages import Message, msg, translate
from malmoi.report.console import end_status

logger = logging.getLogger(__name__)


def say(sentence: str) -> None:
    """A status line, on the console that `run_command` attaches."""
    logger.info(sentence)


def note(sentence: str) -> None:
    """Something the user should know."""
    logger.warning(sentence)


def print_result(text: object, end: str = "\n") -> None:
    """Prints a result on a line of its own, below a progress bar that is still on the terminal."""
    end_status()
    print(translate(text) if isinstance(text, Message) else text, end=end)


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


def print_facts(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table of words rather than of data: its cells are translated too."""
    print_table(columns, [[translate(cell) for cell in row] for row in rows])


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


def format_count(count: float) -> str:
    """4385920 → 4.39M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"


def format_span(seconds: float) -> str:
    """A time in words."""
    for span, length in (
        ("{count} days", 86_400),
        ("{count} hours", 3600),
        ("{count} minutes", 60),
    ):
        if seconds >= 2 * length:
            return msg(span, count=f"{seconds / length:,.{int(seconds < 10 * length)}f}")
    return msg("{seconds:.0f} seconds", seconds=seconds)


def say_next(use: str, folder: str, out: Path) -> None:
    """The commands that a finished run is used with; `folder` is quoted for the shell."""
    say(
        msg(
            "Next: {use}, malmoi serve -m {folder}, {out}/report.html",
            use=use,
            folder=folder,
            out=out,
        )
    )
