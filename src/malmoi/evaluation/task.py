"""A task: a record with features for fine-tuning (`features.py`) and prompts (`prompts.py`).

Everything that depends on the kind of task is in `kinds.py`.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from malmoi.errors import UsageError
from malmoi.text.columns import split_labels
from malmoi.text.records import CHAT_COLUMNS, label_name
from malmoi.text.rows import BadRow, DataRow, as_list, parse_messages

KIND_ALIASES = {"write": "writing"}
# the kinds of task, and their metrics; the first is the one that selects
KIND_METRICS = {
    "classification": ("accuracy", "f1_macro"),
    "multilabel": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("pearson", "spearman"),
    "similarity": ("spearman", "pearson"),
    "retrieval": ("recall_at_1", "recall_at_10", "mrr"),
    "tagging": ("entity_f1", "entity_precision", "entity_recall"),
    "choice": ("accuracy",),
    "answer": ("span_f1", "span_exact"),
    "cloze": ("accuracy", "perplexity"),
    "writing": ("answer_loss", "bleu", "chrf", "rouge_l", "match"),
    "text": ("perplexity", "bits_per_byte"),
    "acceptability": ("matthews", "accuracy"),
    "pairs": ("accuracy",),
}


@dataclass(frozen=True)
class Example:
    """One row of a task; `text` is the question (answer) or the words joined by spaces (tagging).

    `label`: a name (classification), a tuple of names, possibly empty (multilabel), a number
    (regression), a tag per word (tagging), the index of the right choice, the gold answers as
    (text, start), possibly none, the missing word (cloze), or the reference texts (writing); None
    if it is unknown, and for a text whose likelihood is measured.
    """

    text: str
    pair: str | None = None
    label: Any = None
    id: str = ""
    place: str = ""  # file:row
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    messages: tuple[dict[str, str], ...] = ()  # a conversation up to its answer (writing)
    group: str = ""  # metrics are also reported per group

    @property
    def texts(self) -> tuple[str, ...]:
        """Its text, or both texts of a pair."""
        return (self.text,) if self.pair is None else (self.text, self.pair)

    @property
    def input(self) -> Any:
        """What `Model.predict` takes: a conversation, a text or a pair, or these with choices."""
        if self.messages:
            return list(self.messages)
        if self.choices:
            return (*self.texts, self.choices)
        return self.text if self.pair is None else self.texts


@dataclass(frozen=True)
class Task:
    """A data set: how its files are read, how each example is asked, and how answers are scored.

    Examples:
        >>> task = malmoi.custom_task("classification", text="text", label="label")
        >>> task.kind, task.metrics
        ('classification', ('accuracy', 'f1_macro'))
    """

    name: str
    kind: str  # one of `KIND_METRICS`
    rows: Callable[[Path], Iterable[DataRow]]
    example: Callable[[DataRow], Example]
    about: str = ""
    metrics: tuple[str, ...] = ()  # the first selects; empty: those of the kind
    labels: tuple[str, ...] = ()  # in order; empty: those of the training data, sorted
    no_label: str | None = None  # written where there is none: such rows are left out, with a note
    files: tuple[str, str] = ("train*", "dev*")  # patterns in a folder: training, development
    both_orders: bool = False  # the pair is symmetric: a GPT reads both orders (GPT-1 §3.3)
    prompt: str = "{text}"  # with {text} and {pair}
    answers: Mapping[str, str] = field(default_factory=dict)  # label → its words in a prompt
    intro: str = ""  # written once, before the examples
    suffix: str = ""  # written after an answer; a BERT reads it too
    separator: str = "\n\n"  # between examples
    max_answer_tokens: int = 32  # maximum length of a generated answer
    # `pair` has a gap _: score what fills it and the rest, or the rest alone
    gap: Literal["", "fill", "rest"] = ""
    # of text and pair, if the file is a table
    columns: Mapping[str, str] = field(default_factory=dict)
    # generates the rows of a task that has no file
    generated: Callable[[random.Random], Iterable[DataRow]] | None = None


def metric_names(task: Task) -> tuple[str, ...]:
    """The task's metrics; the first is the one that selects."""
    return task.metrics or KIND_METRICS[task.kind]


