"""The task of some rows: named, guessed from their columns, or the one a model was tuned for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError, require_that, required
from malmoi.evaluation.kinds import (
    CLASSIFICATION,
    KINDS,
    RETRIEVAL,
    SIMILARITY,
    TAGGING,
    custom_task,
)
from malmoi.evaluation.task import KIND_ALIASES, Task, read_columns
from malmoi.evaluation.tasks import TASKS, language_modelling, named_task, spans
from malmoi.inference import Model
from malmoi.inference.predict import Predictor
from malmoi.messages import logger
from malmoi.system.untrusted import read_object
from malmoi.text.columns import TAG, GuessedColumns, first_rows, guess_columns
from malmoi.text.lines import read_sample
from malmoi.text.records import column_named
from malmoi.text.rows import BadRow, RowSource, any_rows, file_list, has_rows, is_files, text_lines

FORMATS = frozenset((".json", ".txt", ".tsv", ".conll", ".bio", ".iob"))
HEAD_LINES = 50  # read to recognise a format
HEAD_CHARACTERS = 100_000
# common names of such columns, most likely first
ANCHOR_NAMES = ("anchor", "query", "question", "sentence1", "sentence_a", "premise", "text")
POSITIVE_NAMES = ("positive", "pos", "pair", "sentence2", "sentence_b", "hypothesis", "answer")
NEGATIVE_NAMES = ("negative", "neg")
SCORE_NAMES = ("score", "similarity", "similarity_score", "label")
# others name their columns
GUESSED_KINDS = ("classification", "multilabel", "regression", "tagging", "writing")


def task_on_columns(name: str, **columns: Any) -> Task:
    """A named task, or a kind of task on the given columns: text, pair, label, choices."""
    given = _given(columns)
    if name in KINDS or name in KIND_ALIASES:
        return custom_task(name, **given)
    if given:
        raise UsageError(
            "The task {name} has its own columns; --{next} is for a kind such as writing.",
            name=name,
            next=next(iter(given)),
        )
    return named_task(name)


def guess_task(
    name: str | None, data: RowSource | None, **columns: Any
) -> tuple[Task, GuessedColumns | None]:
    """The named task or that of the table (none: a classification), with the found columns."""
    if data is None:
        return task_on_columns(name or CLASSIFICATION.name, **columns), None
    folder = isinstance(data, str | Path) and file_list(data)[0].is_dir()
    several = not isinstance(columns.get("label") or "", str)
    tagged = is_files(data) and any(".conllu" in file.suffixes for file in file_list(data))
    name = KIND_ALIASES.get(name or "", name) or (TAGGING.name if tagged else None)
    if not any(columns.values()) and (known := published_format(name, data)):
        logger.info("{data} has the format of {task}.", data=file_list(data)[0], task=known)
        return named_task(known), None
    if name in (SIMILARITY.name, RETRIEVAL.name) and not folder:
        found = similarity_columns_of(data, ranked=name == RETRIEVAL.name, **columns)
        return _similarity_task(found, data), found
    if several or name not in (None, "", *GUESSED_KINDS):
        return task_on_columns(name or "multilabel", **columns), None
    if folder:
        require_that(
            name,
            "{data} is a folder: name the task too, as in malmoi finetune sst2 {data}",
            data=data,
        )
        return task_on_columns(name or "", **columns), None
    named = {key: columns.get(key) for key in ("text", "pair", "label")}
    found = guess_columns(data, kind=name, **named)
    columns |= dict(text=found.text, pair=found.pair, label=found.label)
    columns["separator"] = columns.get("separator") or found.separator
    return task_on_columns(found.kind, **columns), found


def _similarity_task(found: GuessedColumns, data: RowSource) -> Task:
    """A task on the columns of sentence pairs; without a second column on plain text."""
    given = dict(text=found.text, pair=found.pair, label=found.label)
    task = task_on_columns(found.kind, **given, choices=found.negatives or None)
    return replace(task, rows=language_modelling.line_rows) if is_plain_text(data) else task


def similarity_columns_of(
    data: RowSource, *, ranked: bool = False, **columns: Any
) -> GuessedColumns:
    """The kind of these rows and their columns; a score makes it a similarity unless `ranked`."""
    given = {name: value for name, value in columns.items() if value is not None}
    if is_plain_text(data):
        return GuessedColumns("retrieval", "text", None)
    names = list(first_rows(data, (given.get(name) for name in ("text", "pair", "label")))[0])

    def named(role: str, known: Sequence[str]) -> str | None:
        return given.get(role, column_named(known, names))

    text = named("text", ANCHOR_NAMES)
    pair = named("pair", POSITIVE_NAMES)
    if text is None or (pair is None and len(names) > 1 and "text" not in given):
        raise UsageError(
            "similarity needs the columns of two texts, --text and --pair, and either a "
            "score, --label, or negatives, --choices; the rows have: {names}.",
            names=", ".join(names)[:200],
        )
    label = None if ranked else named("label", SCORE_NAMES)
    if pair is not None and label is not None and "choices" not in given:
        return GuessedColumns("similarity", text, label, pair).among(names)
    negative = named("negative", NEGATIVE_NAMES)
    choices = tuple(given.get("choices", (negative,) if negative else ()))
    return GuessedColumns("retrieval", text, None, pair, negatives=choices).among(names)


def is_plain_text(data: RowSource) -> bool:
    """Whether the data are text files whose first line has no columns."""
    return is_files(data) and all(
        ".txt" in path.suffixes and "\t" not in next(text_lines(path), (0, ""))[1]
        for path in file_list(data)
    )


def published_format(kind: str | None, data: RowSource) -> str | None:
    """The task whose public format a file has: SQuAD's JSON, or CoNLL's one word per line."""
    if kind not in (None, "tagging", "answer") or not is_files(data):
        return None
    path = next(iter(file_list(data)), Path())
    if not path.is_file() or not FORMATS.intersection(path.suffixes):
        return None
    begin = read_sample(path)[1]
    return _squad_format(begin) if ".json" in path.suffixes else _tag_format(begin)


def _squad_format(begin: str) -> str | None:
    start = begin[:HEAD_CHARACTERS].lstrip()
    if not (start.startswith("{") and '"paragraphs"' in start and '"qas"' in start):
        return None
    known = {"KorQuAD_v1": "korquad", '"is_impossible"': "squad2", "": "squad"}
    return next(name for mark, name in known.items() if mark in start)


def _tag_format(begin: str) -> str | None:
    lines = (line for line in begin.split("\n", HEAD_LINES)[:HEAD_LINES] if line.strip())
    words = [line.split() for line in lines if not line.startswith(spans.DOCUMENT_MARK)]
    tags = list(filter(TAG.fullmatch, (line[-1] for line in words if line[1:])))
    # a word without its tag is named where the file is read; answers of "O" and "X" are no tags
    untagged = len(words) // 2 if "-" in "".join(tags) else 0
    return "conll2003" if len(words) > 1 and len(words) - len(tags) <= untagged else None


def tuned_task(model: Model) -> str | None:
    """The task that a model was fine-tuned for; a sentence encoder's is similarity."""
    task = model.checkpoint.extra.get("task")  # which copies of its folder keep
    name = task if isinstance(task, str) else None
    ranks = name in (None, RETRIEVAL.name) and model.task_head is SIMILARITY.output
    return SIMILARITY.name if ranks else name


