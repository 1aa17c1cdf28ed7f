"""Predicts the rows of a file: keeps every column and adds the prediction.

Predictions are appended to a partial file next to the output, so that an interrupted run can
resume; the output is written when all are finished.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from malmoi.cli import shared as cli
from malmoi.errors import UsageError, ensure, explained, require_known, require_that
from malmoi.system.files import atomic_write, write_text
from malmoi.system.packages import optional_package
from malmoi.system.progress import Progress, part_of, report_progress
from malmoi.text.lines import uncompressed_name
from malmoi.text.records import comma_dialect, import_pyarrow
from malmoi.text.rows import BadRow, DataRow, any_rows

if TYPE_CHECKING:
    from malmoi.inference import Model

Row = Mapping[str, Any]
ROWS_AT_ONCE = 1000  # predicted together, sorted by length; an interruption loses at most these
ADDED = ("prediction", "score", "probabilities")
PARTIAL = ".partial"  # suffix of the predictions so far


def prediction_facts(answer: Any) -> dict[str, Any]:
    """A prediction of any kind as values of a row: prediction, score and any probabilities."""
    if isinstance(answer, list):  # spans
        spans = (f"[{cli.one_line(s.text)} {s.label} {s.score:.3f}]" for s in answer)
        return {"prediction": " ".join(spans)}
    if hasattr(answer, "candidates"):  # an answer
        return {"prediction": answer.text, "score": round(answer.score, 4)}
    if hasattr(answer, "text"):  # a written answer
        return {"prediction": answer.text}
    probabilities = {name: round(value, 5) for name, value in answer.scores.items()}
    if hasattr(answer, "labels"):  # one score for each label that holds
        scores = ", ".join(f"{answer.scores[label]:.4f}" for label in answer.labels)
        facts = {"prediction": ", ".join(answer.labels), "score": scores or "-"}
    else:
        facts = {"prediction": answer.label, "score": round(answer.scores[answer.label], 4)}
    return facts | ({"probabilities": probabilities} if len(probabilities) > 1 else {})


def default_output(data: Path) -> Path:
    """new.csv → new.predicted.csv; a format that cannot be written becomes CSV."""
    bare = uncompressed_name(data)
    suffix = bare.suffix if bare.suffix in WRITERS else ".csv"
    return bare.with_name(f"{bare.stem}.predicted{suffix}")


def partial_file(out: Path) -> Path:
    """The predictions so far; it is there until the output is, and removed after it."""
    return out.with_name(out.name + PARTIAL)


@explained(BadRow, "{error}.")
def predict_file(
    model: "Model",
    data: Path,
    out: Path,
    *,
    text: str | None = None,
    pair: str | None = None,
    labels: Sequence[str] = (),
) -> int:
    """Writes every row of a table with its prediction; returns how many there were.

    With `labels` the rows are classified by the labels' names alone.
    """
    require_that(
        out.suffix in WRITERS,
        "--out {out} should end in one of {writers}.",
        out=out,
        writers=" ".join(WRITERS),
    )
    given = {name: column for name, column in (("text", text), ("pair", pair)) if column}
    source = _table_source(data, {}, given) if labels else _source(model, data, given)
    total = sum(1 for _ in source.rows())
    note_unknown(model, (source.ask(row) for row in islice(source.rows(), ROWS_AT_ONCE)))
    predict = (lambda texts: model.classify(texts, labels)) if labels else model.predict
    partial = partial_file(out)
    made = _resume(partial, _fingerprint(model, data, [*source.names, *labels]))
    if made:
        cli.say("Resuming after row {made:,} of {total:,}.", made=made, total=total)
    with partial.open("a", encoding="utf-8") as file:
        rows = islice(source.rows(), made, None)
        while some := list(islice(rows, ROWS_AT_ONCE)):
            with part_of("predict", made, total):
                facts = _predictions(predict, [source.ask(row) for row in some])
            file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in facts)
            file.flush()
            made += len(some)
            report_progress(Progress("predict", made, total, "texts"))
    with partial.open(encoding="utf-8") as file:
        next(file)  # the fingerprint
        found = map(json.loads, file)
        with atomic_write(out) as target:
            joined = ({**row.values, **one} for row, one in zip(source.rows(), found, strict=True))
            _writer(data, out)(target, joined)
    partial.unlink()
    return total


def note_unknown(model: "Model", inputs: Iterable[Any]) -> None:
    """Notes if the model's vocabulary does not cover the texts."""
    from malmoi.tokenizer.extend import unknown_note

    parts = (part for one in inputs for part in ([one] if isinstance(one, str) else one or ()))
    if sentence := unknown_note(model.tokenizer, (p for p in parts if isinstance(p, str))):
        cli.note(sentence)


