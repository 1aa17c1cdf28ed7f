"""Which rows are for training, which for selection and which only for evaluation.

Anything selected on the evaluation rows (an epoch, a rate, a threshold) would bias the result, so
selection uses rows held out of the training set.
"""

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from malmoi.errors import MalmoiError
from malmoi.evaluation.kinds import HeadKind, head_kind
from malmoi.evaluation.task import Example, Task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.messages import joined, msg, plural
from malmoi.settings import Config

JUDGED_SHARE = 0.1  # of the rows, if there is no evaluation file
SELECTION_SHARE = 0.1
MIN_SELECTION_ROWS = 50  # fewer cannot tell which of two runs is better
MAX_SELECTION_ROWS = 2000
# Held out to compare a frozen model with the fine-tuned one, of so many rows: reading them must not
# take longer than learning does.
FROZEN_OR_TUNED = "frozen or fine-tuned"
FROZEN_ROWS = (50, 200)
LARGEST_SELECTION_SHARE = 0.25  # if 50 rows are more than this, nothing is held out
# A temperature needs few rows, and held-out rows are lost for training: 4 % of RTE's rows cost
# about 0.2 points (each doubling of its rows gains 3 to 4).
TEMPERATURE_SHARE = 0.02
TEMPERATURE_ROWS = (100, 500)
MIN_ROWS_FOR_TEMPERATURE = 2000
MIN_TWIN_WORDS = 8  # shorter texts must be identical
PART_END = "\0"  # between the texts of a row
TWIN_SIMILARITY = 0.95  # difflib's ratio: one word of twenty, or a letter in each of a few

Rows = tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Protocol(Config):
    """The numbers of training, selection and evaluation rows, and what is selected."""

    trained_on: int
    selected_on: int  # rows held out of the training set; 0: nothing is selected
    judged_on: int  # rows used only for evaluation
    judged_rows: str  # "a file of their own", or "held out of the training rows"
    selects: tuple[str, ...] = ()  # settings selected on the held-out rows
    judged_twins: int = 0  # evaluation rows whose text is also a training row, except for typos
    trained_files: tuple[str, ...] = ()  # names only: a published folder must not reveal paths

    def describe(self) -> str:
        names = joined(", ", map(msg, self.selects))
        chosen = msg("")
        if self.selected_on:
            rows = plural(self.selected_on, "held-out row")
            chosen = msg("{rows} for selection: {names}", rows=rows, names=names) + "; "
        return msg(
            "Training on {rows}; {chosen}evaluation on {rows2} ({rows3}).",
            rows=plural(self.trained_on, "row"),
            chosen=chosen,
            rows2=plural(self.judged_on, "row"),
            rows3=msg(self.judged_rows),
        )


def file_names(rows: Sequence[Example]) -> tuple[str, ...]:
    """The names of the files that rows were read from."""
    names = dict.fromkeys(Path(row.place.rpartition(":")[0]).name for row in rows)
    return tuple(name for name in names if name)


def selected_settings(
    task: Task, rows: Sequence[Example], settings: FinetuneConfig
) -> tuple[str, ...]:
    """The settings that need held-out rows; a temperature alone does not."""
    kind = head_kind(task)
    needs = {
        "setting": settings.grid,
        "epoch": settings.patience > 0,
        "threshold": kind.thresholds(rows),
    }
    return tuple(name for name, needed in needs.items() if needed)


def selection_rows(count: int, kind: HeadKind, settings: FinetuneConfig, *, needed: bool) -> int:
    """Number of training rows held out for selection; 0: none."""
    enough = settings.holdout or count >= MIN_ROWS_FOR_TEMPERATURE
    if not needed and not (kind.calibrated and enough):
        return 0
    if settings.holdout:
        return max(1, round(count * settings.holdout))
    if not needed:
        low, high = TEMPERATURE_ROWS
        return min(high, max(low, round(count * TEMPERATURE_SHARE)))
    rows = min(MAX_SELECTION_ROWS, max(MIN_SELECTION_ROWS, round(count * SELECTION_SHARE)))
    return rows if rows <= count * LARGEST_SELECTION_SHARE else 0


