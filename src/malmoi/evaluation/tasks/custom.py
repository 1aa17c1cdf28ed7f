"""Custom tasks: any table or JSON lines, by column names."""

from collections.abc import Sequence
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.evaluation.tasks.base import KIND_METRICS, Example, Task, TaskKind, columns, numbers
from malmoi.evaluation.tasks.rows import BadRow, DataRow, any_rows
from malmoi.evaluation.tasks.squad import SQUAD_PROMPT

# kinds whose prompt has the pair below the text
PAIRED_KINDS = ("classification", "regression", "choice", "write")


def custom_task(
    kind: TaskKind,
    *,
    text: str = "text",
    pair: str | None = None,
    label: str = "label",
    choices: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Task:
    """A task on named columns of your own files.

    Tagging takes words and tags as lists (or with spaces between); choice takes the columns of the
    choices and the number of the right one; answer takes the context in `pair`, the answer itself
    in `label`. Three kinds are for language models alone: cloze (the last word is in `label`),
    write (`label` is what should be written, or several such texts) and text (how likely is it?).

    >>> malmoi.custom_task("classification", text="review", label="stars").kind
    'classification'
    """
    makers = {
        "classification": lambda: columns(text, pair, label),
        "regression": lambda: numbers(text, pair, label),
        "tagging": lambda: _tagging(text, label),
        "choice": lambda: _choice(text, pair, choices, label),
        "answer": lambda: _answer(text, pair or "context", label),
        "cloze": lambda: columns(text, pair, label),
        "write": lambda: _write(text, pair, label),
        "text": lambda: lambda row: Example(row.text(text), row.text(text), place=row.place),
    }
    if kind not in makers:
        raise UsageError(f"There is no kind of task {kind!r}.{nearest(kind, makers)}")
    made = makers[kind]()
    measures = tuple(metrics) or KIND_METRICS[kind]
    return Task(
        kind, kind, any_rows, made, "your own columns", measures, prompt=_prompt(kind, pair, label)
    )


def _prompt(kind: TaskKind, pair: str | None, label: str) -> str:
    """How a language model is asked; which label, by the name of its column."""
    if kind == "answer":
        return SQUAD_PROMPT
    text = "{text}\n{pair}" if pair and kind in PAIRED_KINDS else "{text}"
    return (
        f"{text}\n{label.replace('{', '{{').replace('}', '}}')}:"
        if kind == "classification"
        else text
    )


def _listed(row: DataRow, name: str) -> tuple[str, ...]:
    value: Any = row[name]
    return tuple(map(str, value)) if isinstance(value, list) else tuple(row.text(name).split())


def _tagging(text: str, label: str) -> Any:
    def example(row: DataRow) -> Example:
        words = _listed(row, text)
        tags = _listed(row, label) if label in row.values else None
        return Example(" ".join(words), label=tags, place=row.place, words=words)

    return example


def _choice(text: str, pair: str | None, choices: Sequence[str], label: str) -> Any:
    if not choices:
        raise UsageError(
            "A choice needs the columns of its choices: --choices first,second (choices=[…])."
        )

    def example(row: DataRow) -> Example:
        given = row[choices[0]] if len(choices) == 1 else [row.text(name) for name in choices]
        if not isinstance(given, list) or len(given) < 2:
            raise BadRow(row.place, "there are fewer than two choices")
        second = row.text(pair) if pair else None
        return Example(row.text(text), second, row.whole(label), "", row.place, tuple(given))

    return example


def _answer(text: str, context: str, label: str) -> Any:
    def example(row: DataRow) -> Example:
        passage = row.text(context)
        found = row.values.get(label)
        golds = None if label not in row.values else () if not found else (str(found),)
        starts = [] if golds is None else [passage.find(gold) for gold in golds]
        if -1 in starts:
            raise BadRow(row.place, f"the answer {found!r:.60} is not in its context")
        gold = None if golds is None else tuple(zip(golds, starts, strict=True))
        return Example(
            row.text(text), passage, gold, str(row.values.get("id", row.place)), row.place
        )

    return example


def _write(text: str, pair: str | None, label: str) -> Any:
    def example(row: DataRow) -> Example:
        given = row.values.get(label)
        golds = (
            tuple(map(str, given))
            if isinstance(given, list)
            else None
            if given is None
            else (str(given),)
        )
        return Example(row.text(text), row.text(pair) if pair else None, golds, place=row.place)

    return example
