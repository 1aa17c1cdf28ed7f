"""Metrics, in numpy only; each is one function, whose record `METRICS` has by its name."""

from malmoi.metrics import answers, calibration, labels, numbers, overlap, tags
from malmoi.metrics.registry import (
    METRICS,
    MeanWithError,
    goodness,
    is_better,
    mean_with_error,
    metrics_like,
    score_predictions,
)

__all__ = ["METRICS", "MeanWithError", "goodness", "is_better", "mean_with_error", "metrics_like"]
__all__ += ["answers", "calibration", "labels", "numbers", "overlap", "tags"]
__all__ += ["score_predictions"]
