"""A task is a record with two views: features for fine-tuning (`features.py`), text for prompts
(`text.py`).
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from malmoi.errors import MalmoiError
from malmoi.evaluation.tasks.rows import BadRow, DataRow, NoColumn

TaskKind = Literal[
    "classification", "regression", "tagging", "choice", "answer", "cloze", "write", "text"
]
MAX_BAD_ROWS_SHOWN = 5  # places of bad rows that are named
# what a kind is judged by; the first one chooses the best checkpoint
KIND_METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1_macro"),
    "regression": ("pearson", "spearman"),
    "tagging": ("entity_f1", "entity_precision", "entity_recall"),
    "choice": ("accuracy",),
    "answer": ("span_f1", "span_exact"),
    "cloze": ("accuracy", "perplexity"),
    "write": ("match",),
    "text": ("perplexity", "bits_per_byte"),
}


@dataclass(frozen=True)
class Example:
    """One row of a task. `text` is the question of an answer and the words of a tagging joined by
    spaces.

    `label`: a name (classification), a number (regression), a name for each word (tagging), the
    place of the right choice, the gold answers as (text, start) of which there may be none, the
    missing word (cloze), or the texts that would be right (write); None where it is not known, and
    of a text that is only read.
    """

    text: str
    pair: str | None = None
    label: Any = None
    id: str = ""
    place: str = ""  # file:row
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """What a data set is: how its files are read, what is asked of each example, and how answers
    are judged.

    >>> task = malmoi.custom_task("classification", text="text", label="label")
    >>> task.kind, task.metric_names
    ('classification', ('accuracy', 'f1_macro'))
    """

    name: str
    kind: TaskKind
    rows: Callable[[Path], Iterable[DataRow]]
    example: Callable[[DataRow], Example]
    about: str = ""
    metrics: tuple[str, ...] = ()  # the first chooses the best checkpoint; none: those of the kind
    labels: tuple[str, ...] = ()  # in order; none: those of the training data, sorted
    files: tuple[str, str] = ("train*", "dev*")  # in a folder: of training, of development
    both_orders: bool = False  # a pair without an order: a GPT reads it both ways (GPT-1 §3.3)
    prompt: str = "{text}"  # the text view, with {text}, {pair}
    answers: Mapping[str, str] = field(default_factory=dict)  # label → how a language model says it
    intro: str = ""  # said once, before the examples that are shown
    suffix: str = ""  # what stands behind an answer: a BERT reads it too
    separator: str = "\n\n"  # parts an example from the next
    max_answer_tokens: int = 32  # tokens that are written as an answer
    # `pair` has a gap _: judged by what fills it and the rest, or the rest alone
    gap: Literal["", "fill", "rest"] = ""
    # its rows, drawn, where there is no file
    generated: Callable[[random.Random], Iterable[DataRow]] | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        return self.metrics or KIND_METRICS[self.kind]


@dataclass(frozen=True)
class Examples:
    """The rows of some files, and what is worth saying about them."""

    rows: tuple[Example, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)


ExampleMaker = Callable[[DataRow], Example]


def columns(
    text: str, pair: str | None = None, label: str = "label", id: str | None = None
) -> ExampleMaker:
    """Makes an example of a row by the names of its columns."""

    def example(row: DataRow) -> Example:
        second = None if pair is None else row.text(pair)
        return Example(
            row.text(text), second, row.label(label), str(row[id]) if id else "", row.place
        )

    return example


def numbers(
    text: str, pair: str | None = None, label: str = "score", id: str | None = None
) -> ExampleMaker:
    """The same where labels are numbers."""
    named = columns(text, pair, label, id)
    return lambda row: replace(named(row), label=row.number(label))


def load_examples(
    task: Task, sources: str | Path | Sequence[str | Path], *, skip_bad: bool = False
) -> Examples:
    """Reads a task's files. A bad row is an error that names its place, or left out and counted
    with `skip_bad`.
    """
    paths = [Path(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    found, bad = _sorted_out(task, (row for path in paths for row in task.rows(path)))
    if bad and not skip_bad:
        shown = "; ".join(bad[:MAX_BAD_ROWS_SHOWN]) + (
            f"; and {len(bad) - MAX_BAD_ROWS_SHOWN} more" if len(bad) > MAX_BAD_ROWS_SHOWN else ""
        )
        raise MalmoiError(
            f"{shown}. Mend the file, or leave such rows out with --skip-bad (skip_bad=True)."
        )
    if not found:
        raise MalmoiError(f"There are no examples in {', '.join(map(str, paths))}.")
    return Examples(tuple(found), tuple(_notes(task, found, bad)))


def generate_examples(task: Task, seed: int) -> Examples:
    """The examples of a task that is drawn, not read: the same for the same seed."""
    if task.generated is None:
        raise MalmoiError(
            f"The task {task.name} needs a file of its rows: name it with --data (data=…)."
        )
    found, _ = _sorted_out(task, task.generated(random.Random(f"{task.name}:{seed}")))
    return Examples(tuple(found))


def _sorted_out(task: Task, rows: Iterable[DataRow]) -> tuple[list[Example], list[str]]:
    """The examples of good rows, and what is wrong with the others."""
    found: list[Example] = []
    bad: list[str] = []
    for row in rows:
        try:
            found.append(_checked(task, task.example(row)))
        except BadRow as problem:
            if isinstance(problem, NoColumn) and not found and not bad:
                raise MalmoiError(problem.sentence) from problem
            bad.append(str(problem))
    return found, bad


def _checked(task: Task, example: Example) -> Example:
    """The example, unless something in it cannot be."""
    label = example.label
    place = example.place
    if (
        task.kind == "classification"
        and task.labels
        and label is not None
        and label not in task.labels
    ):
        raise BadRow(place, f"the label {label!r} is none of {', '.join(task.labels)}")
    if task.kind == "tagging" and label is not None and len(label) != len(example.words):
        raise BadRow(place, f"there are {len(example.words)} words and {len(label)} tags")
    if task.kind == "tagging" and "" in example.words:
        raise BadRow(place, f"word {example.words.index('') + 1} is empty: a tag without its word")
    if task.kind == "choice" and label is not None and not 0 <= label < len(example.choices):
        raise BadRow(
            place,
            f"choice {label} is right, but there are only {len(example.choices)} (counted from 0)",
        )
    for text, start in label or () if task.kind == "answer" else ():
        if (example.pair or "")[start : start + len(text)] != text:
            raise BadRow(
                place, f"the answer {text!r:.60} does not stand at character {start} of its context"
            )
    return example


def _notes(task: Task, found: Sequence[Example], bad: Sequence[str]) -> Iterable[str]:
    if bad:
        yield f"{len(bad):,} bad rows left out, such as {bad[0]}"
    empty = [e.place for e in found if not e.text.strip()]
    if empty:
        yield f"{len(empty):,} texts are empty, the first at {empty[0]}"
    counts = Counter(e.id for e in found if e.id)
    twice = [e for e in found if counts[e.id] > 1]
    if twice:
        sentence = f"{twice[-1].place}: the id {twice[-1].id!r} comes {counts[twice[-1].id]} times"
        if task.kind == "answer":  # predictions are kept by id
            raise MalmoiError(f"{sentence}; ids must differ.")
        yield sentence


def require_labels(task: Task, examples: Sequence[Example]) -> None:
    """Training and judging need every label."""
    missing = [e.place for e in examples if e.label is None]
    if missing:
        raise MalmoiError(
            f"{missing[0]} has no label ({len(missing):,} such rows in all), so it cannot be "
            "learnt or judged; "
            "name the column of the labels: --label COLUMN."
        )


def label_names(task: Task, examples: Sequence[Example]) -> tuple[str, ...]:
    """The labels in the order of their scores: the task's own, or those of the data, numbers by
    value.
    """
    if task.kind not in ("classification", "tagging", "regression"):
        return ()
    used = (
        {t for e in examples for t in e.label}
        if task.kind == "tagging"
        else {e.label for e in examples}
    )
    if len(used) < 2:
        place = examples[0].place
        raise MalmoiError(
            f"All {len(examples):,} rows (from {place} on) have the label {next(iter(used))!r}: "
            "there is nothing to tell apart."
        )
    return (
        ("score",) if task.kind == "regression" else task.labels or tuple(sorted(used, key=_order))
    )


def _order(label: str) -> tuple[int, float, str]:
    """O before the tags of entities, numbers by value, words by letters."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (0, 0.0, "") if label == "O" else (1, 0.0, label)
