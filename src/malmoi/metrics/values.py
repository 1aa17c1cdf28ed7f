"""What every metric takes and shares: paired values, means, ratios."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from malmoi.errors import UsageError

Labels = Sequence[Any]
NumberSeq = Sequence[float] | np.ndarray[Any, Any]
Tags = Sequence[Sequence[str]]  # a tag for each word of each sentence
Golds = Sequence[Sequence[str]]  # the acceptable answers to each question; empty: unanswerable


def check_paired(gold: Labels | NumberSeq, predicted: Labels | NumberSeq) -> None:
    if len(gold) != len(predicted):
        raise UsageError(
            "There are {gold} labels and {predicted} predictions; give one for each.",
            gold=len(gold),
            predicted=len(predicted),
        )
    if not len(gold):
        raise UsageError("There is nothing to score: no labels.")


def mean_of(
    measure: Callable[[Any, Any], float], gold: Labels | NumberSeq, predicted: Labels | NumberSeq
) -> float:
    """The mean of a measure of one item."""
    check_paired(gold, predicted)
    return float(np.mean([measure(g, p) for g, p in zip(gold, predicted, strict=True)]))


def ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else 0.0


def f_score(right: float, predicted: float, gold: float) -> float:
    """2PR / (P + R), in a form that is 0 if nothing is right."""
    return ratio(2 * right, predicted + gold)


def some_values(values: NumberSeq) -> np.ndarray[Any, Any]:
    array = np.asarray(values, np.float64)
    if not array.size:
        raise UsageError("There are no values to score.")
    return array


@dataclass(frozen=True)
class MeanWithError:
    """A mean with its standard error (0 for a single value) and standard deviation."""

    mean: float
    standard_error: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.standard_error:.2g}"


def mean_with_error(values: NumberSeq) -> MeanWithError:
    """The mean over runs or examples, and its standard error s / √n."""
    array = some_values(values)
    deviation = float(array.std(ddof=1)) if array.size > 1 else 0.0
    return MeanWithError(float(array.mean()), deviation / math.sqrt(array.size), deviation)
