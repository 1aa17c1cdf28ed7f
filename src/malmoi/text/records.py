"""Records of files: tables, however they separate, quote and name their columns, JSON lines and
arrays, Parquet and Arrow files, Excel workbooks.
"""

import csv
import json
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from malmoi.errors import MalmoiError, ensure, explained, nearest
from malmoi.messages import msg, plural
from malmoi.system.packages import optional_package
from malmoi.system.untrusted import MAX_LINE_CHARACTERS
from malmoi.text.conllu import conllu_rows
from malmoi.text.lines import (
    COMPRESSED,
    TOO_LONG,
    OnBadLine,
    open_bytes,
    read_lines,
    read_sample,
    read_whole,
    refuse_bad_lines,
    require_real_size,
    uncompressed_name,
    whole_text,
)

# common names of columns, most likely first, compared in lower case
LABEL_NAMES = (
    "label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "kind",
    "type", "tag", "tags", "ner_tags", "pos_tags", "emotion", "stars", "rating", "score",
    "gold_label", "y", "answer",
    "라벨", "레이블", "분류", "범주", "감정", "감성", "점수", "평점",
)  # fmt: skip
TEXT_NAMES = (
    "text", "sentence", "sentence1", "premise", "question", "review", "document", "content",
    "comment", "body", "message", "utterance", "query", "title", "tokens", "words",
    "본문", "문장", "텍스트", "내용", "리뷰", "댓글", "질문", "제목",
)  # fmt: skip
PAIRS = {
    "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2",
    "text1": "text2", "question": "context", "sentence_a": "sentence_b", "문장1": "문장2",
}  # fmt: skip
CHAT_COLUMNS = ("messages", "conversations", "conversation")
# prompts and answers in public data sets
PROMPT_COLUMNS = (
    ("prompt", "answer"), ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"),
    ("source", "target"), ("document", "summary"), ("article", "highlights"),
    ("dialogue", "summary"), ("text", "summary"), ("input", "output"),
    ("질문", "답변"), ("원문", "번역"), ("본문", "요약"),
)  # fmt: skip
SECOND_COLUMNS = {"instruction": "input"}  # Alpaca: the input of an instruction


def label_name(value: object) -> str:
    """A label or column as people read it: without spaces around it, decomposed Hangul composed."""
    return unicodedata.normalize("NFC", str(value).strip())


def number_of(value: Any) -> float | None:
    """The number that a cell holds, if it does."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def column_named(known: Sequence[str], names: Sequence[str]) -> str | None:
    """The column with the likeliest of the known names."""
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[name] for name in known if name in by_lower), None)


def unnamed_columns(count: int) -> list[str]:
    """The names that columns of a table without a header get."""
    return [f"column{number}" for number in range(1, count + 1)]


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


def tab_dialect(sample: str) -> Dialect:
    """Detects whether a tab-separated file is quoted, by its quotes and numbers of fields."""
    is_quoted = '"' in sample and not FIELD.sub("", sample) and _even(sample, QuotedTabs)
    return QuotedTabs if is_quoted else UnquotedTabs


def comma_dialect(sample: str) -> Dialect:
    """Detects semicolons: they split the rows evenly and commas do not."""
    header = sample.partition("\n")[0]
    if ";" not in header or ("," in header and _even(sample, Commas)):
        return Commas
    return Semicolons if _even(sample, Semicolons) else Commas


def missing_header(sample: str, dialect: Dialect, named: Iterable[str]) -> list[str] | None:
    """column1, column2… if the first line of a table is a row; None if it names the columns.

    A column of `named`, which the user or a model knows, decides if it stands in the first line.
    Otherwise each column votes: a label may be the name of its column ("spam"), so that one cell
    that occurs again below proves nothing beside another that is unlike its column.
    """
    first, *rows = _sample_rows(sample, dialect) or [[]]
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
        number_of(cell) is None and None not in map(number_of, counts),
        cell not in counts and min(counts.values()) > 1,
        _is_short_name(cell, list(counts)),
    )
    return -1 if any(signs) else 0


def _is_short_name(cell: str, texts: Sequence[str]) -> bool:
    """Whether a cell without punctuation is far shorter than nearly all texts of its column."""
    if PUNCTUATION.search(cell) or NAMES_PER_TEXT * len(cell) > median(map(len, texts)):
        return False
    return sum(len(text) <= len(cell) for text in texts) <= MAX_SHORTER * len(texts)


def first_lines(path: Path) -> str:
    _, sample, complete = read_sample(path)
    text = sample.lstrip("\ufeff").replace("\r\n", "\n")
    return text if complete else text[: text.rfind("\n") + 1]


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


def table_cells(
    path: Path, dialect: Dialect, bad: OnBadLine
) -> Iterator[tuple[int, int, list[str]]]:
    """The rows of a table: their first line, last line and cells; a malformed one is an error."""
    reader = _table_reader((text + "\n" for _, text in read_lines(path, bad)), dialect)
    before = 0
    try:
        for cells in reader:
            if cells:
                yield before + 1, reader.line_num, cells
            before = reader.line_num
    except csv.Error as error:
        raise MalmoiError(
            "{place} is not a valid row ({error}): fix it there, or save the file with plain "
            "newlines.",
            place=f"{path}:{reader.line_num}",
            error=str(error).partition(" - ")[0],
        ) from error


MAX_BATCH_ROWS = 1000  # of a Parquet file, …
BATCH_BYTES = 1 << 26  # … or about so many bytes
Record = dict[str, Any] | str  # its values by column, or why it has none
Records = Iterator[tuple[int, Record]]  # each with its line, or its number from 1


class WantedColumns(NamedTuple):
    """Columns that are expected: one of them in a table's first line shows that it is a header."""

    names: Sequence[str] = ()
    only: bool = False  # whether the other columns may be left out


