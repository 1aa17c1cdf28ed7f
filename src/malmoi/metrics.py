"""How answers are judged: numpy only. `METRICS` names every measure of (gold, predicted)."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from malmoi.errors import UsageError, nearest
from malmoi.ngrams import bleu, rouge_l

Labels = Sequence[Any]
Numbers = Sequence[float] | np.ndarray[Any, Any]
Tags = Sequence[Sequence[str]]  # a tag for each word of each sentence
Golds = Sequence[Sequence[str]]  # the texts that answer each question; none: it has no answer


def _paired(gold: Labels | Numbers, predicted: Labels | Numbers) -> None:
    if len(gold) != len(predicted):
        raise UsageError(f"There are {len(gold)} gold values and {len(predicted)} predictions; give one for each.")
    if not len(gold):
        raise UsageError("There is nothing to judge: no gold values.")


# ------------------------------------------------------------------ labels


def accuracy(gold: Labels, predicted: Labels) -> float:
    """The share that is right."""
    _paired(gold, predicted)
    return sum(g == p for g, p in zip(gold, predicted, strict=True)) / len(gold)


def confusion(gold: Labels, predicted: Labels, labels: Sequence[Hashable] | None = None) -> np.ndarray[Any, Any]:
    """How often a gold label (row) was taken for another (column)."""
    _paired(gold, predicted)
    names = list(labels) if labels is not None else sorted({*gold, *predicted}, key=str)
    place = {name: i for i, name in enumerate(names)}
    for value in (*gold, *predicted):
        if value not in place:
            raise UsageError(f"The label {value!r} is none of {', '.join(map(str, names))}.")
    table = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(table, ([place[g] for g in gold], [place[p] for p in predicted]), 1)
    return table


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else 0.0


def _f(right: float, predicted: float, gold: float) -> float:
    """2PR / (P + R), written so that it is 0 where nothing is right."""
    return _ratio(2 * right, predicted + gold)


def f1(gold: Labels, predicted: Labels, positive: Hashable | None = None) -> float:
    """F1 of one label: `positive`, or the last of two (1 of 0 and 1)."""
    _paired(gold, predicted)
    names = sorted({*gold, *predicted}, key=str)
    if positive is None and len(names) > 2:
        raise UsageError(f"F1 of two labels was asked for, but there are {len(names)}; use f1_macro or f1_micro.")
    one = _positive(names) if positive is None else positive
    right = sum(g == p == one for g, p in zip(gold, predicted, strict=True))
    return _f(right, sum(p == one for p in predicted), sum(g == one for g in gold))


def _positive(names: Sequence[Any]) -> Any:
    """1 where labels are 0 and 1 and only one of them was seen; else the last by name."""
    return {"0": "1", 0: 1}.get(names[0], names[0]) if len(names) == 1 else names[-1]


def f1_macro(gold: Labels, predicted: Labels) -> float:
    """The mean of every label's F1."""
    table = confusion(gold, predicted)
    parts = [_f(table[i, i], table[:, i].sum(), table[i].sum()) for i in range(len(table))]
    return float(np.mean(parts))


def f1_micro(gold: Labels, predicted: Labels) -> float:
    """F1 of all decisions together: where each has one label, the accuracy."""
    table = confusion(gold, predicted)
    return _f(np.trace(table), table.sum(), table.sum())


def matthews(gold: Labels, predicted: Labels) -> float:
    """Matthews' correlation of labels, for any number of them (Gorodkin 2004); 0 where one side never varies."""
    table = confusion(gold, predicted).astype(np.float64)
    total, right = table.sum(), np.trace(table)
    golds, given = table.sum(1), table.sum(0)
    spread = (total**2 - given @ given) * (total**2 - golds @ golds)
    return float((right * total - golds @ given) / math.sqrt(spread)) if spread > 0 else 0.0


# ------------------------------------------------------------------ numbers


def pearson(gold: Numbers, predicted: Numbers) -> float:
    """The linear correlation; 0 where one side never varies, NaN where a value is not a finite number."""
    _paired(gold, predicted)
    a, b = (np.asarray(x, np.float64) for x in (gold, predicted))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    largest = float(np.abs(a).max()), float(np.abs(b).max())
    if min(largest) <= 0:
        return 0.0
    a, b = a / largest[0], b / largest[1]  # so that squares neither vanish nor overflow
    return float(np.clip(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)), -1, 1))


