"""Metrics by name: a record of each, made where its function is written."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from malmoi.errors import require_that
from malmoi.system.plugins import Registry

Labels = Sequence[Any]
NumberSeq = Sequence[float] | np.ndarray[Any, Any]
Tags = Sequence[Sequence[str]]  # a tag for each word of each sentence
Golds = Sequence[Sequence[str]]  # the acceptable answers to each question; empty: unanswerable


def check_paired(gold: Labels | NumberSeq, predicted: Labels | NumberSeq) -> None:
    require_that(
        len(gold) == len(predicted),
        "There are {gold} labels and {predicted} predictions; give one for each.",
        gold=len(gold),
        predicted=len(predicted),
    )
    require_that(len(gold), "There is nothing to score: no labels.")


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
    require_that(array.size, "There are no values to score.")
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


Function = TypeVar("Function", bound=Callable[..., float])


@dataclass(frozen=True)
class Metric:
    """A function of (gold, predicted), which answers it compares, and how its values are read."""

    function: Callable[..., float]
    answers: str = ""  # it suits all tasks with a metric of the same answers; empty: every task
    lower_is_better: bool = False
    is_mean: bool = False  # over the items, whose values then give its standard error


METRICS: Registry[Metric] = Registry("metric", {})
LOSSES = frozenset({"answer_loss"})  # that a kind of task measures while it predicts


def compares(
    answers: str, *, lower_is_better: bool = False, is_mean: bool = False
) -> Callable[[Function], Function]:
    """Makes a function a metric under its name; those of the same answers suit the same tasks."""

    def add(function: Function) -> Function:
        METRICS[function.__name__] = Metric(function, answers, lower_is_better, is_mean)
        return function

    return add


def metrics_like(names: Iterable[str]) -> set[str]:
    """The metrics of the same answers as these, and those of any."""
    answers = {METRICS[name].answers for name in names if name in METRICS}
    return {name for name, one in METRICS.items() if not one.answers or one.answers in answers}


def score_predictions(
    names: Sequence[str], gold: Labels, predicted: Labels, labels: Sequence[str] = ()
) -> dict[str, float]:
    """Computes several metrics; averages over labels include all `labels`, even absent ones."""
    found = {}
    for name in names:
        function = METRICS.find(name).function
        averages = labels and "labels" in signature(function).parameters
        found[name] = function(gold, predicted, **({"labels": labels} if averages else {}))
    return found


def goodness(name: str, value: float) -> float:
    """A metric's value with its sign such that more is better; NaN is the worst."""
    if math.isnan(value):
        return -math.inf
    lower = METRICS[name].lower_is_better if name in METRICS else name in LOSSES
    return -value if lower else value


def is_better(name: str, a: float, b: float) -> bool:
    """Whether `a` is the better value of this metric."""
    return goodness(name, a) > goodness(name, b)


# ------------------------------------------------------------------ metrics of numbers


@compares("numbers")
def pearson(gold: NumberSeq, predicted: NumberSeq) -> float:
    """Linear correlation; 0 if one side is constant, NaN if a value is not finite."""
    check_paired(gold, predicted)
    a, b = (np.asarray(x, np.float64) for x in (gold, predicted))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    a = a - a.mean()
    b = b - b.mean()
    if not a.any() or not b.any():
        return 0.0
    # scaled so that squares neither underflow nor overflow
    a /= np.abs(a).max()
    b /= np.abs(b).max()
    return float(np.clip(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)), -1, 1))


def ranks(values: NumberSeq) -> np.ndarray[Any, Any]:
    """Ranks from 1, the mean rank for ties; all NaN if a value is NaN."""
    array = np.asarray(values, np.float64)
    if np.isnan(array).any():
        return np.full_like(array, math.nan)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


@compares("numbers")
def spearman(gold: NumberSeq, predicted: NumberSeq) -> float:
    """The correlation of the ranks; NaN if a value is NaN."""
    check_paired(gold, predicted)
    return pearson(ranks(gold), ranks(predicted))


@compares("numbers", lower_is_better=True)
def mse(gold: NumberSeq, predicted: NumberSeq) -> float:
    """The mean squared error."""
    return mean_of(lambda g, p: (float(g) - float(p)) ** 2, gold, predicted)


@compares("ranks")
def recall_at_1(gold: Labels, predicted: NumberSeq) -> float:
    """The share of queries whose text is ranked first."""
    return mean_of(lambda _, rank: rank <= 1, gold, predicted)


@compares("ranks")
def recall_at_10(gold: Labels, predicted: NumberSeq) -> float:
    """The share of queries whose text is among the first ten."""
    return mean_of(lambda _, rank: rank <= 10, gold, predicted)


@compares("ranks")
def mrr(gold: Labels, predicted: NumberSeq) -> float:
    """The mean of 1 / rank."""
    return mean_of(lambda _, rank: 1 / rank, gold, predicted)


# ------------------------------------------------------------------ language models


@compares("likelihoods", lower_is_better=True)
def perplexity(logprobs: NumberSeq) -> float:
    """exp of the mean loss in nats; infinite if that overflows a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(some_values(logprobs))))


@compares("likelihoods", lower_is_better=True)
def bits_per_byte(logprobs: NumberSeq, text: str) -> float:
    """The loss in bits per byte of the text: comparable between tokenizers."""
    size = len(text.encode())
    require_that(size, "There is no text to count the bytes of.")
    return -float(np.sum(some_values(logprobs))) / math.log(2) / size