def read_records(path: Path, bad: OnBadLine, wanted: WantedColumns) -> Records:
    return RECORD_READERS[uncompressed_name(path).suffix](path, bad, wanted)


def table_records(
    path: Path,
    bad: OnBadLine,
    wanted: WantedColumns,
    dialect: Dialect | None = None,
    header: Sequence[str] | None = None,
) -> Records:
    """The records of a table; without a dialect, it and a missing header are detected."""
    if dialect is None:
        sample = first_lines(path)
        commas = uncompressed_name(path).suffix == ".csv"
        dialect = comma_dialect(sample) if commas else tab_dialect(sample)
        header = missing_header(sample, dialect, wanted.names)
    rows = table_cells(path, dialect, bad)
    names = list(map(label_name, next(rows, (1, 1, []))[2] if header is None else header))
    _read_columns(f"{path}:1", names, wanted)
    for line, last, cells in rows:
        if len(cells) == len(names):
            yield line, dict(zip(names, cells, strict=True))
        else:
            yield line, _uneven(len(cells), len(names), last if last > line else 0)


def _uneven(cells: int, names: int, last: int) -> str:
    """What is wrong with a row; a quoted field may span lines, to the `last`."""
    wrong = msg(
        "{fields} where there should be {names}", fields=plural(cells, "field"), names=names
    )
    if not last:
        return wrong
    return msg("{wrong} (a quote that opens here continues to line {last})", wrong=wrong, last=last)


def _read_columns(where: str, names: Sequence[str], wanted: WantedColumns) -> list[str]:
    """The columns to read, all unless the first of the wanted is there; none may occur twice."""
    few = wanted.only and wanted.names[0] in names
    read = [name for name in names if name in wanted.names or not few]
    check_header(where, read)
    return read


def check_header(where: str, names: Sequence[str]) -> None:
    for name, n in Counter(filter(None, names)).items():
        ensure(n == 1, "{where} has two columns {name!r}; rename one.", where=where, name=name)


def checked_column(where: str | Path, column: str, names: Iterable[str]) -> str:
    """The column, if a table with these names has it."""
    ensure(
        column in names,
        "{data} has no column {name!r}.{hint}",
        data=where,
        name=column,
        hint=nearest(column, names),
    )
    return column


