"""Candidates: ways to learn a task from its rows, and one comparison of them.

| candidate | tried | takes | compared on | record |
|---|---|---|---|---|
| label words (label_prompts.py) | few rows, a GPT or BERT | a reading | folds | comparison.json |
| contrasted vectors (few_labels.py) | few rows, a sentence encoder | minutes | – | – |
| the frozen model (first_answer.py) | no budget | a reading | held-out rows | search.json |
| other settings (search.py) | `best` | its share of the time | held-out rows | search.json |

The frozen model's record is in train_state, which ends with the run.
Candidates are compared on the same rows: most are easy or hard for both, so that the error of a
difference is smaller than that of either.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.evaluate import score_examples
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.task_data import FinetuneData
from malmoi.messages import msg
from malmoi.metrics import goodness
from malmoi.system.files import write_text
from malmoi.system.untrusted import JsonObject, read_object

RECORD = "search.json"
GROUPS = 25  # of rows; an error from so many is itself exact to a seventh
Score = Callable[[Outcome, Sequence[int]], float]  # of some rows of an outcome: more is better


@dataclass(frozen=True)
class Gain:
    """How much better a candidate is than another one on the same rows."""

    value: float
    error: float  # its standard error

    @classmethod
    def of_rows(cls, differences: Tensor) -> "Gain":
        """The mean of the differences of each row."""
        return cls(float(differences.mean()), float(differences.std()) / len(differences) ** 0.5)

    @property
    def clear(self) -> bool:
        return self.value > self.error

    @property
    def clear_loss(self) -> bool:
        return self.value < -self.error

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.error:.4f}"


def paired_gain(score: Score, base: Outcome, other: Outcome) -> Gain:
    """The gain of `other` over `base`, with the error of a jackknife over groups of rows."""
    rows = len(base.said)
    groups = min(GROUPS, rows)

    def gain(places: Sequence[int]) -> float:
        return score(other, places) - score(base, places)

    without = [gain([i for i in range(rows) if i % groups != out]) for out in range(groups)]
    middle = fmean(without)
    variance = (groups - 1) / groups * sum((one - middle) ** 2 for one in without)
    return Gain(gain(range(rows)), math.sqrt(variance))


def held_out_score(work: FinetuneData) -> Score:
    """The selecting metric on some of the held-out rows."""
    measure = work.primary_metric

    def score(outcome: Outcome, places: Sequence[int]) -> float:
        examples = [work.held[i] for i in places]
        gold = [outcome.labels[i] for i in places]
        said = [outcome.said[i] for i in places]
        metrics = score_examples(work.task, examples, gold, said, work.labels)
        return goodness(measure, metrics[measure])

    return score


@dataclass(frozen=True)
class Fitted:
    """What fitting a candidate gives: its model, and its predictions of the held-out rows."""

    checkpoint: Checkpoint
    outcome: Outcome
    steps: int
    completed: float = 1.0  # share of its steps; less if the time limit came first
    per_row: float = 0.0  # seconds to evaluate a row, estimated from its steps


@dataclass(frozen=True)
class Candidate:
    """A way to learn the task, fitted in a folder of its own within some seconds."""

    name: str
    seconds: float
    fit: Callable[[Path, float], Fitted]  # resumes what is in the folder
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the default settings
    seed: int = 0
    share: float = 1.0  # of the epochs


@dataclass(frozen=True)
class Tried:
    """A fitted candidate; its value is the metric on the held-out rows."""

    name: str
    changes: Mapping[str, Any]
    seed: int
    share: float  # of the epochs
    value: float | None  # None: no rows are held out
    seconds: float
    per_row: float = 0.0  # seconds to evaluate a row, estimated from its steps
    gain: Gain | None = None  # over the default settings, trained as long

    @property
    def clear_gain(self) -> float:
        """Its gain over the default settings if that is more than its error, else 0."""
        return self.gain.value if self.gain is not None and self.gain.clear else 0.0

    @property
    def table_row(self) -> tuple[str, ...]:
        """Its cells under the columns of the report."""
        share, seconds = f"{self.share:.0%}", f"{self.seconds:.1f}"
        value = "–" if self.value is None else f"{self.value:.4f}"
        gain = str(self.gain or "–")
        return (self.name, self.described, str(self.seed), share, value, gain, seconds)

    @property
    def described(self) -> str:
        names = [f"{name} {value:g}" for name, value in self.changes.items()]
        return ", ".join(names) or msg("the default settings")


@dataclass
class Comparison:
    """The candidates tried in a folder, each recorded as soon as it is fitted, and not repeated."""

    out: Path
    measure: str
    gain: Callable[[Outcome, Outcome], Gain]  # of the second over the first
    tried: list[Tried] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = read_tried(self.out)  # before the comparison was stopped

    def folder(self, name: str) -> Path:
        """The folder of a candidate."""
        return self.out / "trials" / name

    def run(self, candidate: Candidate, base: Outcome | None = None) -> tuple[Tried, Fitted | None]:
        """Fits it, or reads what is left of it in the folder; compares it with `base`, if given."""
        folder = self.folder(candidate.name)
        known = self.known.get(candidate.name)
        fitted = None
        if known is None or folder.exists():
            began = time.monotonic()
            fitted = candidate.fit(folder, candidate.seconds)
            known = known or Tried(
                candidate.name,
                dict(candidate.changes),
                candidate.seed,
                candidate.share * fitted.completed,
                fitted.outcome.metrics.get(self.measure),
                time.monotonic() - began,
                fitted.per_row,
                None if base is None else self.gain(base, fitted.outcome),
            )
        self.tried.append(known)
        rows = [asdict(one) for one in self.tried]
        write_text(self.out / RECORD, json.dumps({"trials": rows}, indent=1) + "\n")
        if base is not None:
            shutil.rmtree(folder, ignore_errors=True)  # nothing will be compared with it
        return known, fitted


def compare_held_out(work: FinetuneData, out: Path) -> Comparison:
    """A comparison on the held-out rows."""
    return Comparison(out, work.primary_metric, partial(paired_gain, held_out_score(work)))


def read_tried(out: Path) -> dict[str, Tried]:
    """The candidates tried in a folder by name."""
    rows = read_rows(out / RECORD, "trials")
    tried = [Tried(**{**row, "gain": row["gain"] and Gain(**row["gain"])}) for row in rows]
    return {one.name: one for one in tried}


def read_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a comparison's record; none if nothing was compared."""
    return JsonObject(read_object(path), str(path)).list_of(name, dict) if path.is_file() else []
