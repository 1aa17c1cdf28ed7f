"""How a table's file separates and quotes its fields."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.system.limits import MAX_LINE_CHARACTERS
from malmoi.text.column_names import LABEL_NAMES, TEXT_NAMES, label_name, unnamed_columns
from malmoi.text.lines import OnBadLine, read_lines, start_of


class UnquotedTabs(csv.excel_tab):
    """Tabs between fields that are never quoted, as in GLUE and other public sets."""

    quoting = csv.QUOTE_NONE


class Semicolons(csv.excel):
    """Semicolons between quoted fields: Excel's CSV where the comma is in numbers."""

    delimiter = ";"


LONGEST_COLUMN_NAME = 200  # in characters; survey questions are long names
NAMES_PER_TEXT = 3  # how many times longer than its column's name a text usually is
MAX_SHORTER = 0.05  # share of a column's texts that may be as short as its name
PUNCTUATION = re.compile(r"[.,!?;:…。！？]")
Dialect = type[csv.Dialect]
QuotedTabs = csv.excel_tab  # quoted where needed, as pandas and Excel write them
Commas = csv.excel
# a field that is quoted as a CSV writer would do it
FIELD = re.compile(r'(?:"(?:[^"]|"")*"|[^"\t\n]*)(?:\t|\n|\Z)')


def tab_dialect(path: Path) -> Dialect:
    """Detects whether a tab-separated file is quoted, by its quotes and numbers of fields."""
    sample, _ = _sample(path)
    if '"' not in sample:
        return UnquotedTabs
    at = 0
    while at < len(sample):
        found = FIELD.match(sample, at)
        if found is None or found.end() == at:
            return UnquotedTabs
        at = found.end()
    return QuotedTabs if _even(sample, QuotedTabs) else UnquotedTabs


def comma_dialect(path: Path) -> Dialect:
    """Detects semicolons: they split the rows evenly and commas do not."""
    sample, header = _sample(path)
    if ";" not in header or ("," in header and _even(sample, Commas)):
        return Commas
    return Semicolons if _even(sample, Semicolons) else Commas


def missing_header(path: Path, dialect: Dialect, named: Iterable[str] = ()) -> list[str] | None:
    """column1, column2… if the first line of a table is a row; None if it names the columns.

    A column of `named`, which the user or a model knows, decides if it stands in the first line.
    Otherwise each column votes: a label may be the name of its column ("spam"), so that one cell
    that occurs again below proves nothing beside another that is unlike its column.
    """
    first, *rows = _sample_rows(_sample(path)[0], dialect) or [[]]
    first = [label_name(cell) for cell in first]
    numbered = [str(number) for number in range(len(first))]  # as pandas numbers columns
    if first == numbered or not set(first).isdisjoint(named):
        return None
    whole = (map(label_name, row) for row in rows if len(row) == len(first))
    columns = zip(first, zip(*whole, strict=True), strict=False)
    votes = sum(_likeness(cell, below) for cell, below in columns)
    long = any(len(cell) > LONGEST_COLUMN_NAME for cell in first)
    return unnamed_columns(len(first)) if votes > 0 or long else None


def _likeness(cell: str, below: Sequence[str]) -> int:
    """1 if the first cell of a column is one of its values, -1 if it is its name, 0 if either."""
    counts = Counter(filter(None, below))
    if not cell or not counts:
        return 0
    if counts[cell] > 1:
        return 1
    signs = (
        cell.lower() in (*TEXT_NAMES, *LABEL_NAMES),
        not _is_number(cell) and all(map(_is_number, counts)),
        cell not in counts and min(counts.values()) > 1,
        _is_short_name(cell, list(counts)),
    )
    return -1 if any(signs) else 0


def _is_short_name(cell: str, texts: Sequence[str]) -> bool:
    """Whether a cell without punctuation is far shorter than nearly all texts of its column."""
    if PUNCTUATION.search(cell) or NAMES_PER_TEXT * len(cell) > median(map(len, texts)):
        return False
    return sum(len(text) <= len(cell) for text in texts) <= MAX_SHORTER * len(texts)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _sample(path: Path) -> tuple[str, str]:
    """The first whole lines of a file, and the very first."""
    sample, complete = start_of(path)
    text = sample.replace("\r\n", "\n")
    whole = text if complete else text[: text.rfind("\n") + 1]
    return whole, whole.partition("\n")[0]


def _even(sample: str, dialect: Dialect) -> bool:
    """Whether every row has the header's number of fields, except a truncated last one."""
    sizes = [len(row) for row in _sample_rows(sample, dialect)]
    return bool(sizes) and all(size == sizes[0] for size in sizes[:-1])


def _sample_rows(sample: str, dialect: Dialect) -> list[list[str]]:
    return [row for row in _table_reader(sample.splitlines(keepends=True), dialect) if row]


def _table_reader(lines: Iterable[str], dialect: Dialect) -> Any:
    """A csv.reader, whose fields may be as long as a line."""
    csv.field_size_limit(MAX_LINE_CHARACTERS)
    return csv.reader(lines, dialect)


def named_cells(
    path: Path, dialect: Dialect, bad: OnBadLine, names: Sequence[str] | None = None
) -> tuple[list[str], Iterator[tuple[int, int, list[str]]]]:
    """The columns of a table, and of each row its first line, its last line and its cells.

    Without `names`, the first row has them. A malformed row raises an error with its location.
    """
    rows = _cells(path, dialect, bad)
    if names is None:
        names = next(rows, (1, 1, []))[2]
    return list(map(label_name, names)), rows


def _cells(path: Path, dialect: Dialect, bad: OnBadLine) -> Iterator[tuple[int, int, list[str]]]:
    reader = _table_reader((text + "\n" for _, text in read_lines(path, bad)), dialect)
    before = 0
    try:
        for cells in reader:
            if cells:
                yield before + 1, reader.line_num, cells
            before = reader.line_num
    except csv.Error as error:
        raise MalmoiError(
            "{path}:{line_num} is not a valid row ({error}): fix it there, or save the file "
            "with plain newlines.",
            path=path,
            line_num=reader.line_num,
            error=str(error).partition(" - ")[0],
        ) from error