# ------------------------------------------------------------------ examples from columns

ExampleMaker = Callable[[DataRow], Example]


@dataclass(frozen=True)
class Columns:
    """The column names of a user's table."""

    text: str = "text"
    pair: str | None = None
    label: str | Sequence[str] = "label"  # several: one 0/1 column per label
    choices: Sequence[str] = ()
    separator: str = ","  # between the labels of a row, if they are one string

    @property
    def one_label(self) -> str:
        if not isinstance(self.label, str):
            raise UsageError(
                "Several columns of labels ({label}) are for multilabel; other kinds have one.",
                label=", ".join(self.label),
            )
        return self.label


@dataclass(frozen=True)
class columns:
    """Makes an example from the named columns of a row."""

    text: str
    pair: str | None = None
    label: str = "label"
    id: str | None = None

    def __call__(self, row: DataRow) -> Example:
        second = None if self.pair is None else row.text(self.pair)
        number = str(row[self.id]) if self.id else ""
        return Example(row.text(self.text), second, self.label_of(row), id=number)

    def label_of(self, row: DataRow) -> Any:
        return row.label(self.label)


@dataclass(frozen=True)
class numbers(columns):
    """Like `columns`, for numeric labels."""

    label: str = "score"

    def label_of(self, row: DataRow) -> Any:
        return row.number(self.label)


def read_columns(task: Task) -> dict[str, str]:
    """The columns of a task's table by their roles (text, pair, label…), if it is one."""
    if task.columns or not isinstance(task.example, columns):
        return dict(task.columns)
    named = {name: getattr(task.example, name) for name in ("text", "pair", "label")}
    return {name: value for name, value in named.items() if value is not None}


def label_columns(by: Columns) -> ExampleMaker:
    return columns(by.text, by.pair, by.one_label)


def number_columns(by: Columns) -> ExampleMaker:
    return numbers(by.text, by.pair, by.one_label)


def label_set_columns(by: Columns) -> ExampleMaker:
    """Label sets as a list, as a string with separators, or as one 0/1 column each."""
    label = by.label
    read = _joined(label, by.separator) if isinstance(label, str) else _indicators(label)

    def example(row: DataRow) -> Example:
        pair = row.text(by.pair) if by.pair else None
        return Example(row.text(by.text), pair, read(row))

    return example


def _joined(column: str, separator: str) -> Callable[[DataRow], tuple[str, ...] | None]:
    def read(row: DataRow) -> tuple[str, ...] | None:
        if column not in row.values:
            return None
        value = as_list(row[column])
        given = split_labels(value, separator) if isinstance(value, str) else value
        if not isinstance(given, list) or any(isinstance(one, list | dict) for one in given):
            raise BadRow(
                row.place,
                "{column!r} must hold a list of labels, not {value!r:.40}",
                column=column,
                value=value,
            )
        names = [label_name(one) for one in given]
        return tuple(sorted({name for name in names if name}))

    return read


def _indicators(names: Sequence[str]) -> Callable[[DataRow], tuple[str, ...] | None]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError("The column {twice!r} is named twice as a label.", twice=twice)

    def read(row: DataRow) -> tuple[str, ...] | None:
        if not any(name in row.values for name in names):
            return None
        values = {name: row.number(name) for name in names if row[name] is not None}
        for name in names:
            if values.get(name) not in (0, 1):
                raise BadRow(
                    row.place,
                    "the label {name!r} must be 0 or 1, not {row!r:.40}",
                    name=name,
                    row=row[name],
                )
        return tuple(name for name in names if values[name])

    return read


