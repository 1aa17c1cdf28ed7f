"""Labels, one or several an item, and the thresholds that give them."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from malmoi.errors import UsageError
from malmoi.metrics.registry import (
    Labels,
    NumberSeq,
    check_paired,
    compares,
    f_score,
    mean_of,
    ratio,
)


@compares("anything", is_mean=True)
def accuracy(gold: Labels, predicted: Labels) -> float:
    """The share of correct predictions."""
    return mean_of(lambda g, p: bool(g == p), gold, predicted)


def confusion(
    gold: Labels, predicted: Labels, labels: Sequence[Hashable] | None = None
) -> np.ndarray[Any, Any]:
    """How often each gold label (row) was predicted as each label (column)."""
    check_paired(gold, predicted)
    names = list(labels) if labels is not None else sorted({*gold, *predicted}, key=str)
    place = {name: i for i, name in enumerate(names)}
    for value in (*gold, *predicted):
        if value not in place:
            raise UsageError(
                "The label {value!r} is not one of {names}.",
                value=value,
                names=", ".join(map(str, names)),
            )
    table = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(table, ([place[g] for g in gold], [place[p] for p in predicted]), 1)
    return table


@compares("names")
def f1(gold: Labels, predicted: Labels, positive: Hashable | None = None) -> float:
    """F1 of one label: `positive`, or the last of two (1 of 0 and 1)."""
    check_paired(gold, predicted)
    names = sorted({*gold, *predicted}, key=str)
    if positive is None and len(names) > 2:
        raise UsageError(
            "Binary F1 needs two labels, but there are {names}; use f1_macro or f1_micro.",
            names=len(names),
        )
    one = _positive(names) if positive is None else positive
    right = sum(g == p == one for g, p in zip(gold, predicted, strict=True))
    return f_score(right, sum(p == one for p in predicted), sum(g == one for g in gold))


def _positive(names: Sequence[Any]) -> Any:
    """The label 1 if labels are 0 and 1 and only one of them occurs; else the last by name."""
    return {"0": "1", 0: 1}.get(names[0], names[0]) if len(names) == 1 else names[-1]


@dataclass(frozen=True)
class LabelScore:
    """Precision, recall and F1 of one label; `support` is how often it occurs in the gold."""

    precision: float
    recall: float
    f1: float
    support: int


def label_score(right: int, said: int, wanted: int) -> LabelScore:
    return LabelScore(
        ratio(right, said), ratio(right, wanted), f_score(right, said, wanted), wanted
    )


def _label_counts(
    gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()
) -> dict[Any, tuple[int, int, int]]:
    """Each label's true positives, predictions and golds, for `labels` and others that occur.

    Items have one label, or a tuple of several.
    """
    check_paired(gold, predicted)
    right, said, wanted = (Counter[Any]() for _ in range(3))
    for g, p in zip(gold, predicted, strict=True):
        golds = g if isinstance(g, tuple | list) else (g,)
        given = p if isinstance(p, tuple | list) else (p,)
        wanted.update(golds)
        said.update(given)
        right.update(label for label in golds if label in given)
    names = (*labels, *sorted({*wanted, *said} - {*labels}, key=str))
    return {name: (right[name], said[name], wanted[name]) for name in names}


def label_scores(
    gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()
) -> dict[Any, LabelScore]:
    """Precision, recall, F1 and support of each label."""
    counts = _label_counts(gold, predicted, labels)
    return {name: label_score(*found) for name, found in counts.items()}


@compares("names")
def f1_macro(gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()) -> float:
    """The mean of all labels' F1."""
    return float(np.mean([one.f1 for one in label_scores(gold, predicted, labels).values()]))


@compares("names")
def f1_micro(gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()) -> float:
    """F1 over all decisions together; with one label per item, this is the accuracy."""
    counts = _label_counts(gold, predicted, labels).values()
    return f_score(*(sum(column) for column in zip(*counts, strict=True)))


@compares("names")
def matthews(gold: Labels, predicted: Labels) -> float:
    """Matthews correlation for any number of labels (Gorodkin 2004); 0 if one side is constant."""
    table = confusion(gold, predicted).astype(np.float64)
    total = table.sum()
    golds = table.sum(1)
    given = table.sum(0)
    spread = (total**2 - given @ given) * (total**2 - golds @ golds)
    shared = np.trace(table) * total - golds @ given
    return float(shared / math.sqrt(spread)) if spread > 0 else 0.0


def best_f1_threshold(right: NumberSeq, chances: NumberSeq) -> float:
    """The probability threshold with the best F1 of a binary label."""
    values = np.asarray(chances, np.float64)
    order = np.argsort(-values, kind="stable")
    values = np.append(values[order], 0.0)
    hits = np.cumsum(np.asarray(right, bool)[order])
    f1s = 2 * hits / (np.arange(1, len(hits) + 1) + hits[-1])
    f1s[values[:-1] == values[1:]] = -1  # a threshold cannot separate equal probabilities
    best = int(np.argmax(f1s))
    return float((values[best] + values[best + 1]) / 2)


def best_label_thresholds(
    gold: Sequence[Sequence[str]],
    chances: Sequence[Sequence[float]],
    labels: Sequence[str],
    *,
    per_label: bool = False,
) -> list[float]:
    """Thresholds of the labels: one shared by all with the best micro F1, or the best F1 of each.

    With `per_label`, a label that does not occur takes the shared threshold.
    """
    right = np.array([[name in golds for name in labels] for golds in gold], bool)
    table = np.asarray(chances, np.float64)
    shared = best_f1_threshold(right.ravel(), table.ravel()) if right.any() else 0.5
    if not per_label:
        return [shared] * len(labels)
    columns = zip(right.T, table.T, strict=True)
    return [best_f1_threshold(*column) if column[0].any() else shared for column in columns]
