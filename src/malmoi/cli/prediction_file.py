"""Predictions of a file's rows: every column is kept, the prediction is added."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from malmoi.cli.output import one_line, say
from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.system.files import atomic_write
from malmoi.text.columns import text_column

if TYPE_CHECKING:
    from malmoi.inference import Model

Row = Mapping[str, Any]
ROWS_AT_ONCE = 2000  # rows per batch
ADDED = ("prediction", "score", "probabilities")


def prediction_facts(answer: Any) -> dict[str, Any]:
    """A prediction of any kind as values of a row: prediction, score and any probabilities."""
    if isinstance(answer, list):  # spans
        spans = (f"[{one_line(s.text)} {s.label} {s.score:.3f}]" for s in answer)
        return {"prediction": " ".join(spans)}
    if hasattr(answer, "text") and not hasattr(answer, "candidates"):  # a generated answer
        return {"prediction": answer.text}
    if hasattr(answer, "candidates"):  # an answer
        return {"prediction": answer.text, "score": f"{answer.score:.4f}"}
    labels = answer.labels if hasattr(answer, "labels") else (answer.label,)
    scores = ", ".join(f"{answer.scores[label]:.4f}" for label in labels)
    probabilities = {name: round(value, 5) for name, value in answer.scores.items()}
    facts = {"prediction": ", ".join(labels), "score": scores or "-"}
    return facts | ({"probabilities": probabilities} if len(probabilities) > 1 else {})


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
    from malmoi.inference.predict import Predictor

    if out.suffix not in WRITERS:
        raise UsageError(f"--out {out} should end in one of {' '.join(WRITERS)}.")
    chunks = _chunks(data)
    first = next(chunks, [])
    if not first:
        raise MalmoiError(f"There are no rows in {data}.")
    _refuse_taken(first[0], data)
    known = Predictor.of(model.checkpoint).columns
    if text is None and known and all(name in first[0] for name in known.values()):
        text = known["text"]
        pair = pair or known.get("pair")
        say(f"text = {text}" + (f", pair = {pair}" if pair else ""))
    if text is None:
        text = text_column(first, [name for name in first[0] if name != pair], str(data))
        say(f"text = {text}")
    count = 0
    with atomic_write(out) as file:
        stream = io.TextIOWrapper(file, "utf-8", newline="")
        write = WRITERS[out.suffix](stream)
        for rows in chain([first], chunks):
            asked = [_asked(row, text, pair, data) for row in rows]
            found = model.classify(asked, labels) if labels else model.predict(asked)
            for row, answer in zip(rows, found, strict=True):
                write({**row, **prediction_facts(answer)})
            count += len(rows)
        stream.detach()
    return count


def _chunks(data: Path) -> Iterator[list[Row]]:
    from malmoi.text.rows import BadRow, any_rows

    rows = any_rows(data)
    try:
        while chunk := [row.checked for row in islice(rows, ROWS_AT_ONCE)]:
            yield chunk
    except BadRow as error:
        raise MalmoiError(f"{error}.") from error


def _refuse_taken(row: Row, data: Path) -> None:
    taken = [name for name in ADDED if name in row]
    if taken:
        raise UsageError(f"{data} already has a column {taken[0]!r}; rename it first.")


def _asked(row: Row, text: str, pair: str | None, data: Path) -> Any:
    for name in (text, pair):
        if name is not None and name not in row:
            raise UsageError(f"{data} has no column {name!r}.{nearest(name, row)}")
    first = row[text] if isinstance(row[text], list) else str(row[text])
    return first if pair is None else (first, str(row[pair]))


def _table_writer(stream: TextIO, delimiter: str = ",") -> Callable[[Row], None]:
    """A column for the probability of each label: p_LABEL."""
    table = csv.writer(stream, delimiter=delimiter, lineterminator="\n")
    header: list[str] = []

    def write(row: Row) -> None:
        probabilities = row.get("probabilities", {})
        flat = {name: value for name, value in row.items() if name != "probabilities"}
        flat |= {f"p_{name}": value for name, value in probabilities.items()}
        if not header:
            header.extend(flat)
            table.writerow(header)
        table.writerow([flat.get(name, "") for name in header])

    return write


def _line_writer(stream: TextIO) -> Callable[[Row], None]:
    def write(row: Row) -> None:
        stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    return write


WRITERS: dict[str, Callable[[TextIO], Callable[[Row], None]]] = {
    ".csv": _table_writer,
    ".tsv": lambda stream: _table_writer(stream, "\t"),
    ".jsonl": _line_writer,
}
