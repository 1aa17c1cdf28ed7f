"""Metrics by name: functions of (gold, predicted)."""

import math
from collections.abc import Callable, Sequence

from malmoi.metrics.answers import korquad_exact, korquad_f1, match, span_exact, span_f1
from malmoi.metrics.labels import accuracy, f1, f1_macro, f1_micro, matthews
from malmoi.metrics.language import bits_per_byte, perplexity
from malmoi.metrics.numbers import mrr, mse, pearson, recall_at_1, recall_at_10, spearman
from malmoi.metrics.overlap import bleu, chrf, rouge_l
from malmoi.metrics.tags import entity_f1, entity_precision, entity_recall
from malmoi.metrics.values import Labels
from malmoi.system.plugins import Registry

_FUNCTIONS: tuple[Callable[..., float], ...] = (
    accuracy, f1, f1_macro, f1_micro, matthews, pearson, spearman, mse, recall_at_1, recall_at_10,
    mrr, entity_precision, entity_recall, entity_f1, span_exact, span_f1, korquad_exact, korquad_f1,
    match, bleu, rouge_l, chrf, perplexity, bits_per_byte,
)  # fmt: skip
METRICS: Registry[Callable[..., float]] = Registry(
    "metric", {function.__name__: function for function in _FUNCTIONS}
)
LABEL_AVERAGES = frozenset({"f1_macro", "f1_micro"})
LOWER_IS_BETTER = {"mse", "perplexity", "bits_per_byte", "answer_loss"}


def metric(name: str) -> Callable[..., float]:
    """Looks up a metric by name."""
    return METRICS.find(name)


def score_predictions(
    names: Sequence[str], gold: Labels, predicted: Labels, labels: Sequence[str] = ()
) -> dict[str, float]:
    """Computes several metrics; averages over labels include all `labels`, even absent ones."""
    averaged = {"labels": labels} if labels else {}
    return {
        name: metric(name)(gold, predicted, **(averaged if name in LABEL_AVERAGES else {}))
        for name in names
    }


def goodness(name: str, value: float) -> float:
    """A metric's value with its sign such that more is better; NaN is the worst."""
    if math.isnan(value):
        return -math.inf
    return -value if name in LOWER_IS_BETTER else value


def is_better(name: str, a: float, b: float) -> bool:
    """Whether `a` is the better value of this metric."""
    return goodness(name, a) > goodness(name, b)
