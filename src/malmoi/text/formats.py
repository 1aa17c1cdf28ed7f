"""Splits files into documents: plain text by one of four rules, Markdown, JSON, tables."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from malmoi.errors import MalmoiError, nearest
from malmoi.messages import msg
from malmoi.system.limits import MAX_LINE_CHARACTERS
from malmoi.text.column_names import label_name
from malmoi.text.dialect import comma_dialect, missing_header, named_cells, tab_dialect
from malmoi.text.lines import (
    SAMPLE_BYTES,
    TOO_LONG,
    OnBadLine,
    decode_blocks,
    decode_sample,
    read_lines,
    refuse_bad_lines,
    whole_text,
)
from malmoi.text.open_file import COMPRESSED, open_bytes, read_whole, require_real_size

MAX_DOCUMENT_CHARACTERS = 1 << 24  # a longer document is split at a space
MAX_BATCH_ROWS = 1000  # of a Parquet file, …
BATCH_BYTES = 1 << 26  # … or about so many bytes
MAX_BAD_SHARE = 0.2  # unreadable characters of a text file
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
    page: bytes | None = None  # HTML whose main text has yet to be extracted


FoundDocuments = Iterator[FoundDocument]
LineBlocks = Iterator[tuple[int, list[str], bool]]  # number of the first, lines, whether they end


class FoundLines(NamedTuple):
    """Lines of a file that are a document each, from line `first` on; empty ones are none."""

    texts: list[str]
    first: int


@dataclass(frozen=True)
class ReadOptions:
    """The rule for plain text ("auto": by file), the column or key, and callbacks."""

    rule: str
    column: str
    on_bad_line: OnBadLine
    on_rule: Callable[[str], None]


def read_plain(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads plain text, by the given rule or the one that fits the file."""
    for found in read_plain_blocks(path, want):
        if isinstance(found, FoundLines):
            yield from map(FoundDocument, found.texts, count(found.first))
        else:
            yield found


def read_plain_blocks(path: Path, want: ReadOptions) -> Iterator[FoundDocument | FoundLines]:
    """The same, but many lines at once where each is a document."""
    with open_bytes(path) as stream:
        sample = stream.read(SAMPLE_BYTES)
    encoding, start = decode_sample(sample)
    if start.count("\ufffd") + start.count("\0") > max(MAX_BAD_SHARE * len(start), 100):
        raise MalmoiError(
            "{path} is not text: most of its bytes are not readable as {encoding}.",
            path=path,
            encoding=encoding,
        )
    rule = guess_rule(start) if want.rule == "auto" else want.rule
    want.on_rule(rule)
    with open_bytes(path) as stream:
        yield from _by_rule(decode_blocks(stream, encoding, want.on_bad_line), rule)


