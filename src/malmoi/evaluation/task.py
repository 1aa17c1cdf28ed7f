"""A task: a record with features for fine-tuning (`features.py`) and prompts (`prompts.py`)."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from malmoi.errors import UsageError, require_that
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
    # generates the rows of a task that has no file
    generated: Callable[[random.Random], Iterable[DataRow]] | None = None


def metric_names(task: Task) -> tuple[str, ...]:
    """The task's metrics; the first is the one that selects."""
    return task.metrics or KIND_METRICS[task.kind]


# ------------------------------------------------------------------ examples from columns


@dataclass(frozen=True)
class columns:
    """The column names of a table; called with a row, it makes an example of them."""

    text: str = "text"
    pair: str | None = None
    label: str | Sequence[str] = "label"  # several: one 0/1 column per label
    choices: Sequence[str] = ()
    separator: str = ","  # between the labels of a row, if they are one string
    id: str | None = None
    numeric: bool = False  # the label is a number
    read: Callable[["columns", DataRow], Example] | None = None  # how a kind of task reads a row

    def __post_init__(self) -> None:
        for name in self.every_label:
            once = self.every_label.count(name) == 1
            require_that(once, "The column {name!r} is named twice as a label.", name=name)

    def __call__(self, row: DataRow) -> Example:
        read = self.read or (number_row if self.numeric else label_row)
        found = read(self, row)
        return replace(found, id=str(row[self.id])) if self.id else found

    @property
    def one_label(self) -> str:
        if isinstance(self.label, str):
            return self.label
        raise UsageError(
            "Several columns of labels ({names}) are for multilabel; other kinds have one.",
            names=", ".join(self.label),
        )

    @property
    def every_label(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)


def read_columns(task: Task) -> dict[str, str]:
    """The columns of a task's table by their roles (text, pair, label…), if it is one."""
    by = task.example
    if not isinstance(by, columns):
        return {}
    named = {
        "text": by.text,
        "pair": by.pair,
        "label": ",".join(by.every_label),
        "choices": ",".join(by.choices),
        "separator": "" if by.separator == columns.separator else by.separator,
    }
    return {role: name for role, name in named.items() if name}


# Each reads a row of a user's table; `custom_task` has checked the columns.


def label_row(by: columns, row: DataRow) -> Example:
    return Example(*_texts(by, row), row.label(by.one_label))


def number_row(by: columns, row: DataRow) -> Example:
    return Example(*_texts(by, row), row.number(by.one_label))


def _texts(by: columns, row: DataRow) -> tuple[str, str | None]:
    return row.text(by.text), row.text(by.pair) if by.pair else None


def label_set_row(by: columns, row: DataRow) -> Example:
    """Label sets as a list, as a string with separators, or as one 0/1 column each."""
    label = by.label
    held = _joined(by, label, row) if isinstance(label, str) else _indicators(label, row)
    return Example(*_texts(by, row), held)


def _joined(by: columns, column: str, row: DataRow) -> tuple[str, ...] | None:
    if column not in row.values:
        return None
    value = as_list(row[column])
    given = split_labels(value, by.separator) if isinstance(value, str) else value
    flat = isinstance(given, list) and not any(isinstance(one, list | dict) for one in given)
    row.require(flat, "{name!r} must hold a list of labels, not {v!r:.40}", name=column, v=value)
    names = tuple(sorted(filter(None, set(map(label_name, given)))))
    for name in names:
        row.require(
            str(row.values.get(name)).strip() != "0",
            "the column {name!r} holds 0, the list of labels says otherwise",
            name=name,
        )
    return names


def _indicators(names: Sequence[str], row: DataRow) -> tuple[str, ...] | None:
    if not any(name in row.values for name in names):
        return None
    values = {name: None if row[name] is None else row.number(name) for name in names}
    for name, number in values.items():
        row.require(
            number in (0, 1),
            "the label {name!r} must be 0 or 1, not {value!r:.40}",
            name=name,
            value=row[name],
        )
    return tuple(name for name in names if values[name])


def tag_row(by: columns, row: DataRow) -> Example:
    """Words and tags as lists, or as strings with spaces between."""
    words = _listed(row, by.text)
    tags = _listed(row, by.one_label) if by.one_label in row.values else None
    return Example(" ".join(words), label=tags, words=words)


def _listed(row: DataRow, name: str) -> tuple[str, ...]:
    value: Any = as_list(row[name])
    return tuple(map(str, value)) if isinstance(value, list) else tuple(row.text(name).split())


