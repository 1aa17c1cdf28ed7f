"""Numbers, their ranks, the ranks of what was searched for, and log-probabilities."""

import math
from typing import Any

import numpy as np

from malmoi.errors import UsageError
from malmoi.metrics.registry import Labels, NumberSeq, check_paired, compares, mean_of, some_values


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
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


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
    if not size:
        raise UsageError("There is no text to count the bytes of.")
    return -float(np.sum(some_values(logprobs))) / math.log(2) / size