class RowSource(NamedTuple):
    """The rows of a file, and the model's input of each; None if it has no text."""

    rows: Callable[[], Iterator[DataRow]]
    ask: Callable[[DataRow], Any]
    names: tuple[str, ...]  # of the columns or the format that are read


def _source(model: "Model", data: Path, given: Mapping[str, str]) -> RowSource:
    """The rows in the format of the model's own task, or of a table with the columns it reads."""
    from malmoi.evaluation.guess import prediction_format

    task = None if given else prediction_format(model, data)
    if task is None:
        known = model.input_columns if "text" in given else _known_columns(model, data)
        return _table_source(data, known, given)
    cli.say("{data} has the format of {task}.", data=data, task=task.name)
    read, example = task.rows, task.example
    return RowSource(
        lambda: _checked(read(data)), lambda row: example(row).input, (f"task:{task.name}",)
    )


def _checked(rows: Iterable[DataRow]) -> Iterator[DataRow]:
    for row in rows:
        _ = row.checked  # says what is wrong with it
        yield row


def _table_source(data: Path, known: Mapping[str, str], given: Mapping[str, str]) -> RowSource:
    """The rows of a table, by the columns that are given, known, or likely."""
    named = (*known.values(), *given.values())

    def rows() -> Iterator[DataRow]:
        return _checked(any_rows(data, named))

    first = [row.values for row in islice(rows(), ROWS_AT_ONCE)]
    ensure(first, "There are no rows in {data}.", data=data)
    require_that(
        ".txt" not in data.suffixes or len(first[0]) != 1,
        "{data} has lines, not columns; to predict its lines: malmoi predict -m DIR < {data}",
        data=data,
    )
    columns = _columns(first, data, known, given)
    return RowSource(rows, lambda row: _asked(row.values, columns), tuple(columns.values()))


