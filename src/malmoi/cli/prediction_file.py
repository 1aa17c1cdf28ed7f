"""Predictions of a table's rows: the columns that a model reads, and those that are added."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmoi.cli import shared as cli
from malmoi.cli.row_files import ROWS_AT_ONCE, Addition, Row, RowSource
from malmoi.errors import UsageError, ensure, require_known, require_that
from malmoi.text.rows import DataRow, any_rows

if TYPE_CHECKING:
    from malmoi.inference import Model

ADDED = ("prediction", "score", "probabilities")


def prediction_facts(answer: Any) -> dict[str, Any]:
    """A prediction of any kind as values of a row: prediction, score and any probabilities."""
    if isinstance(answer, list):  # spans
        return {
            "prediction": " ".join(
                f"[{cli.one_line(span.text)} {span.label} {span.score:.3f}]" for span in answer
            )
        }
    if hasattr(answer, "text"):  # an answer found in a text has a score, a written one has none
        scored = {"score": round(answer.score, 4)} if hasattr(answer, "candidates") else {}
        return {"prediction": answer.text} | scored
    probabilities = {name: round(value, 5) for name, value in answer.scores.items()}
    if hasattr(answer, "labels"):  # one score for each label that holds
        scores = ", ".join(f"{answer.scores[label]:.4f}" for label in answer.labels)
        facts = {"prediction": ", ".join(answer.labels), "score": scores or "-"}
    else:
        facts = {"prediction": answer.label, "score": round(answer.scores[answer.label], 4)}
    return facts | ({"probabilities": probabilities} if len(probabilities) > 1 else {})


def predictions(model: "Model", labels: Sequence[str] = (), dtype: str | None = None) -> Addition:
    """Predictions by a fine-tuned model; with `labels`, by the labels' names alone."""

    def compute(inputs: list[Any]) -> list[Row]:
        answers: Any = model.classify(inputs, labels) if labels else model.predict(inputs)
        return list(map(_row_facts, inputs, answers))

    return Addition(
        "predict",
        model,
        lambda data, given: (
            table_source(data, {}, given, ADDED) if labels else _source(model, data, given)
        ),
        compute,
        {"prediction": ""},
        {"labels": list(labels), "dtype": dtype},
    )


def _source(model: "Model", data: Path, given: Mapping[str, str]) -> RowSource:
    """The rows in the format of the model's own task, or of a table with the columns it reads."""
    from malmoi.evaluation.guess import prediction_format

    task = None if given else prediction_format(model, data)
    if task is None:
        known = model.input_columns if "text" in given else _known_columns(model, data)
        return table_source(data, known, given, ADDED)
    cli.say("{data} has the format of {task}.", data=data, task=task.name)
    read, example = task.rows, task.example
    return RowSource(
        lambda: _checked(read(data)), lambda row: example(row).input, {"task": task.name}
    )


def _checked(rows: Iterable[DataRow]) -> Iterator[DataRow]:
    """The rows; a malformed one raises its error."""
    return (row for row in rows if row.checked is not None)


def table_source(
    data: Path, known: Mapping[str, str], given: Mapping[str, str], added: Sequence[str]
) -> RowSource:
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
    for name in added:
        require_that(
            name not in first[0],
            "{data} already has a column {taken!r}; rename it first.",
            data=data,
            taken=name,
        )
    columns = _columns(first, data, known, given)
    return RowSource(rows, lambda row: _asked(row.values, columns), columns)


def _columns(
    first: list[Row], data: Path, known: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """The columns that are read: those given, those that the model learnt from, or a guess."""
    missing = [n for column in known.values() for n in column.split(",") if n not in first[0]]
    require_that(
        not missing or len(known) < 2 or given,
        "{data} has no column {missing!r}, which this model reads; its columns are "
        "{first}. Name them: --text COLUMN --pair COLUMN.",
        data=data,
        missing="".join(missing[:1]),
        first=", ".join(first[0])[:200],
    )
    found = {**{name: one for name, one in known.items() if one not in missing}, **given}
    if "text" not in found:
        from malmoi.text.columns import text_column

        others = [name for name in first[0] if name not in given.values()]
        found = {"text": text_column(first, others, str(data))} | found
    for column in (found["text"], found.get("pair", found["text"])):
        require_known(column, first[0], "{data} has no column {name!r}.{hint}", data=data)
    if "text" not in given:
        cli.say(", ".join(f"{name} = {column}" for name, column in found.items()))
    return found


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
    if first is None or not str(first).strip():
        return None
    if isinstance(first, list):  # a conversation
        return first
    names = [columns[name] for name in ("text", "pair") if name in columns]
    texts = ["" if row.get(name) is None else str(row[name]) for name in names]
    choices = row_choices(row, columns)
    return texts[0] if len(texts) == 1 and not choices else (*texts, *choices)


def _row_facts(asked: Any, answer: Any) -> dict[str, Any]:
    """The values that a row gets; the probabilities of its own choices are numbered from 1."""
    facts = prediction_facts(answer)
    if isinstance(asked, tuple) and isinstance(asked[-1], tuple):
        chances = facts["probabilities"].values()
        facts["probabilities"] = {str(i): one for i, one in enumerate(chances, start=1)}
    return facts