def pair_row(by: columns, row: DataRow) -> Example:
    """The right sentence in `text`, the wrong one in `pair`."""
    right, wrong = _texts(by, row)
    return Example(right, label=0, choices=(right, wrong or ""))


def choice_row(by: columns, row: DataRow) -> Example:
    """The choices in their own columns or as one list, and the number of the right one."""
    given = [row.text(name) for name in by.choices] if len(by.choices) > 1 else row[by.choices[0]]
    row.require(isinstance(given, list) and len(given) >= 2, "there are fewer than two choices")
    return Example(*_texts(by, row), row.whole(by.one_label), choices=tuple(given))


def span_row(by: columns, row: DataRow) -> Example:
    """The context in `pair`, the answer text in `label`."""
    passage = row.text(by.pair or "context")
    found = row.values.get(by.one_label)
    start = passage.find(str(found)) if found else 0
    row.require(start >= 0, "the answer {found!r:.60} is not in its context", found=found)
    gold = ((str(found), start),) if found else ()
    return Example(
        row.text(by.text),
        passage,
        gold if by.one_label in row.values else None,
        id=str(row.values.get("id", row.place)),
    )


def written_row(by: columns, row: DataRow) -> Example:
    """A prompt in `text` and the reference answer, or several, in `label`; or a conversation."""
    given = row[by.text]
    if isinstance(given, list) or by.text.lower() in CHAT_COLUMNS:
        return _conversation(row, given)
    pair = None if by.pair is None else str(row.values.get(by.pair) or "")
    return Example(row.text(by.text), pair, _answers(row, by.one_label))


def _answers(row: DataRow, column: str) -> tuple[str, ...] | None:
    if column not in row.values:
        return None
    value = row[column]
    golds = tuple(str(one) for one in (value if isinstance(value, list) else [value]) if one)
    row.require(
        any(gold.strip() for gold in golds), "the answer in {column!r} is missing", column=column
    )
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
    row.require(before, "the conversation has no message before its answer")
    gold = (messages[last]["content"],) if spoken else None
    return Example(before[-1]["content"], label=gold, messages=before)


def text_row(by: columns, row: DataRow) -> Example:
    """A text without a label, whose likelihood is measured."""
    return Example(row.text(by.text), row.text(by.text))


def similarity_row(by: columns, row: DataRow) -> Example:
    """Two texts and their score."""
    return number_row(replace(by, pair=by.pair or "pair"), row)


def retrieval_row(by: columns, row: DataRow) -> Example:
    """An anchor, the text that belongs to it (or itself), and in the columns of choices others."""
    anchor, positive = _texts(by, row)
    negatives = tuple(row.text(name) for name in by.choices if row.values.get(name))
    row.require(anchor.strip() and (positive is None or positive.strip()), "a text is empty")
    return Example(anchor, anchor if positive is None else positive, 0, choices=negatives)


# ------------------------------------------------------------------ examples in the training text


@dataclass(frozen=True)
class Overlaps:
    """The n-gram length in words, which items overlap, and which are too short to say."""

    words: int
    dirty: tuple[bool, ...]
    short: tuple[bool, ...]


FindOverlaps = Callable[[Sequence[Sequence[str]]], Overlaps]  # given the texts of each item


def item_texts(example: Example) -> list[str]:
    """The texts of an item that could be in the training text; names of labels are not."""
    contents = [message["content"] for message in example.messages]
    return [text for text in (*example.texts, *example.choices, *contents) if text]


def contamination_report(
    examples: Sequence[Example],
    overlaps: Overlaps,
    scores: Mapping[str, float],
    score: Callable[[Sequence[int]], Mapping[str, float]],
) -> dict[str, Any]:
    """{"dirty": 21, "scores": …}: the scores of all items, and by `score` of the two parts."""
    places = {
        "clean": [i for i, overlap in enumerate(overlaps.dirty) if not overlap],
        "dirty": [i for i, overlap in enumerate(overlaps.dirty) if overlap],
    }
    parts = {"all": scores} | {part: score(some) for part, some in places.items() if some}
    table = {
        name: {part: found[name] for part, found in parts.items() if name in found}
        for name in scores
    }
    for row in table.values():
        if "clean" in row:
            row["clean_minus_all"] = row["clean"] - row["all"]
    return {
        "words": overlaps.words,
        "items": len(examples),
        "dirty": len(places["dirty"]),
        "short": sum(overlaps.short),
        "places": [examples[i].place for i in places["dirty"]],
        "scores": table,
    }


def refuse_contamination(find: FindOverlaps | None, what: str) -> None:
    require_that(find is None, "--contamination needs the rows of a task, not {what}.", what=what)