def ranks(values: Numbers) -> np.ndarray[Any, Any]:
    """Places from 1; equal values share the mean of theirs. With a NaN among them none has a place: all are NaN."""
    array = np.asarray(values, np.float64)
    if np.isnan(array).any():
        return np.full_like(array, math.nan)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(gold: Numbers, predicted: Numbers) -> float:
    """The correlation of the ranks; NaN where a value is NaN."""
    _paired(gold, predicted)
    return pearson(ranks(gold), ranks(predicted))


def mse(gold: Numbers, predicted: Numbers) -> float:
    """The mean squared error."""
    _paired(gold, predicted)
    return float(np.mean((np.asarray(gold, np.float64) - np.asarray(predicted, np.float64)) ** 2))


# ------------------------------------------------------------------ entities


def entities(tags: Sequence[str]) -> frozenset[tuple[str, int, int]]:
    """(label, first word, last word) of each entity in IOB1, IOB2 or BIOES tags, as conlleval tells them.

    One begins at B and S, and at I and E where there is none of its label before; it ends before the next begins,
    at O, after E and S.
    """
    return _entities(tuple(tags))


@lru_cache(maxsize=100_000)  # three measures ask for the same, and golds come again at every evaluation
def _entities(tags: tuple[str, ...]) -> frozenset[tuple[str, int, int]]:
    found, begun, label = set(), 0, ""
    for i, tag in enumerate([*tags, "O"]):
        mark, name = _parts(tag)
        before = _parts(tags[i - 1])[0] if i else "O"
        goes_on = label and mark in "IE" and name == label and before not in "ES"
        if label and not goes_on:
            found.add((label, begun, i - 1))
            label = ""
        if mark != "O" and not label:
            begun, label = i, name
    return frozenset(found)


@lru_cache(maxsize=1000)
def _parts(tag: str) -> tuple[str, str]:
    """B-PER or B_PER → ("B", "PER"); a tag without a label is of one that has no name."""
    mark = {"L": "E", "U": "S"}.get(tag[:1], tag[:1])
    return ("O", "") if tag == "O" or not tag else (mark, tag[2:] or "_")


def _entity_counts(gold: Tags, predicted: Tags) -> tuple[int, int, int]:
    _paired(gold, predicted)
    right = given = wanted = 0
    for number, (g, p) in enumerate(zip(gold, predicted, strict=True), start=1):
        if len(g) != len(p):
            raise UsageError(f"Sentence {number} has {len(g)} gold tags and {len(p)} predicted ones.")
        a, b = entities(g), entities(p)
        right, given, wanted = right + len(a & b), given + len(b), wanted + len(a)
    return right, given, wanted


def entity_precision(gold: Tags, predicted: Tags) -> float:
    right, given, _ = _entity_counts(gold, predicted)
    return _ratio(right, given)


def entity_recall(gold: Tags, predicted: Tags) -> float:
    right, _, wanted = _entity_counts(gold, predicted)
    return _ratio(right, wanted)


def entity_f1(gold: Tags, predicted: Tags) -> float:
    """F1 of whole entities: label and both ends must be right (CoNLL-2003)."""
    return _f(*_entity_counts(gold, predicted))


# ------------------------------------------------------------------ answers


@lru_cache(maxsize=100_000)  # golds come again at every evaluation
def normal(text: str) -> str:
    """SQuAD's rule: lower case, without punctuation, articles and superfluous space."""
    bare = text.lower().translate(_UNPOINTED)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


_UNPOINTED = str.maketrans("", "", string.punctuation)


def exact(gold: str, predicted: str) -> float:
    return float(normal(gold) == normal(predicted))


def overlap(gold: str, predicted: str) -> float:
    """F1 of the words that two answers share; where one is empty, whether both are."""
    a, b = normal(gold).split(), normal(predicted).split()
    if not a or not b:
        return float(a == b)
    return _f(sum((Counter(a) & Counter(b)).values()), len(b), len(a))


def _best(measure: Callable[[str, str], float], golds: Sequence[str], predicted: str) -> float:
    """Against the gold that suits it best; golds that normalise to nothing are left out, as SQuAD 2.0's script does."""
    meant = [gold for gold in golds if normal(gold)] or [""]
    return max(measure(gold, predicted) for gold in meant)


