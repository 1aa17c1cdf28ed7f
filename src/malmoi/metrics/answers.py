"""Answers to questions, by the rules of SQuAD and KorQuAD."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from malmoi.errors import UsageError
from malmoi.metrics.registry import Golds, NumberSeq, check_paired, compares, f_score, mean_of


@lru_cache(maxsize=100_000)  # golds recur at every evaluation
def normalize_answer(text: str) -> str:
    """SQuAD's normalization: lowercase, without punctuation, articles and extra whitespace."""
    bare = text.lower().translate(_UNPOINTED)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


_UNPOINTED = str.maketrans("", "", string.punctuation)


def exact_match(gold: str, predicted: str) -> float:
    return float(normalize_answer(gold) == normalize_answer(predicted))


def token_f1(gold: str, predicted: str) -> float:
    """F1 of the words that two answers share; if one is empty, whether both are."""
    a = normalize_answer(gold).split()
    b = normalize_answer(predicted).split()
    return _shared_f1(a, b) if a and b else float(a == b)


def _shared_f1(a: Sequence[str], b: Sequence[str]) -> float:
    return f_score((Counter(a) & Counter(b)).total(), len(b), len(a))


def _best(measure: Callable[[str, str], float], golds: Sequence[str], predicted: str) -> float:
    """The score against the best gold; golds that normalize to nothing are dropped.

    SQuAD 2.0's script does the same.
    """
    meant = [gold for gold in golds if normalize_answer(gold)] or [""]
    return max(measure(gold, predicted) for gold in meant)


@compares("spans", is_mean=True)
def span_exact(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of answers equal to a gold; an empty one is right if there is no gold."""
    return mean_of(partial(_best, exact_match), gold, predicted)


@compares("spans", is_mean=True)
def span_f1(gold: Golds, predicted: Sequence[str]) -> float:
    """The mean word F1 with the best gold."""
    return mean_of(partial(_best, token_f1), gold, predicted)


_KORQUAD_MARKS = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))


@lru_cache(maxsize=100_000)
def normalize_korquad(text: str) -> str:
    """KorQuAD 1.0's normalization: quotes and brackets become spaces, other punctuation is cut."""
    return " ".join(text.translate(_KORQUAD_MARKS).lower().translate(_UNPOINTED).split())


@compares("spans")
def korquad_exact(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of answers equal to a gold (evaluate-v1.0.py of KorQuAD)."""

    def equal(golds: Sequence[str], answer: str) -> bool:
        return normalize_korquad(answer) in map(normalize_korquad, golds or ("",))

    return mean_of(equal, gold, predicted)


@compares("spans")
def korquad_f1(gold: Golds, predicted: Sequence[str]) -> float:
    """The mean F1 of the characters shared with the best gold, spaces aside (Lim et al. 2019)."""

    def shared(golds: Sequence[str], answer: str) -> float:
        texts = [normalize_korquad(text).replace(" ", "") for text in (answer, *(golds or ("",)))]
        return max(_shared_f1(one, texts[0]) for one in texts[1:])

    return mean_of(shared, gold, predicted)


@compares("texts", is_mean=True)
def match(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of exact string matches with a gold: unlike span_exact, a minus sign counts."""
    return mean_of(lambda g, p: p.strip() in {one.strip() for one in g}, gold, predicted)


@dataclass(frozen=True)
class Threshold:
    """The best reachable score, and its threshold: no answer if `null` is above it."""

    score: float
    threshold: float


def best_threshold(gold: Golds, predicted: Sequence[str], null: NumberSeq) -> Threshold:
    """SQuAD 2.0's search: answers are added from the most certain on, and the best F1 is kept."""
    check_paired(gold, predicted)
    check_paired(gold, null)
    missing = np.flatnonzero(np.isnan(np.asarray(null, np.float64)))
    if len(missing):
        raise UsageError(
            "There is no best threshold: the score of question {missing} is NaN.",
            missing=missing[0] + 1,
        )
    has = [bool(golds) for golds in gold]
    score = best = float(sum(not h for h in has))
    threshold = float(np.min(null)) - 1  # below all scores: never answers
    for i in np.argsort(np.asarray(null, np.float64), kind="stable"):
        if has[i]:
            score += _best(token_f1, gold[i], predicted[i])
        elif predicted[i]:
            score -= 1
        if score > best:
            best = score
            threshold = float(null[i])
    return Threshold(best / len(gold), threshold)
