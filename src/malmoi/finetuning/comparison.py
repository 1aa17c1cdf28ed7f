"""Whether one run is better than another: the difference on the same rows, and its error."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from malmoi.evaluation.evaluate import score_examples
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.task_data import FinetuneData
from malmoi.metrics import goodness

GROUPS = 25  # of rows; an error from so many is itself exact to a seventh

Score = Callable[[Outcome, Sequence[int]], float]  # of some rows of an outcome: more is better


@dataclass(frozen=True)
class Gain:
    """How much better a run is than another one on the same rows."""

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


def paired_gain(score: Score, base: Outcome, other: Outcome) -> Gain:
    """The gain of `other` over `base`, with the error of a jackknife over groups of rows.

    It holds for every metric, and since most rows are easy or hard for both runs, the error of the
    difference is smaller than that of either run.
    """
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
