"""Rows of data files: tables, JSON lines, JSON; compressed, in any known encoding."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.system.untrusted import parse
from malmoi.text.formats import whole_rows
from malmoi.text.lines import COMPRESSED, SAMPLE_BYTES, decode_lines, encoding_of, open_bytes


class BadRow(Exception):
    """A row that cannot be used: its place and the reason."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}")
        self.place = place


class NoColumn(BadRow):
    """A missing column: for the first row a wrong column name, later a bad row."""

    def __init__(self, place: str, name: str, known: Iterable[str]) -> None:
        super().__init__(place, f"there is no column {name!r}")
        self.sentence = f"{place} has no column {name!r}.{nearest(name, known)}"


@dataclass(frozen=True)
class DataRow:
    """One row's values by column name; a missing column raises a clear error."""

    values: Mapping[str, Any]
    place: str  # file:row

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise NoColumn(self.place, name, self.values)
        return self.values[name]

    def text(self, name: str) -> str:
        value = self[name]
        if not isinstance(value, str):
            raise BadRow(self.place, f"{name!r} holds no text but {value!r:.40}")
        return value

    def label(self, *names: str) -> str | None:
        """The first of these columns that exists, as a string, or None (a test set)."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            return None
        value = self[name]
        if value is None or str(value).strip() == "":
            raise BadRow(self.place, f"the label in {name!r} is missing")
        if isinstance(value, list | dict):
            raise BadRow(
                self.place,
                f"{name!r} holds {value!r:.40}, and this task has one label a row; for several "
                "labels take the kind multilabel",
            )
        return str(value).strip()

    def number(self, name: str) -> float | None:
        found = self.label(name)
        if found is None:
            return None
        try:
            value = float(found)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadRow(self.place, f"{name!r} must be a number, not {found!r:.40}")
        return value

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        if value is not None and value != int(value):
            raise BadRow(self.place, f"{name!r} must be a whole number, not {value:g}")
        return None if value is None else int(value)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields every line of a text file with its number; undecodable bytes are an error."""

    def bad(number: int, why: str) -> None:
        raise MalmoiError(f"{path}:{number} is {why}.")

    with open_bytes(path) as stream:
        encoding = encoding_of(stream.read(SAMPLE_BYTES))
    with open_bytes(path) as stream:
        parts: list[str] = []
        for number, text, ends in decode_lines(stream, encoding, bad):
            parts.append(text)
            if ends:
                yield number, "".join(parts)
                parts = []
        if parts:
            yield number, "".join(parts)


def table_rows(
    path: Path, header: Sequence[str] | None = None, *, quoted: bool = False
) -> Iterator[DataRow]:
    """Yields tab-separated rows, never quoted (GLUE and others), or comma-separated quoted ones."""
    csv.field_size_limit(1 << 30)
    texts = (text + "\n" for _, text in text_lines(path))
    reader = (
        csv.reader(texts) if quoted else csv.reader(texts, delimiter="\t", quoting=csv.QUOTE_NONE)
    )
    rows = whole_rows(reader, path)
    names = list(header) if header is not None else [name.strip() for name in next(rows, [])]
    _check_header(path, names)
    before = reader.line_num
    for values in rows:
        # a quoted field may span lines
        place = f"{path}:{before + 1}"
        several = reader.line_num - before > 1
        before = reader.line_num
        if len(values) != len(names) and values:
            quote = f" (a quote that opens here goes on to line {before})" if several else ""
            yield _broken(place, f"{len(values)} fields where there should be {len(names)}{quote}")
        elif values:
            yield DataRow(dict(zip(names, values, strict=True)), place)


def _check_header(path: Path, names: Sequence[str]) -> None:
    twice = [name for i, name in enumerate(names) if name and name in names[:i]]
    if twice:
        raise MalmoiError(
            f"{path}:1 has two columns {twice[0]!r}; which one is meant cannot be told: rename one."
        )


@dataclass(frozen=True)
class BrokenRow(DataRow):
    """A malformed row: any access raises the error."""

    why: str = ""

    def __getitem__(self, name: str) -> Any:
        raise BadRow(self.place, self.why)


def _broken(place: str, why: str) -> DataRow:
    return BrokenRow({}, place, why)


def json_line_rows(path: Path) -> Iterator[DataRow]:
    """Yields one row per line of a JSON lines file."""
    return parse_json_rows(text_lines(path), str(path))


def parse_json_rows(numbered: Iterable[tuple[int, str]], name: str) -> Iterator[DataRow]:
    """Parses numbered JSON lines from memory; `name` is their source."""
    for number, text in numbered:
        if not text.strip():
            continue
        place = f"{name}:{number}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield _broken(place, f"not JSON: {error}")
            continue
        yield (
            DataRow(value, place)
            if isinstance(value, dict)
            else _broken(place, "not a JSON object")
        )


def json_value(path: Path) -> Any:
    """Reads a file that is one JSON value, such as SQuAD's."""
    text = "\n".join(line for _, line in text_lines(path))
    return parse(text, str(path))


def json_array_rows(path: Path) -> Iterator[DataRow]:
    """Yields the objects of a file that is one JSON array; rows are numbered from 1."""
    values = json_value(path)
    if not isinstance(values, list):
        raise MalmoiError(f"{path} must hold a JSON array.")
    for number, value in enumerate(values, start=1):
        place = f"{path}:{number}"
        yield (
            DataRow(value, place)
            if isinstance(value, dict)
            else _broken(place, "not a JSON object")
        )


ROW_READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".tsv": table_rows,
    ".txt": table_rows,
    ".csv": lambda path: table_rows(path, quoted=True),
    ".jsonl": json_line_rows,
    ".json": json_array_rows,
}


def any_rows(path: Path) -> Iterator[DataRow]:
    """Reads a file's rows by its suffix."""
    bare = path.with_suffix("") if path.suffix in COMPRESSED else path
    if bare.suffix not in ROW_READERS:
        kinds = f"{' '.join(ROW_READERS)}, also {' '.join(COMPRESSED)}"
        raise UsageError(f"{path} is of no known kind: it should end in one of {kinds}.")
    return ROW_READERS[bare.suffix](path)
