"""How a table's file separates and quotes its fields."""

import csv
import re
from collections import Counter
from pathlib import Path

from malmoi.text.lines import SAMPLE_BYTES, decode_sample, open_bytes


class UnquotedTabs(csv.excel_tab):
    """Tabs between fields that are never quoted, as in GLUE and other public sets."""

    quoting = csv.QUOTE_NONE


class Semicolons(csv.excel):
    """Semicolons between quoted fields: Excel's CSV where the comma is in numbers."""

    delimiter = ";"


LONGEST_COLUMN_NAME = 200  # in characters; survey questions are long names
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


def missing_header(path: Path, dialect: Dialect) -> list[str] | None:
    """column1, column2… if the first line of a table is a row; None if it names the columns.

    It is a row if it has a long text or a value that occurs repeatedly below it.
    """
    sample, _ = _sample(path)
    rows = [row for row in csv.reader(sample.splitlines(keepends=True), dialect) if row]
    first = rows[0] if rows else []
    if first == [str(number) for number in range(len(first))]:  # as pandas numbers columns
        return None
    counts = [Counter(column) for column in zip(*rows[1:], strict=False)]
    pairs = zip(first, counts, strict=False)
    again = any(cell.strip() and count[cell] > 1 for cell, count in pairs)
    long = any(len(cell) > LONGEST_COLUMN_NAME for cell in first)
    return unnamed_columns(len(first)) if again or long else None


def unnamed_columns(count: int) -> list[str]:
    """The names that columns of a table without a header get."""
    return [f"column{number}" for number in range(1, count + 1)]


def _sample(path: Path) -> tuple[str, str]:
    """The first whole lines of a file, and the very first."""
    with open_bytes(path) as stream:
        sample = stream.read(SAMPLE_BYTES)
    text = decode_sample(sample)[1].replace("\r\n", "\n").lstrip("\ufeff")
    whole = text if len(sample) < SAMPLE_BYTES else text[: text.rfind("\n") + 1]
    return whole, whole.partition("\n")[0]


def _even(sample: str, dialect: Dialect) -> bool:
    """Whether every row has the header's number of fields, except a truncated last one."""
    sizes = [len(row) for row in csv.reader(sample.splitlines(keepends=True), dialect) if row]
    return bool(sizes) and all(size == sizes[0] for size in sizes[:-1])
