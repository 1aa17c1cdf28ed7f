"""Rows of labelled data: tables, JSON lines and JSON files in any known encoding, or in memory."""

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from malmoi.errors import UsageError, nearest, require_that
from malmoi.messages import msg
from malmoi.system.storage import local_path
from malmoi.system.untrusted import parse
from malmoi.text.lines import (
    read_lines,
    refuse_bad_lines,
    uncompressed_name,
    unknown_format,
    whole_items,
    whole_text,
)
from malmoi.text.records import (
    RECORD_READERS,
    Dialect,
    Records,
    UnquotedTabs,
    WantedColumns,
    check_header,
    label_name,
    number_of,
    parse_json_lines,
    read_records,
    table_records,
)


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
        self.name = name
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

    def require(self, condition: object, why: str, /, **values: object) -> None:
        if not condition:
            raise BadRow(self.place, why, **values)

    def text(self, name: str) -> str:
        text = self[name]
        is_text = isinstance(text, str)
        self.require(is_text, "{name!r} must hold text, not {value!r:.40}", name=name, value=text)
        return str(text)

    def label(self, *names: str) -> str | None:
        """The first of these columns that exists, as a string, or None (a test set)."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            return None
        value = self[name]
        found = "" if value is None else label_name(value)
        self.require(found, "the label in {name!r} is missing", name=name)
        self.require(
            not isinstance(as_list(value), list | dict),
            "{name!r} holds {value!r:.40}, but this task has one label per row; for "
            "several use the kind multilabel",
            name=name,
            value=value,
        )
        return found

    def number(self, name: str) -> float | None:
        found = self.label(name)
        if found is None:
            return None
        value = number_of(found)
        if value is None or not math.isfinite(value):
            raise BadRow(
                self.place, "{name!r} must be a number, not {found!r:.40}", name=name, found=found
            )
        return value

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        self.require(
            value is None or value == int(value),
            "{name!r} must be a whole number, not {value:g}",
            name=name,
            value=value,
        )
        return None if value is None else int(value)


QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
NUMPY_LIST = re.compile(rf"\[\s*(?:{QUOTED.pattern})(?:\s+(?:{QUOTED.pattern}))+\s*\]")


def as_list(value: Any) -> Any:
    """A list that a table holds as text, as pandas or numpy write it; else the value itself."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        text = QUOTED.sub(r"\g<0>,", value) if NUMPY_LIST.fullmatch(value) else value
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            # Python would join strings without a comma between them
            return value if re.search(r"""['"]\s+['"]""", text) else ast.literal_eval(text)
    return value


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line of a text file with its number; undecodable bytes are an error."""
    return read_lines(path, refuse_bad_lines(path))


def table_rows(
    path: Path, header: Sequence[str] | None = None, dialect: Dialect = UnquotedTabs
) -> Iterator[DataRow]:
    """Yields the rows of a table, by default tab-separated and never quoted (GLUE and others)."""
    bad = refuse_bad_lines(path)
    return _rows(path, table_records(path, bad, WantedColumns(), dialect, header))


@dataclass(frozen=True)
class BrokenRow(DataRow):
    """A malformed row: any access raises the error."""

    why: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.checked[name]

    @property
    def checked(self) -> Mapping[str, Any]:
        raise BadRow(self.place, self.why)


def _rows(name: object, records: Records) -> Iterator[DataRow]:
    for number, record in records:
        place = f"{name}:{number}"
        yield BrokenRow({}, place, record) if isinstance(record, str) else DataRow(record, place)


def json_line_rows(path: Path) -> Iterator[DataRow]:
    """Yields one row per line of a file of JSON lines, whatever its name."""
    return parse_json_rows(text_lines(path), str(path))


def parse_json_rows(numbered: Iterable[tuple[int, str]], name: str) -> Iterator[DataRow]:
    """Parses numbered JSON lines from memory; `name` is their source."""
    return _rows(name, parse_json_lines(numbered))


def json_value(path: Path) -> Any:
    return parse(whole_text(path, refuse_bad_lines(path)), str(path))


def any_rows(path: Path, named: Iterable[str] = ()) -> Iterator[DataRow]:
    """Reads a file's rows by its suffix; a column of `named` proves that a table has a header."""
    if not has_rows(path):
        raise unknown_format(path, RECORD_READERS)
    wanted = WantedColumns(list(named))
    return whole_items(path, _rows(path, read_records(path, refuse_bad_lines(path), wanted)))


def has_rows(path: Path) -> bool:
    return uncompressed_name(path).suffix in RECORD_READERS


# ------------------------------------------------------------------ rows in memory


def is_files(data: RowSource) -> bool:
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
    return [local_path(one) for one in ([data] if isinstance(data, str | Path) else data)]  # type: ignore[union-attr, arg-type]


def source_name(data: RowSource) -> str:
    return (is_files(data) and ", ".join(map(str, file_list(data)))) or msg("the data")


def records_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a table in memory as dicts; missing values are None, label numbers their names.

    Numbers that a `datasets.Dataset` has names for (a `ClassLabel`) become these names.
    """
    if hasattr(table, "columns"):
        check_header(msg("The table"), list(map(str, table.columns)))
        if hasattr(table, "to_dicts"):  # polars
            table = table.to_dicts()
        elif hasattr(table, "to_dict"):  # pandas
            table = table.to_dict("records")
    require_that(
        not isinstance(table, Mapping),
        "Rows are a list of dicts or a table; a DatasetDict has its rows in its splits: "
        "data['train'].",
    )
    found = []
    for row in table:
        require_that(
            isinstance(row, Mapping), "A row is a dict of its columns, not {row!r:.40}.", row=row
        )
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


# ------------------------------------------------------------------ conversations

SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # ShareGPT's roles
Message = dict[str, str]  # role, content


def parse_messages(given: Any) -> list[Message]:
    """A conversation as [{"role": …, "content": …}], also from JSON text or ShareGPT's names."""
    found = given
    if isinstance(given, str):
        with suppress(ValueError):
            found = json.loads(given)
    require_that(
        isinstance(found, list) and found,
        "a conversation is a list of messages, not {given!r:.60}",
        given=given,
    )
    return [_message(one) for one in found]


def _message(one: Any) -> Message:
    values = one if isinstance(one, Mapping) else {}
    role = values.get("role") or values.get("from")
    content = values.get("content", values.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError(
            "a message needs a role and a content, both texts, not {one!r:.60}", one=one
        )
    return {"role": SPEAKERS.get(role, role), "content": content}
