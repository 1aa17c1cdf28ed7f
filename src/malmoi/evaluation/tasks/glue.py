"""GLUE (Wang et al. 2018) in its own file formats, and related data sets: SICK, IMDB.

Korean ones: NSMC (film reviews), KorSTS (Ham et al. 2020), KLUE-NLI (Park et al. 2021).
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from malmoi.evaluation.task import Example, Task, columns
from malmoi.text.rows import BrokenRow, DataRow, any_rows, json_line_rows, table_rows

SCITAIL_COLUMNS = ("premise", "hypothesis", "label")
YES_NO = {"0": "no", "1": "yes"}


def labelled(
    name: str,
    rows: Callable[[Path], Iterable[DataRow]],
    example: Callable[[DataRow], Example],
    about: str,
    prompt: str,
    answers: Mapping[str, str],
    **others: Any,
) -> Task:
    """A classification by accuracy; its labels are those with an answer."""
    given = {"metrics": ("accuracy",), "labels": tuple(answers), "answers": answers, **others}
    return Task(name, "classification", rows, example, about, prompt=prompt, **given)


cola_rows = partial(table_rows, header=("source", "label", "mark", "sentence"))


def snli_rows(path: Path) -> Iterator[DataRow]:
    """Reads SNLI's .jsonl or .txt."""
    yield from json_line_rows(path) if ".jsonl" in path.suffixes else table_rows(path)


def scitail_rows(path: Path) -> Iterator[DataRow]:
    """Reads SciTail's tsv_format, which has no header, or its snli_format, JSON in a .txt file."""
    if ".tsv" in path.suffixes:
        yield from table_rows(path, SCITAIL_COLUMNS)
        return
    for row in json_line_rows(path):
        if isinstance(row, BrokenRow):
            yield row
            continue
        label = {"entailment": "entails"}.get(row["gold_label"], row["gold_label"])
        yield DataRow(
            dict(zip(SCITAIL_COLUMNS, (row["sentence1"], row["sentence2"], label), strict=True)),
            row.place,
        )


ROWS = {
    "table": table_rows,
    "any": any_rows,
    "cola": cola_rows,
    "snli": snli_rows,
    "scitail": scitail_rows,
}


def _tasks() -> Iterator[Task]:
    """The tasks of glue.toml, in its order."""
    records = tomllib.loads((files("malmoi.evaluation.tasks") / "glue.toml").read_text("utf-8"))
    for name, own in records.items():
        given = records[name] = records.get(own.pop("like", ""), {}) | own
        own = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
        own["rows"] = ROWS[own.get("rows", "table")]
        own["example"] = columns(**own.pop("columns"))
        yield Task(name, **own) if "kind" in own else labelled(name, **own)


TASKS = tuple(_tasks())
