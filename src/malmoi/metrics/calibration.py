"""Whether confidence is earned: temperature and calibration error (Guo et al. 2017)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from malmoi.metrics.registry import Labels, NumberSeq, check_paired

MIN_CHANCE = 1e-12  # below it a probability counts as this one, so that its logarithm is finite
TEMPERATURES = (0.05, 20.0)  # the range that is searched
CALIBRATION_BINS = 10


def apply_temperature(chances: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Probabilities as they would be with the scores divided by the temperature: p^(1/T), scaled.

    Examples:
        >>> apply_temperature({"a": 0.8, "b": 0.2}, 1.0)
        {'a': 0.8, 'b': 0.2}
    """
    logs = np.log(np.maximum(np.array(list(chances.values()), np.float64), MIN_CHANCE))
    scaled = np.exp((logs - logs.max()) / temperature)
    return dict(zip(chances, (scaled / scaled.sum()).tolist(), strict=True))


def best_temperature(gold: Sequence[str], chances: Sequence[Mapping[str, float]]) -> float:
    """The temperature with the least cross-entropy of the gold labels (Guo et al. 2017 §4.2).

    The loss has a single minimum in 1/T, which a golden-section search finds. Labels without a
    probability are left out.
    """
    known = [(label, some) for label, some in zip(gold, chances, strict=True) if label in some]
    if not known:
        return 1.0
    width = max(len(some) for _, some in known)
    logs = np.full((len(known), width), -np.inf)
    right = np.array([list(some).index(label) for label, some in known])
    for row, (_, some) in zip(logs, known, strict=True):
        row[: len(some)] = np.log(np.maximum(list(some.values()), MIN_CHANCE))

    def loss(cold: float) -> float:
        scaled = logs * cold
        top = scaled.max(1)
        total = top + np.log(np.exp(scaled - top[:, None]).sum(1))
        return float(np.mean(total - scaled[np.arange(len(right)), right]))

    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    shrink = (math.sqrt(5) - 1) / 2
    while high - low > 1e-5:
        a = high - shrink * (high - low)
        b = low + shrink * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return round(2 / (low + high), 4)


@dataclass(frozen=True)
class CalibrationBin:
    """The predictions of one range of confidence: how sure they were, how often they were right."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def calibration_bins(right: Labels, confidence: NumberSeq) -> list[CalibrationBin]:
    """Predictions by their confidence, in ten ranges of equal width; empty ones are left out."""
    check_paired(right, confidence)
    sure = np.asarray(confidence, np.float64)
    hit = np.asarray(right, np.float64)
    place = np.clip(np.ceil(sure * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    return [
        CalibrationBin(
            i / CALIBRATION_BINS,
            (i + 1) / CALIBRATION_BINS,
            int((place == i).sum()),
            float(sure[place == i].mean()),
            float(hit[place == i].mean()),
        )
        for i in range(CALIBRATION_BINS)
        if (place == i).any()
    ]


def calibration_error(right: Labels, confidence: NumberSeq) -> float:
    """Expected calibration error: mean gap of confidence and accuracy (Guo et al. 2017 eq. 3)."""
    bins = calibration_bins(right, confidence)
    return sum(one.count * abs(one.confidence - one.accuracy) for one in bins) / len(right)