def _columns(
    first: list[Row], data: Path, known: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """The columns that are read: those given, those that the model learnt from, or a guess."""
    for name in ADDED:
        require_that(
            name not in first[0],
            "{data} already has a column {taken!r}; rename it first.",
            data=data,
            taken=name,
        )
    missing = [n for column in known.values() for n in column.split(",") if n not in first[0]]
    if missing and len(known) > 1 and not given:
        raise UsageError(
            "{data} has no column {missing!r}, which this model reads; its columns are "
            "{first}. Name them: --text COLUMN --pair COLUMN.",
            data=data,
            missing=missing[0],
            first=", ".join(first[0])[:200],
        )
    found = {name: column for name, column in known.items() if column not in missing}
    found |= given
    if "text" not in found:
        from malmoi.text.columns import text_column

        others = [name for name in first[0] if name not in given.values()]
        found = {"text": text_column(first, others, str(data))} | found
    for column in (found["text"], found.get("pair", found["text"])):
        require_known(column, first[0], "{data} has no column {name!r}.{hint}", data=data)
    _tell(found, first, given)
    return found


def _tell(found: Mapping[str, str], first: list[Row], given: Mapping[str, str]) -> None:
    """Says which columns are read, and whether rows lack a text."""
    if "text" not in given:
        cli.say(", ".join(f"{name} = {column}" for name, column in found.items()))
    if empty := sum(not _has_text(row.get(found["text"])) for row in first):
        cli.note(
            "{empty:,} of the first {first:,} rows have no text and get no prediction.",
            empty=empty,
            first=len(first),
        )


def _known_columns(model: "Model", data: Path) -> dict[str, str]:
    """The columns that the model learnt from, also of a public task in another format."""
    from malmoi.evaluation.guess import public_task, similarity_columns_of
    from malmoi.evaluation.task import read_columns
    from malmoi.inference.embed import pairs_needed
    from malmoi.inference.predictors import SENTENCE

    if model.task_head is SENTENCE and not model.input_columns:
        try:
            pair = similarity_columns_of(data, ranked=True)
        except UsageError as error:
            raise pairs_needed() from error
        return {"text": pair.text} | ({"pair": pair.pair} if pair.pair else {})
    task = public_task(model)
    known = read_columns(task) if task is not None else {}
    return model.input_columns or {k: v for k, v in known.items() if k in ("text", "pair")}


def _asked(row: Row, columns: Mapping[str, str]) -> Any:
    """The model input of a row; None if it has no text."""
    from malmoi.inference.predict import row_choices

    first = row.get(columns["text"])
    if not _has_text(first):
        return None
    if isinstance(first, list):  # a conversation
        return first
    names = [columns[name] for name in ("text", "pair") if name in columns]
    texts = ["" if row.get(name) is None else str(row[name]) for name in names]
    choices = row_choices(row, columns)
    return texts[0] if len(texts) == 1 and not choices else (*texts, *choices)


def _has_text(value: Any) -> bool:
    return value is not None and bool(str(value).strip())


def _predictions(predict: Callable[[Any], Any], inputs: list[Any]) -> list[dict[str, Any]]:
    found = iter(predict([one for one in inputs if one is not None]))
    return [{"prediction": ""} if one is None else _row_facts(one, next(found)) for one in inputs]


def _row_facts(asked: Any, answer: Any) -> dict[str, Any]:
    """The values that a row gets; the probabilities of its own choices are numbered from 1."""
    facts = prediction_facts(answer)
    if isinstance(asked, tuple) and isinstance(asked[-1], tuple):
        chances = facts["probabilities"].values()
        facts["probabilities"] = {str(i): one for i, one in enumerate(chances, start=1)}
    return facts


# ------------------------------------------------------------------ resuming


def _fingerprint(model: "Model", data: Path, names: Sequence[str]) -> dict[str, Any]:
    source = model.checkpoint.source
    files = sorted(source.glob("*")) if source is not None and source.is_dir() else [source or data]
    return {
        "data": _stamp(data),
        "model": [_stamp(file) for file in files if file.is_file()],
        "names": list(names),
    }


def _stamp(file: Path) -> list[Any]:
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


def _resume(partial: Path, fingerprint: dict[str, Any]) -> int:
    """The number of finished predictions; those of another run are discarded."""
    head = json.dumps(fingerprint, ensure_ascii=False) + "\n"
    lines = partial.read_text("utf-8").splitlines(keepends=True) if partial.is_file() else []
    if lines and lines[-1][-1] != "\n":  # truncated when the process was killed
        lines.pop()
    if not lines or lines[0] != head:
        lines = [head]
    write_text(partial, "".join(lines))
    return len(lines) - 1


# ------------------------------------------------------------------ formats


def _flat(row: Row) -> dict[str, Any]:
    """A row of a table, with a column for the probability of each label: p_LABEL."""
    plain = {name: value for name, value in row.items() if name != "probabilities"}
    return plain | {f"p_{name}": value for name, value in row.get("probabilities", {}).items()}


def _table(rows: Iterable[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """All columns, in the order of their first row, and the rows."""
    flat = [_flat(row) for row in rows]
    return list(dict.fromkeys(name for row in flat for name in row)), flat


def _write_table(file: IO[bytes], rows: Iterable[Row], delimiter: str = "\t") -> None:
    names, flat = _table(rows)
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, names, delimiter=delimiter, lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    found = text.getvalue()
    # without this mark Excel reads a CSV in the system's old code page: Korean becomes garbage
    marked = delimiter != "\t" and not found.isascii()
    file.write(found.encode("utf-8-sig" if marked else "utf-8"))


def _write_lines(file: IO[bytes], rows: Iterable[Row]) -> None:
    for row in rows:
        file.write((json.dumps(row, ensure_ascii=False, default=str) + "\n").encode())


def _write_parquet(file: IO[bytes], rows: Iterable[Row]) -> None:
    pyarrow = import_pyarrow(Path(".parquet"))
    names, flat = _table(rows)
    columns = {name: [row.get(name) for row in flat] for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def _write_excel(file: IO[bytes], rows: Iterable[Row]) -> None:
    names, flat = _table(rows)
    book = optional_package("openpyxl", "Excel").Workbook(write_only=True)
    sheet = book.create_sheet()
    sheet.append(names)
    for row in flat:
        sheet.append([row.get(name) for name in names])
    book.save(file)


Writer = Callable[[IO[bytes], Iterable[Row]], None]
WRITERS: dict[str, Writer] = {
    ".csv": lambda file, rows: _write_table(file, rows, ","),
    ".tsv": _write_table,
    ".jsonl": _write_lines,
    ".parquet": _write_parquet,
    ".xlsx": _write_excel,
}


def _writer(data: Path, out: Path) -> Writer:
    """The writer of a format; a CSV is separated like the one that was read."""
    if out.suffix == ".csv" and ".csv" in data.suffixes:
        return partial(_write_table, delimiter=comma_dialect(data).delimiter)
    return WRITERS[out.suffix]
