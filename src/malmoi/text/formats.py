"""What a document is in each format: plain text by one of four rules, Markdown, JSON, tables."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from malmoi.errors import MalmoiError, nearest
from malmoi.text.lines import SAMPLE_BYTES, OnBadLine, decode_lines, encoding_of, open_bytes

MAX_DOCUMENT_CHARACTERS = 1 << 24  # a longer document is split at a space
DOCUMENT_RULES = {
    "blank": "a blank line separates documents",
    "blanks": "two blank lines separate documents",
    "line": "every line is a document",
    "file": "the file is one document",
}


class FoundDocument(NamedTuple):
    """A document in a file: its text, its line or record, and its URL if it has one."""

    text: str
    line: int
    url: str = ""


FoundDocuments = Iterator[FoundDocument]


@dataclass(frozen=True)
class ReadOptions:
    """The rule for plain text ("auto": by file), the column or key, and callbacks."""

    rule: str
    column: str
    on_bad_line: OnBadLine
    on_rule: Callable[[str], None]


def read_plain(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads plain text, by the given rule or the one that fits the file."""
    with open_bytes(path) as stream:
        sample = stream.read(SAMPLE_BYTES)
    encoding = encoding_of(sample)
    rule = guess_rule(sample.decode(encoding, "replace")) if want.rule == "auto" else want.rule
    want.on_rule(rule)
    with open_bytes(path) as stream:
        yield from _by_rule(decode_lines(stream, encoding, want.on_bad_line), rule)


