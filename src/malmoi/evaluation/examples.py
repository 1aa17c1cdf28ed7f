"""Loads and checks, or generates, the examples of a task; and names their labels."""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, ensure, required
from malmoi.evaluation.kinds import kind_of
from malmoi.evaluation.task import KIND_METRICS, Example, Task, read_columns
from malmoi.messages import joined, msg, plural
from malmoi.system.storage import local_path
from malmoi.text.rows import (
    BadRow,
    DataRow,
    NoColumn,
    RowSource,
    file_list,
    is_files,
    rows_of,
    source_name,
)

MAX_BAD_ROWS_SHOWN = 5  # places of bad rows that an error lists
NEEDS_FILE = msg("The task {task} needs a file of rows: give it with --data (data=…).")
TYPO_SIMILARITY = 0.85  # difflib's ratio of two labels: positve and positive have 0.93


@dataclass(frozen=True)
class Examples:
    """The examples of some files, and notes about them."""

    rows: tuple[Example, ...]
    notes: tuple[str, ...] = ()


def load_examples(task: Task, sources: RowSource, *, skip_bad: bool = False) -> Examples:
    """A task's files, or rows from memory; a bad row is an error, or skipped with `skip_bad`."""
    files = file_list(sources) if is_files(sources) else None
    rows = rows_of(sources) if files is None else (row for path in files for row in task.rows(path))
    read, bad = _sorted_out(task, rows)
    without = task.no_label
    found = [example for example in read if without is None or example.label != without]
    if len(bad) > 1 and not found:
        raise MalmoiError("None of the {n:,} rows can be used: {first}.", n=len(bad), first=bad[0])
    if bad and not skip_bad:
        more = len(bad) - MAX_BAD_ROWS_SHOWN
        shown = joined("; ", bad[:MAX_BAD_ROWS_SHOWN])
        shown += msg("; and {count} more", count=more) if more > 0 else ""
        raise MalmoiError(
            "{shown}. Fix the file, or skip such rows with --skip-bad (skip_bad=True).", shown=shown
        )
    ensure(found, "There are no examples in {name}.", name=source_name(sources))
    notes = list(_notes(task, found, bad))
    if left := len(read) - len(found):
        rows_read = plural(len(read), "row")
        sentence = "{left:,} of {rows} have no gold label ({mark!r}) and are left out."
        notes.append(msg(sentence, left=left, rows=rows_read, mark=without))
    return Examples(tuple(found), tuple(notes))


def generate_examples(task: Task, seed: int) -> Examples:
    """Generates the examples of a task without files, reproducibly for a seed."""
    generate = required(task.generated, NEEDS_FILE, raises=MalmoiError, task=task.name)
    found, _ = _sorted_out(task, generate(random.Random(f"{task.name}:{seed}")))
    return Examples(tuple(found))


def _sorted_out(task: Task, rows: Iterable[DataRow]) -> tuple[list[Example], list[str]]:
    """Returns the examples of valid rows, and the errors of the others."""
    kind = kind_of(task)
    found: list[Example] = []
    bad: list[str] = []
    for row in rows:
        try:
            example = replace(task.example(row), place=row.place)
            if wrong := kind.check(task, example):
                raise BadRow(row.place, wrong)
            found.append(example)
        except BadRow as problem:
            if isinstance(problem, NoColumn) and not found and not bad:
                raise MalmoiError(_with_option(task, problem)) from problem
            bad.append(str(problem))
    return found, bad


def _with_option(task: Task, problem: NoColumn) -> str:
    """What column is missing, and how to name it where the task is on the user's own ones."""
    roles = {name: role for role, name in read_columns(task).items()}
    role = roles.get(problem.name) if task.name in KIND_METRICS else None
    option = role and msg("Name the column with --{role} COLUMN ({role}=…).", role=role)
    return joined(" ", filter(None, (problem.sentence, option)))


def _notes(task: Task, found: Sequence[Example], bad: Sequence[str]) -> Iterable[str]:
    kind = kind_of(task)
    if bad:
        yield msg("{rows} skipped, such as {one}.", rows=plural(len(bad), "bad row"), one=bad[0])
    if empty := [e.place for e in found if not e.text.strip()]:
        yield msg(
            "{texts}, the first at {empty}.", texts=plural(len(empty), "empty text"), empty=empty[0]
        )
    yield from _repeated_ids(found, refuse=kind.by_id)
    if kind.text_labels:
        yield from _contradictions(found)
        yield from _misspelt(_label_counts(task, found))


