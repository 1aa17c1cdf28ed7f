"""Candidates: ways to learn a task from its rows, and one comparison of them.

Label words and a new layer (few_labels.py), clouds (unlabelled.py), the frozen model (run.py), and
others' student (search.py) are compared on the same rows, which they did not learn from: most are
easy or hard for both, so that the error of a difference is smaller than that of either.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from malmoi.evaluation.evaluate import score_examples
from malmoi.evaluation.features import Outcome
from malmoi.finetuning.task_data import FinetuneData
from malmoi.messages import joined, logger, msg
from malmoi.metrics import goodness
from malmoi.system.files import write_text
from malmoi.system.untrusted import read_object

RECORD = "search.json"
GROUPS = 25  # of rows; an error from so many is itself exact to a seventh
Score = Callable[[Outcome, Sequence[int]], float]  # of some rows of an outcome: more is better


@dataclass(frozen=True)
class Gain:
    """How much better a candidate is than another one on the same rows."""

    value: float
    error: float  # its standard error

    @property
    def clear(self) -> bool:
        return self.value > self.error

    @property
    def clear_loss(self) -> bool:
        return self.value < -self.error

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Rival:
    """A finished model in a folder, which stays the result if it beats the one in training."""

    name: str
    folder: Path
    beats: Callable[[Outcome], bool]  # whether it is better than this outcome of the held-out rows


def paired_gain(score: Score, base: Outcome, other: Outcome) -> Gain:
    """The gain of `other` over `base`, with the error of a jackknife over groups of rows."""
    rows = len(base.said)
    groups = min(GROUPS, rows)

    def gain(places: Sequence[int]) -> float:
        return score(other, places) - score(base, places)

    if rows == 1:
        return Gain(gain([0]), math.inf)  # of which nothing can be left out
    without = [gain([i for i in range(rows) if i % groups != out]) for out in range(groups)]
    middle = fmean(without)
    variance = (groups - 1) / groups * sum((one - middle) ** 2 for one in without)
    return Gain(gain(range(rows)), math.sqrt(variance))


def held_out_score(work: FinetuneData) -> Score:
    """The selecting metric on some of the held-out rows."""
    measure = work.primary_metric

    def score(outcome: Outcome, places: Sequence[int]) -> float:
        metrics = score_examples(
            work.task,
            [work.held[i] for i in places],
            [outcome.labels[i] for i in places],
            [outcome.said[i] for i in places],
            work.labels,
        )
        return goodness(measure, metrics[measure])

    return score


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A fitted candidate; its value is the metric on rows that it did not learn from."""

    name: str
    seconds: float
    value: float | None = None  # None: no rows are held out
    gain: Gain | None = None  # over the first candidate
    changes: Mapping[str, Any] | None = None  # of the default settings
    seed: int = 0
    share: float = 1.0  # of its epochs
    per_row: float = 0.0  # seconds to evaluate a row, estimated from its steps

    @property
    def table_row(self) -> tuple[str, ...]:
        """Its cells under the columns of the report."""
        learnt = self._settings, str(self.seed), f"{self.share:.0%}"
        return (
            msg(self.name),
            *(("–",) * 3 if self.changes is None else learnt),
            "–" if self.value is None else f"{self.value:.4f}",
            str(self.gain or "–"),
            f"{self.seconds:.1f}",
        )

    @property
    def _settings(self) -> str:
        names = [f"{name} {value:g}" for name, value in (self.changes or {}).items()]
        return ", ".join(names) or msg("the default settings")

    def log(self, measure: str) -> None:
        described = msg(self.name)
        if self.changes is not None:
            words = {"trial": self.name, "changes": self._settings, "seed": self.seed}
            described = msg("{trial}: {changes}, seed {seed}", **words)
        found = None if self.value is None else f"{self.value:.4f}"
        parts = (
            msg("{described}: {seconds:.1f} s", described=described, seconds=self.seconds),
            found is not None and msg("held-out {measure} {value}", measure=measure, value=found),
            self.gain is not None and msg("{gain} beside the first", gain=self.gain),
        )
        logger.info(joined(", ", [part for part in parts if part]) + ".")


@dataclass
class Comparison:
    """The candidates tried on held-out rows, each recorded in a folder as soon as it is fitted."""

    work: FinetuneData
    out: Path

    def __post_init__(self) -> None:
        self.known = read_tried(self.out)  # before the comparison was stopped

    def gain(self, first: Outcome, other: Outcome) -> Gain:
        """How much better the second is than the first."""
        return paired_gain(held_out_score(self.work), first, other)

    def add(
        self, name: str, outcome: Outcome, began: float, first: Outcome | None = None, **facts: Any
    ) -> Tried:
        """Compares a candidate with the first on the held-out rows, and records it."""
        tried = Tried(
            name=name,
            seconds=time.monotonic() - began,
            value=outcome.metrics.get(self.work.primary_metric),
            gain=self.gain(first, outcome) if first is not None and first.said else None,
            **facts,
        )
        if tried.value is not None or tried.changes is not None:  # else there is nothing to say
            tried.log(self.work.primary_metric)
        self.known[name] = tried
        self.out.mkdir(parents=True, exist_ok=True)
        record = {"trials": [asdict(one) for one in self.known.values()]}
        write_text(self.out / RECORD, json.dumps(record, indent=1) + "\n")
        return tried


def read_tried(out: Path) -> dict[str, Tried]:
    """The candidates tried in a folder by name; none if nothing was compared."""
    path = out / RECORD
    rows = read_object(path).list_of("trials", dict) if path.is_file() else []
    tried = [Tried(**{**row, "gain": row["gain"] and Gain(**row["gain"])}) for row in rows]
    return {one.name: one for one in tried}
