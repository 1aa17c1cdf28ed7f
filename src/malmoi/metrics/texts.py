"""Answers by the rules of SQuAD and KorQuAD; BLEU, chrF and ROUGE-L of longer texts."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from malmoi.errors import require_that
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
    """The score against the best gold; as in SQuAD 2.0's script, empty golds are dropped."""
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
    return mean_of(
        lambda golds, answer: normalize_korquad(answer) in map(normalize_korquad, golds or ("",)),
        gold,
        predicted,
    )


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
    missing = [n for n, score in enumerate(null, start=1) if math.isnan(score)]
    require_that(
        not missing,
        "No threshold is best: the score of question {n} is NaN.",
        n="".join(map(str, missing[:1])),
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


# ------------------------------------------------------------------ overlap of texts

MAX_NGRAM = 4  # BLEU counts n-grams of up to this many words
ATTACHED_PUNCTUATION = re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])")  # signs always split off
NUMBER_PUNCTUATION = (
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def tokenize_13a(text: str) -> list[str]:
    """Tokenizes like WMT's mteval-v13a and sacrebleu: punctuation split off, numbers kept whole."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for mark, sign in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(mark, sign)
    text = ATTACHED_PUNCTUATION.sub(r" \1 ", f" {text} ")
    for pattern, put in NUMBER_PUNCTUATION:
        text = pattern.sub(put, text)
    return text.split()


def _runs(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def _matches(golds: Sequence[Sequence[str]], predicted: Sequence[str], order: int) -> int:
    """Clipped n-gram matches: each counts at most as often as in any one gold."""
    allowed: Counter[tuple[str, ...]] = Counter()
    for gold in golds:
        allowed |= _runs(gold, order)
    return sum((_runs(predicted, order) & allowed).values())


@compares("texts")
def bleu(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100 (Papineni et al. 2002): brevity · exp(mean log precision, n = 1 to 4).

    Each prediction may have several golds. A precision of 0 counts as 1/2, 1/4… (sacrebleu's "exp"
    smoothing).
    """
    found = [0] * MAX_NGRAM
    possible = [0] * MAX_NGRAM
    length = wanted = 0
    for golds, text in zip(gold, predicted, strict=True):
        tokens = tokenize_13a(text)
        references = [tokenize_13a(one) for one in golds]
        length += len(tokens)
        wanted += min((abs(len(one) - len(tokens)), len(one)) for one in references)[1]
        for n in range(MAX_NGRAM):
            found[n] += _matches(references, tokens, n + 1)
            possible[n] += max(len(tokens) - n, 0)
    if not all(possible) or not any(found):
        return 0.0
    brevity = min(0.0, 1 - wanted / length)
    return 100 * math.exp(brevity + sum(_log_precisions(found, possible)) / MAX_NGRAM)


def _log_precisions(found: Sequence[int], possible: Sequence[int]) -> list[float]:
    logs = []
    share = 1.0
    for right, all_ in zip(found, possible, strict=True):
        share = share if right else share / 2
        logs.append(math.log((right or share) / all_))
    return logs


@compares("texts", is_mean=True)
def rouge_l(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> float:
    """Mean F1, 0 to 1, of the longest common subsequence with the best gold (Lin 2004 §3)."""
    return mean_of(
        lambda golds, said: max(_subsequence_f1(one, said) for one in golds), gold, predicted
    )


def _subsequence_f1(gold: str, predicted: str) -> float:
    a, b = (re.findall(r"[^\W_]+", text.lower()) for text in (gold, predicted))
    return 2 * _common(a, b) / (len(a) + len(b)) if a and b else 0.0


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, computed row by row."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b):
            longest = before + 1 if word == other else max(row[j], row[j + 1])
            before = row[j + 1]
            row[j + 1] = longest
    return row[-1]


CHRF_ORDER = 6  # chrF counts character n-grams of up to this many
CHRF_BETA = 2  # recall counts this many times as much as precision


@compares("texts")
def chrf(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> float:
    """Corpus chrF2, 0 to 100 (Popović 2015): F-score of character n-grams, white space left out.

    Unlike BLEU it sees that two words share a stem. Of several golds the best one counts.
    """
    totals = np.zeros((CHRF_ORDER, 3))
    for golds, text in zip(gold, predicted, strict=True):
        totals += max((_character_counts(one, text) for one in golds), key=_chrf)
    return _chrf(totals)


def _character_counts(gold: str, predicted: str) -> np.ndarray[Any, Any]:
    """For each order: n-grams of the prediction, of the gold, and common to both."""
    rows = []
    for n in range(1, CHRF_ORDER + 1):
        theirs, ours = (_runs("".join(text.split()), n) for text in (gold, predicted))
        rows.append((ours.total() if theirs else 0, theirs.total(), (ours & theirs).total()))
    return np.array(rows, float)


def _chrf(counts: np.ndarray[Any, Any]) -> float:
    used = counts[(counts[:, 0] > 0) & (counts[:, 1] > 0)]
    if not used[:, 2].any():
        return 0.0
    precision, recall = (float((used[:, 2] / used[:, i]).mean()) for i in (0, 1))
    weight = CHRF_BETA**2
    return 100 * (1 + weight) * precision * recall / (weight * precision + recall)
