"""Rows of labelled data: tables, JSON lines and JSON files in any known encoding, or in memory."""

import ast
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.messages import msg, plural
from malmoi.system.untrusted import parse
from malmoi.text.column_names import label_name
from malmoi.text.dialect import (
    Dialect,
    UnquotedTabs,
    comma_dialect,
    missing_header,
    named_cells,
    tab_dialect,
)
from malmoi.text.formats import json_objects, parquet_batches, parquet_file
from malmoi.text.lines import read_lines, refuse_bad_lines, whole_text
from malmoi.text.open_file import COMPRESSED, require_real_size, uncompressed_name, whole_items


class TableLike(Protocol):
    """A table in memory: a DataFrame of pandas or polars, or a `datasets.Dataset`."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Files: TypeAlias = str | Path | Sequence[str | Path]
RowSource: TypeAlias = Files | Sequence[Mapping[str, Any]] | TableLike


class BadRow(Exception):
    """A row that cannot be used: its place and the reason."""

    def __init__(self, place: str, why: str, /, **values: object) -> None:
        super().__init__(msg("{place}: {why}", place=place, why=msg(why, **values)))
        self.place = place


class NoColumn(BadRow):
    """A missing column: for the first row a wrong column name, later a bad row."""

    def __init__(self, place: str, name: str, known: Iterable[str]) -> None:
        super().__init__(place, "there is no column {name!r}", name=name)
        self.sentence = msg(
            "{data} has no column {name!r}.{hint}", data=place, name=name, hint=nearest(name, known)
        )


@dataclass(frozen=True)
class DataRow:
    """One row's values by column name; a missing column raises a clear error."""

    values: Mapping[str, Any]
    place: str  # file:row

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise NoColumn(self.place, name, self.values)
        return self.values[name]

    @property
    def checked(self) -> Mapping[str, Any]:
        """The values; a malformed row raises its error."""
        return self.values

    def text(self, name: str) -> str:
        value = self[name]
        if not isinstance(value, str):
            raise BadRow(
                self.place, "{name!r} must hold text, not {value!r:.40}", name=name, value=value
            )
        return value

    def label(self, *names: str) -> str | None:
        """The first of these columns that exists, as a string, or None (a test set)."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            return None
        value = self[name]
        if value is None or str(value).strip() == "":
            raise BadRow(self.place, "the label in {name!r} is missing", name=name)
        if isinstance(as_list(value), list | dict):
            raise BadRow(
                self.place,
                "{name!r} holds {value!r:.40}, but this task has one label per row; for "
                "several use the kind multilabel",
                name=name,
                value=value,
            )
        return label_name(value)

    def number(self, name: str) -> float | None:
        found = self.label(name)
        if found is None:
            return None
        try:
            value = float(found)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadRow(
                self.place, "{name!r} must be a number, not {found!r:.40}", name=name, found=found
            )
        return value

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        if value is not None and value != int(value):
            raise BadRow(
                self.place, "{name!r} must be a whole number, not {value:g}", name=name, value=value
            )
        return None if value is None else int(value)


def as_list(value: Any) -> Any:
    """A list that a table holds as text, such as pandas' "['a', 'b']"; else the value itself."""
    if not isinstance(value, str) or not (value.startswith("[") and value.endswith("]")):
        return value
    if re.search(r"""['"]\s+['"]""", value):  # numpy's: Python would join them to one string
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line of a text file with its number; undecodable bytes are an error."""
    return read_lines(path, refuse_bad_lines(path))


def table_rows(
    path: Path, header: Sequence[str] | None = None, dialect: Dialect = UnquotedTabs
) -> Iterator[DataRow]:
    """Yields the rows of a table, by default tab-separated and never quoted (GLUE and others)."""
    names, rows = named_cells(path, dialect, refuse_bad_lines(path), header)
    _check_header(f"{path}:1", names)
    for line, last, values in rows:  # a quoted field may span lines
        if len(values) == len(names):
            yield DataRow(dict(zip(names, values, strict=True)), f"{path}:{line}")
            continue
        fields = plural(len(values), "field")
        why = msg("{fields} where there should be {names}", fields=fields, names=len(names))
        if last > line:
            why = msg(
                "{fields} where there should be {names} (a quote that opens here "
                "continues to line {before})",
                fields=fields,
                names=len(names),
                before=last,
            )
        yield BrokenRow({}, f"{path}:{line}", why)


def _check_header(where: str, names: Sequence[str]) -> None:
    for name, count in Counter(filter(None, names)).items():
        if count > 1:
            raise MalmoiError(
                "{where} has two columns {name!r}; rename one of them.", where=where, name=name
            )


@dataclass(frozen=True)
class BrokenRow(DataRow):
    """A malformed row: any access raises the error."""

    why: str = ""

    def __getitem__(self, name: str) -> Any:
        raise BadRow(self.place, self.why)

    @property
    def checked(self) -> Mapping[str, Any]:
        raise BadRow(self.place, self.why)


def json_line_rows(path: Path) -> Iterator[DataRow]:
    """Yields one row per line of a JSON lines file."""
    return parse_json_rows(text_lines(path), str(path))


def parse_json_rows(numbered: Iterable[tuple[int, str]], name: str) -> Iterator[DataRow]:
    """Parses numbered JSON lines from memory; `name` is their source."""
    for number, value in json_objects(numbered):
        yield _object_row(value, f"{name}:{number}")


def _object_row(value: Any, place: str) -> DataRow:
    """An object as a row, or the error as text."""
    if isinstance(value, dict):
        return DataRow(value, place)
    return BrokenRow({}, place, value if isinstance(value, str) else "not a JSON object")


def json_value(path: Path) -> Any:
    """Reads a file that is one JSON value, such as SQuAD's."""
    return parse(whole_text(path, refuse_bad_lines(path)), str(path))