def span_exact(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of answers that equal one of the golds; an empty one is right where there is no gold."""
    _paired(gold, predicted)
    return float(np.mean([_best(exact, g, p) for g, p in zip(gold, predicted, strict=True)]))


def span_f1(gold: Golds, predicted: Sequence[str]) -> float:
    """The mean of the words shared with the best gold."""
    _paired(gold, predicted)
    return float(np.mean([_best(overlap, g, p) for g, p in zip(gold, predicted, strict=True)]))


def match(gold: Golds, predicted: Sequence[str]) -> float:
    """The share that is written exactly as one of the golds: unlike span_exact, a minus sign counts."""
    _paired(gold, predicted)
    return float(np.mean([p.strip() in {one.strip() for one in g} for g, p in zip(gold, predicted, strict=True)]))


@dataclass(frozen=True)
class Threshold:
    """The best score that any threshold reaches, and the threshold: no answer where `null` is above it."""

    score: float
    threshold: float


def best_threshold(gold: Golds, predicted: Sequence[str], null: Numbers, measure: str = "span_f1") -> Threshold:
    """SQuAD 2.0's search: with every answer given up at first, taken back from the surest on; the best sum wins."""
    _paired(gold, predicted)
    _paired(gold, null)
    missing = np.flatnonzero(np.isnan(np.asarray(null, np.float64)))
    if len(missing):
        raise UsageError(f"There is no best threshold: the score of question {missing[0] + 1} is NaN.")
    judge = {"span_f1": overlap, "span_exact": exact}[measure]
    has = [bool(golds) for golds in gold]
    score = best = float(sum(not h for h in has))
    threshold = float(np.min(null)) - 1  # below all: never an answer
    for i in np.argsort(np.asarray(null, np.float64), kind="stable"):
        if has[i]:
            score += _best(judge, gold[i], predicted[i])
        elif predicted[i]:
            score -= 1
        if score > best:
            best, threshold = score, float(null[i])
    return Threshold(best / len(gold), threshold)


# ------------------------------------------------------------------ language


def perplexity(logprobs: Numbers) -> float:
    """exp of the mean loss in nats; infinite where that is more than a float holds."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(_some(logprobs))))


def bits_per_byte(logprobs: Numbers, text: str) -> float:
    """The loss in bits over the bytes of the text: comparable between tokenizers."""
    size = len(text.encode())
    if not size:
        raise UsageError("There is no text to count the bytes of.")
    return -float(np.sum(_some(logprobs))) / math.log(2) / size


def _some(values: Numbers) -> np.ndarray[Any, Any]:
    array = np.asarray(values, np.float64)
    if not array.size:
        raise UsageError("There are no values to judge.")
    return array


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error (0 of a single value) and standard deviation."""

    mean: float
    error: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.error:.2g}"


def mean(values: Numbers) -> Mean:
    """The mean of several runs or examples, ± its standard error s / √n."""
    array = _some(values)
    deviation = float(array.std(ddof=1)) if array.size > 1 else 0.0
    return Mean(float(array.mean()), deviation / math.sqrt(array.size), deviation)


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1_macro": f1_macro,
    "f1_micro": f1_micro,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "mse": mse,
    "entity_precision": entity_precision,
    "entity_recall": entity_recall,
    "entity_f1": entity_f1,
    "span_exact": span_exact,
    "span_f1": span_f1,
    "match": match,
    "bleu": bleu,
    "rouge_l": rouge_l,
    "perplexity": perplexity,
    "bits_per_byte": bits_per_byte,
}
LOWER_IS_BETTER = frozenset({"mse", "perplexity", "bits_per_byte"})


def metric(name: str) -> Callable[..., float]:
    """A measure by its name."""
    if name not in METRICS:
        raise UsageError(f"There is no metric {name!r}.{nearest(name, METRICS)}")
    return METRICS[name]


def judge(names: Sequence[str], gold: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]:
    """Several measures at once."""
    return {name: metric(name)(gold, predicted) for name in names}


def goodness(name: str, value: float) -> float:
    """The value of a measure so that more is better; NaN is the worst of all."""
    if math.isnan(value):
        return -math.inf
    return -value if name in LOWER_IS_BETTER else value


def better(name: str, a: float, b: float) -> bool:
    """Whether `a` is the better value of this measure."""
    return goodness(name, a) > goodness(name, b)