def read_markdown(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a Markdown file as one document, unless another rule was given."""
    yield from read_plain(path, replace(want, rule="file") if want.rule == "auto" else want)


def guess_rule(text: str) -> str:
    """Guesses the rule from the beginning of a text.

    No blank line, or one in thousands of lines: every line is a document. Short blocks in a long
    text (under 200 characters on average: verses, speeches) are parts of one document. Many single
    blank lines and a few double ones: paragraphs and documents.
    """
    gaps = [
        gap.count("\n") - 1 for gap in re.findall(r"\n(?:[ \t\r]*\n)+(?=[ \t\r]*\S)", text.strip())
    ]
    if max(gaps, default=1) == 1 and text.count("\n") >= 2000 * len(gaps):
        return "line"
    average = len(text) / (len(gaps) + 1)
    if len(text) >= 1 << 16 and average < 200:
        return "file"
    double = sum(gap > 1 for gap in gaps)
    return (
        "blanks" if len(gaps) >= 100 and 0 < double * 20 <= len(gaps) and average < 500 else "blank"
    )


def _by_rule(blocks: LineBlocks, rule: str) -> Iterator[FoundDocument | FoundLines]:
    """Joins lines into documents, stripped unless the file is one document."""
    if rule == "line":
        yield from _by_line(blocks)
        return
    limit = {"blank": 1, "blanks": 2}.get(rule, 0)
    parts: list[str] = []
    begun = 1
    size = 0
    blank = 0
    for number, text, ends in ((f + i, t, e) for f, ts, e in blocks for i, t in enumerate(ts)):
        blank = 0 if text and not text.isspace() else blank + 1
        if parts and (size > MAX_DOCUMENT_CHARACTERS or (limit and blank == limit)):
            yield _document(parts, begun, whole=not limit)
            parts = []
            size = 0
        begun = begun if parts else number
        parts.append(text + "\n" if ends else text)
        size += len(parts[-1])
    yield _document(parts, begun, whole=not limit)


def _by_line(blocks: LineBlocks) -> Iterator[FoundDocument | FoundLines]:
    """Lines as documents, many at once; the pieces of a long one are joined up to a limit."""
    parts: list[str] = []
    begun = 1
    for first, lines, ends in blocks:
        if ends and not parts and sum(map(len, lines)) <= MAX_DOCUMENT_CHARACTERS:
            yield FoundLines([text.strip() for text in lines], first)
            continue
        for number, text in enumerate(lines, first):
            if parts and (begun < number or sum(map(len, parts)) > MAX_DOCUMENT_CHARACTERS):
                yield _document(parts, begun)
                parts = []
            begun = begun if parts else number
            parts.append(text)
    yield _document(parts, begun)


def _document(parts: list[str], line: int, *, whole: bool = False) -> FoundDocument:
    text = "".join(parts)
    return FoundDocument(text if whole else text.strip(), line)


def read_json_lines(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads one JSON object per line; the text is under the key."""
    first = True
    for number, row in json_objects(read_lines(path, want.on_bad_line)):
        if isinstance(row, str):
            want.on_bad_line(number, row)
            continue
        if first and want.column not in row:
            hint = nearest(want.column, row)
            raise MalmoiError(
                "{path}:{number} has no key {column!r}.{hint}",
                path=path,
                number=number,
                column=want.column,
                hint=hint,
            )
        first = False
        if isinstance(found := row.get(want.column), str) and _is_text(found):
            url = row.get("url")
            yield FoundDocument(found, number, url if isinstance(url, str) else "")
        else:
            want.on_bad_line(number, msg("no text under {column!r}", column=want.column))


def json_file(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads one JSON value: an array of objects or texts, or an object with the text at the key."""
    try:
        value = json.loads(whole_text(path, want.on_bad_line))
    except (ValueError, RecursionError) as error:
        raise MalmoiError(
            "{path} is not valid JSON ({error}); a file with one object per line must be "
            "named .jsonl.",
            path=path,
            error=error,
        ) from error
    values = value if isinstance(value, list) else [value]
    first = next((row for row in values if isinstance(row, dict)), {})
    if first and want.column not in first:
        raise MalmoiError(
            "{path} has no key {column!r}.{hint}",
            path=path,
            column=want.column,
            hint=nearest(want.column, first),
        )
    for number, row in enumerate(values, start=1):
        found = row.get(want.column) if isinstance(row, dict) else row
        if isinstance(found, str) and _is_text(found):
            yield FoundDocument(found, number)
        else:
            named = msg("no text under {column!r}", column=want.column)
            why = named if isinstance(row, dict) else "neither text nor an object"
            want.on_bad_line(number, why)


def json_objects(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields the object of each non-blank line, or the reason why it has none."""
    for number, text in numbered:
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield number, msg("not JSON: {error}", error=error)
            continue
        yield number, row if isinstance(row, dict) else "not a JSON object"


def _is_text(value: str) -> bool:
    """Whether it has no lone surrogate, which JSON can express but is not a character."""
    return value.isascii() or not re.search("[\ud800-\udfff]", value)


def read_table(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads CSV or TSV, separated and quoted as the file is, with or without a header."""
    dialect = tab_dialect(path) if ".tsv" in path.suffixes else comma_dialect(path)
    column = label_name(want.column)
    unnamed = missing_header(path, dialect, [column])
    header, rows = named_cells(path, dialect, want.on_bad_line, unnamed)
    place = header.index(checked_column(f"{path}:1", column, header))
    for _, last, cells in rows:
        if len(cells) == len(header):
            yield FoundDocument(cells[place], last)
        else:
            want.on_bad_line(
                last,
                msg(
                    "{fields} fields where the header has {header}",
                    fields=len(cells),
                    header=len(header),
                ),
            )


def read_parquet(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a column of a Parquet file."""
    file = parquet_file(path)
    name = checked_column(path, want.column, file.schema_arrow.names)
    batches = parquet_batches(path, file, [name])
    yield from text_cells((cell for batch in batches for cell in batch[0].to_pylist()), want)


def parquet_file(path: Path) -> Any:
    """Opens a Parquet file, which may be compressed as a whole."""
    pyarrow = import_pyarrow(path)
    packed = path.suffix in COMPRESSED
    return pyarrow.parquet.ParquetFile(pyarrow.BufferReader(read_whole(path)) if packed else path)


def parquet_batches(path: Path, file: Any, columns: list[str] | None = None) -> Iterator[Any]:
    """The rows of a Parquet file, as many at once as fit easily into memory."""
    groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
    unpacked = sum(group.total_byte_size for group in groups)
    require_real_size(path, unpacked)
    row = unpacked // max(1, file.metadata.num_rows) + 1
    if row > MAX_LINE_CHARACTERS:
        refuse_bad_lines(path)(1, TOO_LONG)
    size = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // row))
    return valid_batches(file.iter_batches(batch_size=size, columns=columns))


def read_arrow(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a column of an Arrow stream, as written by datasets' save_to_disk."""
    pyarrow = import_pyarrow(path)
    with open_bytes(path) as stream:
        reader = pyarrow.ipc.open_stream(stream)
        name = checked_column(path, want.column, reader.schema.names)
        batches = valid_batches(reader)
        yield from text_cells((cell for batch in batches for cell in batch[name].to_pylist()), want)


def valid_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of a file; a damaged one would make pyarrow read foreign memory."""
    for batch in batches:
        batch.validate(full=True)
        yield batch


def import_pyarrow(path: Path) -> Any:
    """The package that reads Parquet and Arrow files."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise MalmoiError(
            "{path} needs the package pyarrow: pip install pyarrow.", path=path
        ) from error
    return pyarrow


def checked_column(where: str | Path, column: str, names: list[str]) -> str:
    """The column, if a table with these names has it."""
    if column not in names:
        raise MalmoiError(
            "{data} has no column {name!r}.{hint}",
            data=where,
            name=column,
            hint=nearest(column, names),
        )
    return column


def text_cells(cells: Iterable[Any], want: ReadOptions) -> FoundDocuments:
    """The texts of a column; other values are reported."""
    for number, cell in enumerate(cells, start=1):
        if isinstance(cell, str):
            yield FoundDocument(cell, number)
        else:
            want.on_bad_line(number, msg("no text in {column!r}", column=want.column))


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
