"""Language models by their log-probabilities."""

import math

import numpy as np

from malmoi.errors import UsageError
from malmoi.metrics.registry import compares
from malmoi.metrics.values import NumberSeq, some_values


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
