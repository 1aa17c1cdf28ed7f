"""Metrics, in numpy only; each is one function, whose record `METRICS` has by its name."""

from malmoi.metrics import labels, texts
from malmoi.metrics.registry import (
    METRICS,
    MeanWithError,
    goodness,
    is_better,
    mean_with_error,
    metrics_like,
    score_predictions,
)

__all__ = [
    "METRICS", "MeanWithError", "goodness", "is_better", "labels", "mean_with_error",
    "metrics_like", "score_predictions", "texts",
]  # fmt: skip