def public_task(model: Model) -> Task | None:
    """The public task that a model was fine-tuned for, if it was one."""
    name = tuned_task(model)
    return named_task(name) if name is not None and name in TASKS else None


def prediction_format(model: Model, path: Path) -> Task | None:
    """The public task that a model was fine-tuned for, if a file is in its own format."""
    task = public_task(model)
    if task is None or task.kind == TAGGING.name:
        return None
    try:
        first = next(any_rows(path), None) if has_rows(path) else None
        if first is not None and all(one in first.values for one in input_columns(task)):
            return None
    except (MalmoiError, BadRow):
        pass  # no table
    try:
        row = next(iter(task.rows(path)), None)
        return None if row is None or not task.example(row).input else task
    except (MalmoiError, BadRow):
        return None


def input_columns(task: Task) -> list[str]:
    """The columns of a task's texts; a missing name stands for a format that is no table."""
    found = read_columns(task)
    return [found[name] for name in ("text", "pair") if name in found] or [""]


def tuned_columns(model: Model, data: RowSource) -> dict[str, Any]:
    """The columns that a fine-tuned model learnt from, as far as these rows have them."""
    if model.task_head is None or (is_files(data) and any(p.is_dir() for p in file_list(data))):
        return {}
    columns = Predictor.of(model.checkpoint).columns
    row = first_rows(data, columns.values())[0] if columns else {}
    found: dict[str, Any] = {}
    for name, column in columns.items():
        several = name in ("label", "choices") and column not in row
        parts = tuple(column.split(",")) if several else (column,)
        if all(part in row for part in parts):
            found[name] = parts if several or name == "choices" else column
    return found | ({"separator": columns["separator"]} if "separator" in columns else {})


def evaluated_task(
    model: Model, task: str | None, data: RowSource | None, columns: Mapping[str, Any]
) -> tuple[Task, GuessedColumns | None]:
    """The named task, or the one a model was fine-tuned for, on the columns that it learnt from."""
    name = required(
        tuned_task(model) if task is None else task,
        "Which task? This model was not fine-tuned for one: name it, task=….",
    )
    if data is None:
        return task_on_columns(name, **columns), None
    _note_seen_files(model, data)
    known = tuned_columns(model, data) if name in KINDS or name in KIND_ALIASES else {}
    return guess_task(name, data, **{**known, **_given(columns)})


def _note_seen_files(model: Model, data: RowSource) -> None:
    """Warns of a file with the name of one that the model was fine-tuned on."""
    report = Path(model.checkpoint.source or "") / "report.json"
    if model.task_head is None or not is_files(data) or not report.is_file():
        return
    protocol = read_object(report).get("protocol") or {}
    page = report.with_suffix(".html")
    for path in file_list(data):
        if path.name in protocol.get("trained_files", ()):
            logger.warning(
                "This model was fine-tuned on {path}, so this score says little about new "
                "rows. The score on rows it was not trained on is in {page}.",
                path=path.name,
                page=page,
            )


def _given(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if value is not None}
