"""Adds columns that a model computes to the rows of a file, or of every file of a folder.

Results are appended to a partial file next to the output, which is written when all are there; so
after any number of kills the same command resumes, and writes the same bytes. Several processes may
share a folder: the one that works on a file locks it.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import crc32

from malmoi.cli import shared as cli
from malmoi.errors import explained, require_that
from malmoi.messages import plural
from malmoi.system import files as disk
from malmoi.system.packages import optional_package
from malmoi.system.parts import part_slice
from malmoi.system.paths import require_path
from malmoi.system.progress import Progress, part_of, report_progress
from malmoi.system.run_folder import RunFolder
from malmoi.system.storage import address, local_path
from malmoi.text.lines import uncompressed_name
from malmoi.text.records import comma_dialect, first_lines, import_pyarrow
from malmoi.text.rows import BadRow, DataRow, any_rows

Row = Mapping[str, Any]
VECTORS = "embedding"  # the column of a text's vector
ROWS_AT_ONCE = 1000  # computed together, sorted by length; an interruption loses at most these
RECORD = "_malmoi.json"  # of a folder; who reads a folder of tables skips such names


class RowSource(NamedTuple):
    """The rows of a file, and the model's input of each; None if it has no text."""

    rows: Callable[[], Iterator[DataRow]]
    ask: Callable[[DataRow], Any]
    columns: Mapping[str, str]  # that are read as text, as pair…; or the format as task


class Addition(NamedTuple):
    """What a model adds to rows."""

    verb: str
    model: "cli.inference.Model"
    source: Callable[[Path, Mapping[str, str]], RowSource]  # of a file by the columns given
    compute: Callable[[list[Any]], list[Row]]  # for the rows with a text, …
    empty: Row  # … and what the others get
    settings: Mapping[str, Any]  # that the results depend on
    restore: Callable[[Row], Row] = dict  # from what JSON keeps of a result


@explained(BadRow, "{error}.")
def write_rows(
    opened: Callable[[], Addition],
    data: Path,
    out: Path,
    given: Mapping[str, str],
    *,
    part: str,
    overwrite: bool,
    json: bool,
) -> None:
    """Writes the rows of a file or a folder; prints each file when it is finished."""
    require_path(data := local_path(data))
    require_that(
        not part or (data.is_dir() and not overwrite),
        "--part shares the files of a folder; to discard what is there, give --overwrite without "
        "--part.",
    )
    if data.is_dir():
        done = _add_to_folder(opened, _outputs(data, out), out, given, part, overwrite)
    else:
        # killed between writing the one and removing the other, the same command finishes it
        disk.require_free(out, overwrite=overwrite or _partial(out).is_file())
        done = iter([(out, add_to_file(opened(), data, out, given))])
    for file, count in done:
        name = address(file)
        cli.print_one(json, {"file": name, "rows": count}, f"{name}: " + plural(count, "row"))


# ------------------------------------------------------------------ a file


def add_to_file(added: Addition, data: Path, out: Path, given: Mapping[str, str]) -> int:
    """Writes every row of a table with what is added; returns how many there were."""
    source = _look_into(added, {out: data}, given)
    return _add(added, source, data, out, _fingerprint(added, source))


def _look_into(added: Addition, files: Mapping[Path, Path], given: Mapping[str, str]) -> RowSource:
    """The rows of the first file that has any; refuses outputs that cannot be written."""
    formats = (".jsonl", ".parquet") if VECTORS in added.empty else tuple(WRITERS)
    for out in files:
        require_that(
            out.suffix in formats,
            "{out} should end in one of {formats}.",
            out=out,
            formats=" ".join(formats),
        )
    with_rows = (file for file in files.values() if len(files) > 1 and not _is_empty(file))
    source = added.source(next(with_rows, min(files.values())), given)
    inputs = [source.ask(row) for row in islice(source.rows(), ROWS_AT_ONCE)]
    if empty := inputs.count(None):
        cli.note(
            "{empty:,} of the first {first:,} rows have no text; nothing is added to these.",
            empty=empty,
            first=len(inputs),
        )
    note_unknown(added.model, inputs)
    return source