def parse_json_lines(numbered: Iterable[tuple[int, str]]) -> Records:
    """The object of each line that is not blank."""
    for number, text in numbered:
        if not text.strip():
            continue
        try:
            yield number, _object(json.loads(text))
        except (ValueError, RecursionError) as error:
            yield number, msg("not JSON: {error}", error=error)


def _object(value: Any) -> Record:
    return value if isinstance(value, dict) else "not a JSON object"


def _json_records(path: Path, bad: OnBadLine, wanted: WantedColumns) -> Records:
    """The objects of an array; where a column is wanted, also one object, and texts for it."""
    with explained(
        (ValueError, RecursionError),
        "{path} is not valid JSON ({error}); a file with one object per line must be named .jsonl.",
        path=path,
    ):
        value = json.loads(whole_text(path, bad))
    ensure(isinstance(value, list) or wanted.only, "{path} must hold a JSON array.", path=path)
    for number, one in enumerate(value if isinstance(value, list) else [value], start=1):
        is_text = wanted.only and isinstance(one, str)
        yield number, {wanted.names[0]: one} if is_text else _object(one)


def _parquet_records(path: Path, bad: OnBadLine, wanted: WantedColumns) -> Records:
    """As many at once as fit easily into memory."""
    pyarrow = import_pyarrow(path)
    packed = path.suffix in COMPRESSED
    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(read_whole(path)) if packed else path)
    names = _read_columns(f"{path}:1", file.schema_arrow.names, wanted)
    groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
    unpacked = sum(group.total_byte_size for group in groups)
    require_real_size(path, unpacked)
    row = unpacked // max(1, file.metadata.num_rows) + 1
    if row > MAX_LINE_CHARACTERS:
        refuse_bad_lines(path)(1, TOO_LONG)
    size = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // row))
    yield from _batch_records(file.iter_batches(batch_size=size, columns=names), names)


def _arrow_records(path: Path, bad: OnBadLine, wanted: WantedColumns) -> Records:
    """An Arrow stream, as written by datasets' save_to_disk."""
    pyarrow = import_pyarrow(path)
    with open_bytes(path) as stream:
        reader = pyarrow.ipc.open_stream(stream)
        yield from _batch_records(reader, _read_columns(f"{path}:1", reader.schema.names, wanted))


def _batch_records(batches: Iterable[Any], names: list[str]) -> Records:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # a damaged one would make pyarrow read foreign memory
        yield from enumerate(batch.select(names).to_pylist(), start=number + 1)
        number += batch.num_rows


def import_pyarrow(path: Path) -> Any:
    optional_package("pyarrow.ipc", path)
    optional_package("pyarrow.parquet", path)
    return optional_package("pyarrow", path)


def _excel_records(path: Path, bad: OnBadLine, wanted: WantedColumns) -> Records:
    """A workbook's first sheet, with the numbers that Excel shows."""
    openpyxl = optional_package("openpyxl", path)
    with zipfile.ZipFile(path) as parts:
        require_real_size(path, sum(part.file_size for part in parts.infolist()))
    book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    rows = book.worksheets[0].iter_rows(values_only=True)
    names = [label_name(name) if name is not None else "" for name in next(rows, ())]
    check_header(f"{path}:1", names)
    for number, values in enumerate(rows, start=2):
        if any(value is not None for value in values):
            yield number, {name: cell for name, cell in zip(names, values, strict=False) if name}
    book.close()


def _conllu_records(path: Path, bad: OnBadLine, wanted: WantedColumns) -> Records:
    """Sentences of words and their parts of speech, as a table of taggings has them."""
    for number, words, tags in conllu_rows(read_lines(path, bad)):
        yield number, {"text": " ".join(words), "label": " ".join(tags)}


RECORD_READERS: dict[str, Callable[[Path, OnBadLine, WantedColumns], Records]] = {
    ".tsv": table_records,
    ".txt": table_records,
    ".csv": table_records,
    ".jsonl": lambda path, bad, wanted: parse_json_lines(read_lines(path, bad)),
    ".json": _json_records,
    ".parquet": _parquet_records,
    ".xlsx": _excel_records,
    ".arrow": _arrow_records,
    ".conllu": _conllu_records,
}
