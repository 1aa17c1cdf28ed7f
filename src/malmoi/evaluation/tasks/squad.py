"""SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0 (2018): a question, a paragraph, an answer span."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.evaluation.prompts import SQUAD_PROMPT
from malmoi.evaluation.task import Example, Task
from malmoi.text.rows import BadRow, DataRow, json_value


def squad_questions(path: Path) -> Iterator[DataRow]:
    """Yields every question with its paragraph; its place is its number in the file."""
    number = 0
    try:
        for article in json_value(path)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    yield DataRow({**question, "context": paragraph["context"]}, f"{path}:{number}")
    except (KeyError, TypeError) as error:
        raise MalmoiError(
            "{path} is not in SQuAD's format after question {number}: {error} is missing.",
            path=path,
            number=number,
            error=error,
        ) from error


def squad_example(row: DataRow) -> Example:
    impossible = bool(row.values.get("is_impossible", False))
    golds = None
    if impossible or "answers" in row.values:
        given = [] if impossible else row["answers"]
        golds = tuple(dict.fromkeys(_gold(one, row.place) for one in given))
    return Example(row.text("question"), row.text("context"), golds, id=str(row["id"]))


def _gold(answer: Any, place: str) -> tuple[str, int]:
    try:
        return str(answer["text"]), int(answer["answer_start"])
    except (KeyError, TypeError, ValueError):
        raise BadRow(
            place,
            "an answer must have a text and an answer_start, not {answer!r:.60}",
            answer=answer,
        ) from None


SQUAD = Task(
    "squad",
    "answer",
    squad_questions,
    squad_example,
    about="where in a paragraph is the answer?",
    prompt=SQUAD_PROMPT,
)
SQUAD2 = replace(SQUAD, name="squad2", about="where is the answer, if there is one at all?")
KORQUAD = replace(
    SQUAD,
    name="korquad",
    about="where in a Korean paragraph is the answer? (F1 by characters)",
    metrics=("korquad_f1", "korquad_exact"),
    files=("*train*", "*dev*"),
    prompt="지문: {pair}\n질문: {text}\n답:",
)
SQUAD_RETRIEVAL = Task(
    "squad-retrieval",
    "retrieval",
    squad_questions,
    lambda row: Example(row.text("question"), row.text("context"), 0, id=str(row["id"])),
    about="which paragraph answers a question?",
)

TASKS = (SQUAD, SQUAD2, KORQUAD, SQUAD_RETRIEVAL)