def tag_columns(by: Columns) -> ExampleMaker:
    """Words and tags as lists, or as strings with spaces between."""
    label = by.one_label

    def listed(row: DataRow, name: str) -> tuple[str, ...]:
        value: Any = row[name]
        return tuple(map(str, value)) if isinstance(value, list) else tuple(row.text(name).split())

    def example(row: DataRow) -> Example:
        words = listed(row, by.text)
        tags = listed(row, label) if label in row.values else None
        return Example(" ".join(words), label=tags, words=words)

    return example


def pair_columns(by: Columns) -> ExampleMaker:
    """The right sentence in `text`, the wrong one in `pair`."""
    if by.pair is None:
        raise UsageError("Minimal pairs need a second column: --pair COLUMN, the wrong sentence.")
    wrong = by.pair

    def example(row: DataRow) -> Example:
        choices = (row.text(by.text), row.text(wrong))
        return Example(choices[0], label=0, choices=choices)

    return example


def choice_columns(by: Columns) -> ExampleMaker:
    """The choices in their own columns or as one list, and the number of the right one."""
    choices = by.choices
    label = by.one_label
    if not choices:
        raise UsageError(
            "A choice needs the columns of its choices: --choices first,second (choices=[…])."
        )

    def example(row: DataRow) -> Example:
        given = row[choices[0]] if len(choices) == 1 else [row.text(name) for name in choices]
        if not isinstance(given, list) or len(given) < 2:
            raise BadRow(row.place, "there are fewer than two choices")
        second = row.text(by.pair) if by.pair else None
        return Example(row.text(by.text), second, row.whole(label), choices=tuple(given))

    return example


def answer_columns(by: Columns) -> ExampleMaker:
    """The context in `pair`, the answer text in `label`."""
    label = by.one_label

    def example(row: DataRow) -> Example:
        passage = row.text(by.pair or "context")
        found = row.values.get(label)
        golds = None if label not in row.values else () if not found else (str(found),)
        starts = [] if golds is None else [passage.find(gold) for gold in golds]
        if -1 in starts:
            raise BadRow(row.place, "the answer {found!r:.60} is not in its context", found=found)
        gold = None if golds is None else tuple(zip(golds, starts, strict=True))
        return Example(row.text(by.text), passage, gold, id=str(row.values.get("id", row.place)))

    return example


def written_columns(by: Columns) -> ExampleMaker:
    """A prompt in `text` and the reference answer, or several, in `label`; or a conversation."""

    def example(row: DataRow) -> Example:
        given = row[by.text]
        if isinstance(given, list) or by.text.lower() in CHAT_COLUMNS:
            return _conversation(row, given)
        pair = None if by.pair is None else str(row.values.get(by.pair) or "")
        return Example(row.text(by.text), pair, _answers(row, by.one_label))

    return example


def _answers(row: DataRow, column: str) -> tuple[str, ...] | None:
    if column not in row.values:
        return None
    value = row[column]
    golds = tuple(str(one) for one in (value if isinstance(value, list) else [value]) if one)
    if not any(gold.strip() for gold in golds):
        raise BadRow(row.place, "the answer in {column!r} is missing", column=column)
    return golds


def _conversation(row: DataRow, given: Any) -> Example:
    """A conversation up to the last answer; that answer is the label, None if there is none."""
    try:
        messages = parse_messages(given)
    except UsageError as error:
        raise BadRow(row.place, str(error)) from None
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    last = spoken[-1] if spoken else len(messages)
    before = tuple(messages[:last])
    if not before:
        raise BadRow(row.place, "the conversation has no message before its answer")
    gold = (messages[last]["content"],) if spoken else None
    return Example(before[-1]["content"], label=gold, messages=before)


def text_columns(by: Columns) -> ExampleMaker:
    """A text without a label, whose likelihood is measured."""
    return lambda row: Example(row.text(by.text), row.text(by.text))