def note_unknown(model: "cli.inference.Model", inputs: Iterable[Any]) -> None:
    """Notes if the model's vocabulary does not cover the texts."""
    from malmoi.tokenizer.extend import unknown_note

    parts = (part for one in inputs for part in ([one] if isinstance(one, str) else one or ()))
    if sentence := unknown_note(model.tokenizer, (p for p in parts if isinstance(p, str))):
        cli.note(sentence)


def _fingerprint(added: Addition, source: RowSource) -> dict[str, Any]:
    """What the results depend on; the model by its files, which may lie elsewhere by machine."""
    model = added.model.checkpoint.source or Path()
    files = [model, *sorted(model.glob("[!.]*")), *sorted(model.glob("*/config.json"))]
    sums = [(file.name, disk.file_checksum(file)) for file in files if file.is_file()]
    return {
        "verb": added.verb,
        "model": f"{crc32(repr(sums).encode()):08x}",
        "columns": source.columns,
        **added.settings,
    }


def _add(
    added: Addition, source: RowSource, data: Path, out: Path, about: Mapping[str, Any]
) -> int:
    total = sum(1 for _ in source.rows())
    made = _resume(_partial(out), {"data": disk.file_checksum(data), **about})
    if made:
        cli.say("Resuming after row {made:,} of {total:,}.", made=made, total=total)
    with _partial(out).open("a", encoding="utf-8") as file:
        rows = islice(source.rows(), made, None)
        while some := [source.ask(row) for row in islice(rows, ROWS_AT_ONCE)]:
            with part_of(added.verb, made, total):
                found = iter(added.compute([one for one in some if one is not None]))
            each = [added.empty if one is None else next(found) for one in some]
            file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in each)
            file.flush()
            made += len(some)
            report_progress(Progress(added.verb, made, total, "texts"))
    with _partial(out).open(encoding="utf-8") as file, disk.atomic_write(out) as target:
        next(file)  # the fingerprint
        pairs = zip(source.rows(), map(json.loads, file), strict=True)
        joined = ({**row.values, **added.restore(one)} for row, one in pairs)
        WRITERS[out.suffix](target, joined, data)
    _partial(out).unlink()
    return total


def _partial(out: Path) -> Path:
    """The results so far; it is there until the output is, and removed after it."""
    return out.with_name(out.name + ".partial")