def read_markdown(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a Markdown file as one document, unless another rule was given."""
    rule = "file" if want.rule == "auto" else want.rule
    yield from read_plain(path, ReadOptions(rule, want.column, want.on_bad_line, want.on_rule))


def guess_rule(text: str) -> str:
    """Guesses the rule from the beginning of a text.

    No blank line: every line is a document. Short blocks in a long text (under 200 characters on
    average: verses, speeches) are parts of one document. Many single blank lines and a few double
    ones: paragraphs and documents.
    """
    gaps = [
        len(re.findall("\n", gap)) - 1
        for gap in re.findall(r"\n(?:[ \t\r]*\n)+(?=[ \t\r]*\S)", text.strip())
    ]
    if not gaps:
        return "line"
    average = len(text) / (len(gaps) + 1)
    if len(text) >= 1 << 16 and average < 200:
        return "file"
    double = sum(gap > 1 for gap in gaps)
    return (
        "blanks" if len(gaps) >= 100 and 0 < double * 20 <= len(gaps) and average < 500 else "blank"
    )


def _by_rule(read: Iterator[tuple[int, str, bool]], rule: str) -> FoundDocuments:
    """Joins lines into documents, stripped unless the file is one document."""
    parts: list[str] = []
    begun = 1
    size = 0
    blank = 0
    limit = {"blank": 1, "blanks": 2}.get(rule, 0)
    for number, text, ends in read:
        blank = 0 if text and not text.isspace() else blank + 1
        if (
            (limit and blank == limit)
            or size > MAX_DOCUMENT_CHARACTERS
            or (rule == "line" and begun < number)
        ):
            yield FoundDocument(_document(parts, rule), begun)
            parts = []
            size = 0
        if not parts:
            begun = number
        parts.append(text + "\n" if ends else text)
        size += len(parts[-1])
    yield FoundDocument(_document(parts, rule), begun)


def _document(parts: list[str], rule: str) -> str:
    return "".join(parts) if rule == "file" else "".join(parts).strip()


def read_json_lines(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads one JSON object per line; the text is under the key."""
    first = True
    for number, text in _lines(path, want):
        row = _object(text, number, want.on_bad_line) if text.strip() else None
        if row is None:
            continue
        if first and want.column not in row:
            hint = nearest(want.column, row)
            raise MalmoiError(f"{path}:{number} has no key {want.column!r}.{hint}")
        first = False
        if isinstance(found := row.get(want.column), str) and _is_text(found):
            url = row.get("url")
            yield FoundDocument(found, number, url if isinstance(url, str) else "")
        else:
            want.on_bad_line(number, f"no text under {want.column!r}")


def json_file(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads one JSON value: an array of objects or texts, or an object with the text at the key."""
    try:
        value = json.loads("\n".join(text for _, text in _lines(path, want)))
    except (ValueError, RecursionError) as error:
        raise MalmoiError(
            f"{path} is not valid JSON ({error}); a file with one object per line must be named "
            ".jsonl."
        ) from error
    values = value if isinstance(value, list) else [value]
    first = next((row for row in values if isinstance(row, dict)), {})
    if first and want.column not in first:
        raise MalmoiError(f"{path} has no key {want.column!r}.{nearest(want.column, first)}")
    for number, row in enumerate(values, start=1):
        found = row.get(want.column) if isinstance(row, dict) else row
        if isinstance(found, str) and _is_text(found):
            yield FoundDocument(found, number)
        else:
            named = f"no text under {want.column!r}"
            want.on_bad_line(
                number, named if isinstance(row, dict) else "neither text nor an object"
            )


def _lines(path: Path, want: ReadOptions) -> Iterator[tuple[int, str]]:
    return read_lines(path, want.on_bad_line)


def read_lines(path: Path, bad: OnBadLine) -> Iterator[tuple[int, str]]:
    """The whole lines of a file, with their numbers."""
    with open_bytes(path) as stream:
        encoding = encoding_of(stream.read(SAMPLE_BYTES))
    with open_bytes(path) as stream:
        yield from _joined(decode_lines(stream, encoding, bad))


def _joined(read: Iterator[tuple[int, str, bool]]) -> Iterator[tuple[int, str]]:
    """Joins the chunks of each line."""
    parts: list[str] = []
    number = 1
    for number, text, ends in read:
        parts.append(text)
        if ends:
            yield number, "".join(parts)
            parts = []
    if parts:
        yield number, "".join(parts)


def _object(text: str, number: int, bad: OnBadLine) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        bad(number, f"not JSON: {error}")
        return None
    if not isinstance(row, dict):
        bad(number, "not a JSON object")
        return None
    return row


def _is_text(value: str) -> bool:
    """Whether it has no lone surrogate, which JSON can express but is not a character."""
    return value.isascii() or not re.search("[\ud800-\udfff]", value)


def read_table(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads CSV or TSV with a header; TSV is never quoted, as in common data sets."""
    csv.field_size_limit(1 << 30)
    tabs = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if ".tsv" in path.suffixes else {}
    rows = csv.reader((text + "\n" for _, text in _lines(path, want)), **tabs)  # type: ignore[arg-type]
    read = whole_rows(rows, path)
    header = next(read, [])
    place = header.index(_column(f"{path}:1", want.column, header))
    for row in read:
        if len(row) == len(header):
            yield FoundDocument(row[place], rows.line_num)
        elif row:
            reason = f"{len(row)} fields where the header has {len(header)}"
            want.on_bad_line(rows.line_num, reason)


def whole_rows(rows: Any, path: Path) -> Iterator[list[str]]:
    """Yields the rows of a table; a malformed one raises an error with its location."""
    try:
        yield from rows
    except csv.Error as error:
        raise MalmoiError(
            f"{path}:{rows.line_num} is not a valid row ({str(error).partition(' - ')[0]}): fix "
            "it there, or save the file with plain newlines."
        ) from error


def read_parquet(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a column of a Parquet file, 1,000 rows at a time."""
    pyarrow = import_pyarrow(path)
    with open_bytes(path) as stream:
        try:
            file = pyarrow.parquet.ParquetFile(
                stream if stream.seekable() else pyarrow.BufferReader(stream.read())
            )
            names = file.schema_arrow.names
            batches = file.iter_batches(
                batch_size=1000, columns=[_column(path, want.column, names)]
            )
            yield from _rows(batches, want)
        except pyarrow.ArrowInvalid as error:
            raise MalmoiError(f"{path} is not a valid Parquet file ({error}).") from error


def read_arrow(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a column of an Arrow stream, as written by datasets' save_to_disk."""
    pyarrow = import_pyarrow(path)
    with open_bytes(path) as stream:
        try:
            reader = pyarrow.ipc.open_stream(stream)
            name = _column(path, want.column, reader.schema.names)
            yield from _rows((batch.select([name]) for batch in reader), want)
        except pyarrow.ArrowInvalid as error:
            raise MalmoiError(f"{path} is not a valid Arrow file ({error}).") from error


def import_pyarrow(path: Path) -> Any:
    """The package that reads Parquet and Arrow files."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise MalmoiError(f"{path} needs the package pyarrow: pip install pyarrow.") from error
    return pyarrow


def _column(where: str | Path, column: str, names: list[str]) -> str:
    if column not in names:
        raise MalmoiError(f"{where} has no column {column!r}.{nearest(column, names)}")
    return column


def _rows(batches: Any, want: ReadOptions) -> FoundDocuments:
    number = 0
    for batch in batches:
        for value in batch.column(0).to_pylist():
            number += 1
            if isinstance(value, str):
                yield FoundDocument(value, number)
            else:
                want.on_bad_line(number, f"no text in {want.column!r}")


FORMATS: dict[str, Callable[[Path, ReadOptions], FoundDocuments]] = {
    ".txt": read_plain,
    ".md": read_markdown,
    ".jsonl": read_json_lines,
    ".json": json_file,
    ".csv": read_table,
    ".tsv": read_table,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