def _repeated_ids(found: Sequence[Example], *, refuse: bool) -> Iterable[str]:
    counts = Counter(e.id for e in found if e.id)
    twice = [e for e in found if counts[e.id] > 1]
    if not twice:
        return
    last = twice[-1]
    about: dict[str, Any] = dict(place=last.place, id=last.id, times=counts[last.id])
    ensure(not refuse, "{place}: the id {id!r} comes {times} times, but ids must differ.", **about)
    yield msg("{place}: the id {id!r} comes {times} times.", **about)


def _label_counts(task: Task, examples: Sequence[Example]) -> Counter[str]:
    """How many examples have each label, if a text as a whole has named labels."""
    kind = kind_of(task)
    if not kind.text_labels or kind.classes is None:
        return Counter()
    known = (e.label for e in examples if e.label is not None)
    return Counter(name for label in known for name in kind.classes(label))


def _contradictions(found: Sequence[Example]) -> Iterable[str]:
    """Notes identical texts with different labels, since at most one of them can be right."""
    first: dict[tuple[str, str | None], Example] = {}
    for example in found:
        first.setdefault((example.text, example.pair), example)
    if others := [e for e in found if first[e.text, e.pair].label != e.label]:
        one, other = first[others[0].text, others[0].pair], others[0]
        yield msg(
            "{texts} with a different label: {one} says {label}, {other} {label2}.",
            texts=plural(len(others), "repeated text"),
            one=one.place,
            label=_shown(one),
            other=other.place,
            label2=_shown(other),
        )


def _shown(example: Example) -> str:
    """A label as its file has it; several are a tuple."""
    label = example.label
    return repr(", ".join(label)) if isinstance(label, tuple) else repr(label)


def _misspelt(counts: Counter[str]) -> Iterable[str]:
    """Notes labels that look like typos of another one that is far more frequent."""
    for name, count in counts.items():
        common = {other.casefold(): other for other, n in counts.items() if n >= 10 * count}
        close = get_close_matches(name.casefold(), common, n=1, cutoff=TYPO_SIMILARITY)
        if close and not any(letter.isdigit() for letter in name):  # class 1 is not class 10
            right = common[close[0]]
            yield msg(
                "The label {name!r} ({rows}) looks like a typo of {right!r} ({rows2}), "
                "and is learnt as a label of its own.",
                name=name,
                rows=plural(count, "row"),
                right=right,
                rows2=plural(counts[right], "row"),
            )


def require_labels(examples: Sequence[Example]) -> None:
    """Raises an error if an example has no label, which training and evaluation need."""
    if missing := [e.place for e in examples if e.label is None]:
        raise MalmoiError(
            "{first} has no label ({n:,} such rows in all), so it cannot be learnt or scored: name "
            "the column with --label (label=…), or predict the labels with malmoi predict.",
            first=missing[0],
            n=len(missing),
        )


def label_names(task: Task, examples: Sequence[Example]) -> tuple[str, ...]:
    """The labels in the order of their scores: the task's, or the data's, sorted."""
    kind = kind_of(task)
    if kind.classes is None:
        return ()
    used = {name for e in examples for name in kind.classes(e.label)}
    alike = {e.label for e in examples} if kind.text_labels else used
    if len(alike) < 2:
        label = next(iter(alike))
        shown = msg("the label {label!r:.60}", label=label) if label != () else msg("no label")
        raise MalmoiError(
            "All {n:,} rows (from {place} on) have {shown}: there is nothing to learn.",
            n=len(examples),
            place=examples[0].place,
            shown=shown,
        )
    return kind.class_names or task.labels or tuple(sorted(used, key=_order))


def unseen_labels(task: Task, examples: Sequence[Example], known: Collection[str]) -> Iterable[str]:
    """Notes labels that the model cannot predict: they count as errors."""
    counts = _label_counts(task, examples)
    others = [(name, count) for name, count in counts.most_common() if name not in known]
    for name, count in others[:1]:
        n = len(others) - 1
        yield msg(
            "{rows} with the label {name!r}{more}, which no training row has.",
            rows=plural(count, "evaluation row"),
            name=name,
            more=msg(" (and {others})", others=plural(n, "other label")) if n else "",
        )


def _order(label: str) -> tuple[int, float, str]:
    """Sort key: O before entity tags, numbers by value, words alphabetically."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (0, 0.0, "") if label == "O" else (1, 0.0, label)


def files_in(task: Task, source: str | Path) -> tuple[Path, Path | None]:
    """The training file and, for a folder, its development file."""
    path = local_path(source)
    if not path.is_dir():
        return path, None
    train, dev = ([p for p in sorted(path.glob(pattern)) if p.is_file()] for pattern in task.files)
    ensure(
        train,
        "The folder {path} has no file {files!r} for the task {task}.",
        path=path,
        files=task.files[0],
        task=task.name,
    )
    return train[0], dev[0] if dev else None