def json_array_rows(path: Path) -> Iterator[DataRow]:
    """Yields the objects of a file that is one JSON array; rows are numbered from 1."""
    values = json_value(path)
    if not isinstance(values, list):
        raise MalmoiError("{path} must hold a JSON array.", path=path)
    for number, value in enumerate(values, start=1):
        yield _object_row(value if isinstance(value, dict) else None, f"{path}:{number}")


def parquet_rows(path: Path) -> Iterator[DataRow]:
    """Yields the rows of a Parquet file, numbered from 1."""
    file = parquet_file(path)
    _check_header(f"{path}:1", file.schema_arrow.names)
    rows = (values for batch in parquet_batches(path, file) for values in batch.to_pylist())
    for number, values in enumerate(rows, start=1):
        yield DataRow(values, f"{path}:{number}")


def excel_rows(path: Path) -> Iterator[DataRow]:
    """Yields the rows of a workbook's first sheet, with the numbers that Excel shows."""
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise MalmoiError(
            "{path} needs the package openpyxl: pip install openpyxl.", path=path
        ) from error
    with zipfile.ZipFile(path) as parts:
        require_real_size(path, sum(part.file_size for part in parts.infolist()))
    book = load_workbook(path, read_only=True, data_only=True)
    rows = book.worksheets[0].iter_rows(values_only=True)
    names = [label_name(name) if name is not None else "" for name in next(rows, ())]
    _check_header(f"{path}:1", names)
    for number, values in enumerate(rows, start=2):
        if any(value is not None for value in values):
            cells = {name: cell for name, cell in zip(names, values, strict=False) if name}
            yield DataRow(cells, f"{path}:{number}")
    book.close()


DIALECTS = {".tsv": tab_dialect, ".txt": tab_dialect, ".csv": comma_dialect}
ROW_READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": json_line_rows,
    ".json": json_array_rows,
    ".parquet": parquet_rows,
    ".xlsx": excel_rows,
}
ROW_FORMATS = (*DIALECTS, *ROW_READERS)


def any_rows(path: Path, named: Iterable[str] = ()) -> Iterator[DataRow]:
    """Reads a file's rows by its suffix; a column of `named` proves that a table has a header."""
    if not has_rows(path):
        kinds = f"{' '.join(ROW_FORMATS)}, also {' '.join(COMPRESSED)}"
        raise UsageError(
            "{path} has an unknown format: its name should end in one of {kinds}.",
            path=path,
            kinds=kinds,
        )
    return whole_items(path, _read_rows(path, named))


def _read_rows(path: Path, named: Iterable[str]) -> Iterator[DataRow]:
    suffix = uncompressed_name(path).suffix
    if suffix not in DIALECTS:
        yield from ROW_READERS[suffix](path)
        return
    dialect = DIALECTS[suffix](path)
    yield from table_rows(path, missing_header(path, dialect, named), dialect)


def has_rows(path: Path) -> bool:
    """Whether a file of this name is a table."""
    return uncompressed_name(path).suffix in ROW_FORMATS


# ------------------------------------------------------------------ rows in memory


def is_files(data: RowSource) -> bool:
    """Whether the data are paths of files, not rows in memory."""
    if isinstance(data, str | Path):
        return True
    return isinstance(data, Sequence) and all(isinstance(one, str | Path) for one in data)


def rows_of(data: RowSource, named: Iterable[str] = ()) -> Iterator[DataRow]:
    """The rows of files by their suffix, or of a table in memory."""
    if is_files(data):
        for path in file_list(data):
            yield from any_rows(path, named)
        return
    for number, values in enumerate(records_of(data), start=1):
        yield DataRow(values, msg("row {number}", number=number))


def file_list(data: RowSource) -> list[Path]:
    return [Path(one) for one in ([data] if isinstance(data, str | Path) else data)]  # type: ignore[union-attr, arg-type]


def source_name(data: RowSource) -> str:
    """The data as an error message names it."""
    return (is_files(data) and ", ".join(map(str, file_list(data)))) or msg("the data")


def records_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a table in memory as dicts; missing values are None, label numbers their names.

    Numbers that a `datasets.Dataset` has names for (a `ClassLabel`) become these names.
    """
    if hasattr(table, "columns"):
        _check_header(msg("The table"), list(map(str, table.columns)))
        if hasattr(table, "to_dicts"):  # polars
            table = table.to_dicts()
        elif hasattr(table, "to_dict"):  # pandas
            table = table.to_dict("records")
    if isinstance(table, Mapping):
        raise UsageError(
            "Rows are a list of dicts or a table, not one {type} (with {table}); a "
            "DatasetDict has its rows in its splits: data['train'].",
            type=type(table).__name__,
            table=", ".join(map(str, table)),
        )
    found = []
    for row in table:
        if not isinstance(row, Mapping):
            raise UsageError("A row is a dict of its columns, not {row!r:.40}.", row=row)
        found.append({str(name): _plain_value(value) for name, value in row.items()})
    features = getattr(table, "features", None) or {}
    names = {name: one.int2str for name, one in features.items() if hasattr(one, "int2str")}
    for row in found:
        row.update((name, of(row[name])) for name, of in names.items() if row[name] is not None)
    return found


def _plain_value(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.tolist() if hasattr(value, "tolist") else value  # numpy's arrays and numbers