def frozen_rows(count: int, settings: FinetuneConfig) -> int:
    """Number of training rows held out to compare a frozen model with a fine-tuned one."""
    low, high = FROZEN_ROWS
    rows = min(high, round(count * SELECTION_SHARE))
    return rows if settings.frozen_first and rows >= low else 0


def judged_rows(count: int, settings: FinetuneConfig) -> int:
    """Number of rows held out for evaluation if there is no separate file."""
    return max(1, round(count * (settings.holdout or JUDGED_SHARE)))


def hold_out(task: Task, rows: Sequence[Example], count: int, seed: int) -> tuple[Rows, Rows]:
    """Splits rows into the rest and about `count` held-out ones.

    Questions about one passage, and rows of one text, stay together, unless there are more of them
    than are held out. Labels are stratified, and the only row of a label is never held out.
    """
    if len(rows) < 2:
        raise MalmoiError(
            "There is only one example ({place}): at least one is needed for training and one "
            "for evaluation.",
            place=rows[0].place,
        )
    if count >= len(rows):
        raise MalmoiError(
            "Holding out {count:,} of {rows:,} rows leaves none for training: give more rows "
            "or a smaller holdout.",
            count=count,
            rows=len(rows),
        )
    kind = head_kind(task)
    groups: dict[Hashable, list[int]] = {}
    for i in random.Random(seed).sample(range(len(rows)), len(rows)):
        row = rows[i]
        key = row.pair if kind.by_id else (row.text, row.pair, row.choices)
        groups.setdefault(key, []).append(i)
    found = list(groups.values())
    if max(map(len, found)) > count:
        found = [[i] for group in found for i in group]
    held = _spread(_stratified(kind, rows, found), count)
    rest = tuple(row for i, row in enumerate(rows) if i not in held)
    return rest, tuple(rows[i] for i in sorted(held))


def _spread(groups: Sequence[Sequence[int]], count: int) -> set[int]:
    """About `count` members: every so many, so that sorted labels give the same share of each."""
    held: set[int] = set()
    step = sum(map(len, groups)) / count
    seen = 0
    for group in groups:
        if seen >= step * len(held) and len(held) < count:
            held.update(group)
        seen += len(group)
    return held


def _stratified(
    kind: HeadKind, rows: Sequence[Example], groups: list[list[int]]
) -> list[list[int]]:
    """The groups by label, without those that have all rows of a label."""
    if not kind.exclusive:
        return groups
    counts = Counter(str(row.label) for row in rows)
    several = [group for group in groups if counts[str(rows[group[0]].label)] > len(group)]
    return sorted(several or groups, key=lambda group: str(rows[group[0]].label))


def judged_twins(train: Sequence[Example], judged: Sequence[Example]) -> int:
    """Number of evaluation rows whose text is also a training row, ignoring case and spaces.

    A single text of `MIN_TWIN_WORDS` words or more may differ in a few letters: it is compared with
    those that share one of its halves, since a typo leaves the other half as it was.
    """
    known = {_plain(row) for row in train}
    halves: dict[Hashable, str] = {}
    for words in known:
        for half in _halves(words):
            halves.setdefault(half, " ".join(words))
    return sum(words in known or _nearly(words, halves) for words in map(_plain, judged))


def _nearly(words: tuple[str, ...], halves: Mapping[Hashable, str]) -> bool:
    text = " ".join(words)
    others = (halves[half] for half in _halves(words) if half in halves)
    return any(SequenceMatcher(None, text, o).ratio() >= TWIN_SIMILARITY for o in others)


def _halves(words: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    if len(words) < MIN_TWIN_WORDS or PART_END in words:  # one word may reverse a pair's label
        return []
    middle = len(words) // 2
    return [(0, words[:middle]), (1, words[middle:])]


def _plain(row: Example) -> tuple[str, ...]:
    return tuple(f" {PART_END} ".join((*row.texts, *row.choices)).casefold().split())