def _resume(partial: Path, about: Mapping[str, Any]) -> int:
    """The number of finished results, in whole groups; the rest and another run's are discarded."""
    head = json.dumps(about, ensure_ascii=False) + "\n"
    text = partial.read_text("utf-8", errors="replace") if partial.is_file() else ""
    lines = text.split("\n")[:-1]  # the last was cut when the process was killed
    count = (len(lines) - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE if text.startswith(head) else 0
    disk.write_text(partial, head + "".join(line + "\n" for line in lines[1 : 1 + count]))
    return count


# ------------------------------------------------------------------ a folder


def _outputs(data: Path, out: Path) -> dict[Path, Path]:
    """The tables in a folder and below it, by where they are written: under the same names."""
    require_that(
        not out.resolve().is_relative_to(data.resolve()),
        "{out} lies in {data}: write to a folder of its own.",
        out=out,
        data=data,
    )
    tables = [
        name
        for file in sorted(data.rglob("*"))
        if uncompressed_name(name := file.relative_to(data)).suffix in WRITERS
        and file.is_file()
        and not any(part.startswith((".", "_")) for part in name.parts)
    ]
    found = {out / uncompressed_name(name): data / name for name in tables}
    require_that(found, "{data} holds no {formats} file.", data=data, formats=" ".join(WRITERS))
    require_that(
        len(found) == len(tables),
        "{data} holds a table twice, once compressed; remove one of the two.",
        data=data,
    )
    return found


def _add_to_folder(
    opened: Callable[[], Addition],
    files: Mapping[Path, Path],
    out: Path,
    given: Mapping[str, str],
    part: str,
    overwrite: bool,
) -> Iterator[tuple[Path, int]]:
    """Finished files are not written again; the columns of the first are those of all."""
    own = list(files)[part_slice(part)]
    added = opened()
    source = _look_into(added, files, given)
    given = {name: source.columns[name] for name in ("text", "pair") if name in source.columns}
    about = _fingerprint(added, source)
    with disk.folder_lock(out, shared=not overwrite):
        _begin(out, files, about, overwrite=overwrite)
        for target in own:
            target.parent.mkdir(parents=True, exist_ok=True)
            with disk.folder_lock(out / ".locks" / target.name, wait=True):
                if target.is_file():
                    _partial(target).unlink(missing_ok=True)  # of one killed just before that
                elif _is_empty(files[target]):
                    cli.note("There are no rows in {data}.", data=files[target])
                else:
                    source = added.source(files[target], given)
                    yield target, _add(added, source, files[target], target, about)
        done = sum(target.is_file() for target in files)
        cli.say("{done:,} of {files:,} files are finished.", done=done, files=len(files))


def _is_empty(file: Path) -> bool:
    return next(any_rows(file), None) is None


def _begin(
    out: Path, targets: Iterable[Path], about: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Records what makes the files of a folder; refuses one that something else has made."""
    record = RunFolder(
        out,
        RECORD,
        {"predict": "prediction", "embed": "embedding"}[about["verb"]],
        can_restart=True,
        unreadable={"model": "by another model"},
    )
    if overwrite:
        for path in (*targets, *map(_partial, targets), record.path):
            path.unlink(missing_ok=True)
    for target in targets:
        disk.require_free(target, overwrite=record.path.is_file())
    record.begin(about)


# ------------------------------------------------------------------ formats


def _table(rows: Iterable[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """All columns and the rows; the probability of each label has a column p_LABEL."""
    flat = [dict(row) for row in rows]
    for row in flat:
        row |= {f"p_{name}": value for name, value in row.pop("probabilities", {}).items()}
    return list(dict.fromkeys(name for row in flat for name in row)), flat


def _write_table(file: IO[bytes], rows: Iterable[Row], data: Path) -> None:
    """Separated like the CSV that was read, else by commas."""
    comma = comma_dialect(first_lines(data)).delimiter if ".csv" in data.suffixes else ","
    text = _separated(rows, comma)
    # without this mark Excel reads a CSV in the system's old code page: Korean becomes garbage
    file.write(text.encode("utf-8" if text.isascii() else "utf-8-sig"))


def _write_tabs(file: IO[bytes], rows: Iterable[Row], data: Path) -> None:
    file.write(_separated(rows, "\t").encode())


def _separated(rows: Iterable[Row], delimiter: str) -> str:
    names, flat = _table(rows)
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, names, delimiter=delimiter, lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    return text.getvalue()


def _write_lines(file: IO[bytes], rows: Iterable[Row], data: Path) -> None:
    told: Any = {"ensure_ascii": False, "default": lambda v: getattr(v, "tolist", v.__str__)()}
    file.writelines(f"{json.dumps(row, **told)}\n".encode() for row in rows)


def _write_parquet(file: IO[bytes], rows: Iterable[Row], data: Path) -> None:
    """Columns of a Parquet file keep their types.

    Vectors are no lists of fixed size: some pyarrows cannot read those where a row has none.
    """
    pyarrow = import_pyarrow(Path(".parquet"))
    names, flat = _table(rows)
    known = pyarrow.parquet.read_schema(data) if data.suffix == ".parquet" else ()
    types = {field.name: field.type for field in known}
    if all(row.get(VECTORS) is None or hasattr(row[VECTORS], "dtype") for row in flat):
        types.setdefault(VECTORS, pyarrow.list_(pyarrow.float32()))
    columns = {n: pyarrow.array([row.get(n) for row in flat], types.get(n)) for n in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def _write_excel(file: IO[bytes], rows: Iterable[Row], data: Path) -> None:
    names, flat = _table(rows)
    book = optional_package("openpyxl", "Excel").Workbook(write_only=True)
    sheet = book.create_sheet()
    sheet.append(names)
    for row in flat:
        sheet.append([row.get(name) for name in names])
    book.save(file)


# by the format that is written; `data` is the file that was read
WRITERS: dict[str, Callable[[IO[bytes], Iterable[Row], Path], None]] = {
    ".csv": _write_table,
    ".tsv": _write_tabs,
    ".jsonl": _write_lines,
    ".parquet": _write_parquet,
    ".xlsx": _write_excel,
}
