"""Labels of items and words, the thresholds that give them, and how far they can be trusted."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from malmoi.errors import require_that
from malmoi.metrics.registry import (
    Labels,
    NumberSeq,
    Tags,
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
    other = [value for value in (*gold, *predicted) if value not in place][:1]
    shown = ", ".join(map(str, names))
    require_that(not other, "The labels are {shown}, not {other}.", shown=shown, other=other)
    table = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(table, ([place[g] for g in gold], [place[p] for p in predicted]), 1)
    return table


@compares("names")
def f1(gold: Labels, predicted: Labels) -> float:
    """F1 of the last of two labels: 1 of 0 and 1, even if only one of them occurs."""
    counts = _label_counts(gold, predicted)
    require_that(
        len(counts) <= 2,
        "Binary F1 needs two labels, but there are {n}; use f1_macro or f1_micro.",
        n=len(counts),
    )
    *_, last = counts
    positive = last if len(counts) > 1 else {"0": "1", 0: 1}.get(last, last)
    return f_score(*counts.get(positive, (0, 0, 0)))


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
    """Each label's true positives, predictions and golds; an item may have several labels."""
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
    """Thresholds with the best micro F1 for all labels, or the best F1 of each that occurs."""
    right = np.array([[name in golds for name in labels] for golds in gold], bool)
    table = np.asarray(chances, np.float64)
    shared = best_f1_threshold(right.ravel(), table.ravel()) if right.any() else 0.5
    if not per_label:
        return [shared] * len(labels)
    columns = zip(right.T, table.T, strict=True)
    return [best_f1_threshold(*column) if column[0].any() else shared for column in columns]


# ------------------------------------------------------------------ entities, as conlleval counts


def entities(tags: Sequence[str]) -> frozenset[tuple[str, int, int]]:
    """(label, first word, last word) of each entity in IOB1, IOB2 or BIOES tags, as in conlleval.

    An entity begins at B or S, and at I or E if none of its label precedes; it ends before the next
    begins, at O, and after E or S.
    """
    return _entities(tuple(tags))


# cached: three metrics need the same, and golds recur at every evaluation
@lru_cache(maxsize=100_000)
def _entities(tags: tuple[str, ...]) -> frozenset[tuple[str, int, int]]:
    found = set()
    begun = 0
    label = ""
    for i, tag in enumerate([*tags, "O"]):
        mark, name = _parts(tag)
        before = _parts(tags[i - 1])[0] if i else "O"
        goes_on = label and mark in "IE" and name == label and before not in "ES"
        if label and not goes_on:
            found.add((label, begun, i - 1))
            label = ""
        if mark != "O" and not label:
            begun = i
            label = name
    return frozenset(found)


@lru_cache(maxsize=1000)
def _parts(tag: str) -> tuple[str, str]:
    """B-PER or B_PER → ("B", "PER"); B alone gets the label _, and NOUN is one on its own."""
    if tag in ("O", ""):
        return "O", ""
    mark = {"L": "E", "U": "S"}.get(tag[0], tag[0])
    return (mark, tag[2:] or "_") if mark in "BIES" and tag[1:2] in ("", "-", "_") else ("S", tag)


def _entity_counts(gold: Tags, predicted: Tags) -> dict[str, list[int]]:
    """Each type's true positives, predictions and golds."""
    check_paired(gold, predicted)
    counts: dict[str, list[int]] = {}
    for n, (g, p) in enumerate(zip(gold, predicted, strict=True), start=1):
        require_that(
            len(g) == len(p),
            "Sentence {n} has {tags} tags and {said} predicted ones.",
            n=n,
            tags=len(g),
            said=len(p),
        )
        wanted, said = entities(g), entities(p)
        for column, found in enumerate((wanted & said, said, wanted)):
            for label, _, _ in found:
                counts.setdefault(label, [0, 0, 0])[column] += 1
    return counts


def entity_scores(gold: Tags, predicted: Tags) -> dict[str, LabelScore]:
    """Precision, recall, F1 and support of each type of entity."""
    counts = _entity_counts(gold, predicted)
    return {name: label_score(*counts[name]) for name in sorted(counts)}


def _all_entities(gold: Tags, predicted: Tags) -> LabelScore:
    counts = [*_entity_counts(gold, predicted).values(), [0, 0, 0]]
    return label_score(*map(sum, zip(*counts, strict=True)))


@compares("tags")
def entity_precision(gold: Tags, predicted: Tags) -> float:
    return _all_entities(gold, predicted).precision


@compares("tags")
def entity_recall(gold: Tags, predicted: Tags) -> float:
    return _all_entities(gold, predicted).recall


@compares("tags")
def entity_f1(gold: Tags, predicted: Tags) -> float:
    """F1 of whole entities: label and both boundaries must match (CoNLL-2003)."""
    return _all_entities(gold, predicted).f1


# ------------------------------------------------------------------ tags of single words


def mark_no_entities(tags: Iterable[str]) -> bool:
    """Whether tags are of words alone, as parts of speech are: none is O, B-… or the like."""
    return all(_parts(tag) == ("S", tag) for tag in tags)


@compares("tags")
def tag_accuracy(gold: Tags, predicted: Tags) -> float:
    """The share of words with the right tag."""
    return accuracy([*chain(*gold)], [*chain(*predicted)])


@compares("tags")
def tag_f1_macro(gold: Tags, predicted: Tags) -> float:
    """The mean of all tags' F1, over words."""
    return f1_macro([*chain(*gold)], [*chain(*predicted)])


# ------------------------------------------------------------------ whether confidence is earned

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
    """The temperature with the least cross-entropy of the gold labels (Guo et al. 2017 §4.2)."""
    known = [(label, some) for label, some in zip(gold, chances, strict=True) if label in some]
    if not known:
        return 1.0
    logs = np.full((len(known), max(len(some) for _, some in known)), -np.inf)
    right = np.array([list(some).index(label) for label, some in known])
    for row, (_, some) in zip(logs, known, strict=True):
        row[: len(some)] = np.log(np.maximum(list(some.values()), MIN_CHANCE))

    def loss(cold: float) -> float:
        scaled = logs * cold
        top = scaled.max(1)
        total = top + np.log(np.exp(scaled - top[:, None]).sum(1))
        return float(np.mean(total - scaled[np.arange(len(right)), right]))

    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]  # one minimum: a golden-section search
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
