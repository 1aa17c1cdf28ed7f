"""Metrics, in numpy only. `METRICS` maps names to functions of (gold, predicted)."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from malmoi.errors import UsageError
from malmoi.system.plugins import Registry

# Text overlap: BLEU for translations, ROUGE-L for summaries

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


def rouge_l(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> float:
    """Mean F1, 0 to 1, of the longest common subsequence with the best gold (Lin 2004 §3)."""
    return _mean(
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
        both = (ours & theirs).total()
        rows.append((ours.total() if theirs else 0, theirs.total(), both))
    return np.array(rows, float)


def _chrf(counts: np.ndarray[Any, Any]) -> float:
    used = counts[(counts[:, 0] > 0) & (counts[:, 1] > 0)]
    if not used[:, 2].any():
        return 0.0
    precision, recall = (float((used[:, 2] / used[:, i]).mean()) for i in (0, 1))
    weight = CHRF_BETA**2
    return 100 * (1 + weight) * precision * recall / (weight * precision + recall)


Labels = Sequence[Any]
NumberSeq = Sequence[float] | np.ndarray[Any, Any]
Tags = Sequence[Sequence[str]]  # a tag for each word of each sentence
Golds = Sequence[Sequence[str]]  # the acceptable answers to each question; empty: unanswerable


def _paired(gold: Labels | NumberSeq, predicted: Labels | NumberSeq) -> None:
    if len(gold) != len(predicted):
        raise UsageError(
            f"There are {len(gold)} labels and {len(predicted)} predictions; give one for each."
        )
    if not len(gold):
        raise UsageError("There is nothing to score: no labels.")


def _mean(
    measure: Callable[[Any, Any], float], gold: Labels | NumberSeq, predicted: Labels | NumberSeq
) -> float:
    """The mean of a measure of one item."""
    _paired(gold, predicted)
    return float(np.mean([measure(g, p) for g, p in zip(gold, predicted, strict=True)]))


# ------------------------------------------------------------------ labels


def accuracy(gold: Labels, predicted: Labels) -> float:
    """The share of correct predictions."""
    return _mean(lambda g, p: bool(g == p), gold, predicted)


def confusion(
    gold: Labels, predicted: Labels, labels: Sequence[Hashable] | None = None
) -> np.ndarray[Any, Any]:
    """How often each gold label (row) was predicted as each label (column)."""
    _paired(gold, predicted)
    names = list(labels) if labels is not None else sorted({*gold, *predicted}, key=str)
    place = {name: i for i, name in enumerate(names)}
    for value in (*gold, *predicted):
        if value not in place:
            raise UsageError(f"The label {value!r} is not one of {', '.join(map(str, names))}.")
    table = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(table, ([place[g] for g in gold], [place[p] for p in predicted]), 1)
    return table


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else 0.0


def _f(right: float, predicted: float, gold: float) -> float:
    """2PR / (P + R), in a form that is 0 if nothing is right."""
    return _ratio(2 * right, predicted + gold)


def f1(gold: Labels, predicted: Labels, positive: Hashable | None = None) -> float:
    """F1 of one label: `positive`, or the last of two (1 of 0 and 1)."""
    _paired(gold, predicted)
    names = sorted({*gold, *predicted}, key=str)
    if positive is None and len(names) > 2:
        raise UsageError(
            f"Binary F1 needs two labels, but there are {len(names)}; use f1_macro or f1_micro."
        )
    one = _positive(names) if positive is None else positive
    right = sum(g == p == one for g, p in zip(gold, predicted, strict=True))
    return _f(right, sum(p == one for p in predicted), sum(g == one for g in gold))


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


def _label_score(right: int, said: int, wanted: int) -> LabelScore:
    return LabelScore(_ratio(right, said), _ratio(right, wanted), _f(right, said, wanted), wanted)


def _label_counts(
    gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()
) -> dict[Any, tuple[int, int, int]]:
    """Each label's true positives, predictions and golds, for `labels` and others that occur.

    Items have one label, or a tuple of several.
    """
    _paired(gold, predicted)
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
    return {name: _label_score(*found) for name, found in counts.items()}


def f1_macro(gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()) -> float:
    """The mean of all labels' F1."""
    return float(np.mean([one.f1 for one in label_scores(gold, predicted, labels).values()]))


def f1_micro(gold: Labels, predicted: Labels, labels: Sequence[Hashable] = ()) -> float:
    """F1 over all decisions together; with one label per item, this is the accuracy."""
    counts = _label_counts(gold, predicted, labels).values()
    return _f(*(sum(column) for column in zip(*counts, strict=True)))


def matthews(gold: Labels, predicted: Labels) -> float:
    """Matthews correlation for any number of labels (Gorodkin 2004); 0 if one side is constant."""
    table = confusion(gold, predicted).astype(np.float64)
    total = table.sum()
    golds = table.sum(1)
    given = table.sum(0)
    spread = (total**2 - given @ given) * (total**2 - golds @ golds)
    shared = np.trace(table) * total - golds @ given
    return float(shared / math.sqrt(spread)) if spread > 0 else 0.0


# ------------------------------------------------------------------ numbers


def pearson(gold: NumberSeq, predicted: NumberSeq) -> float:
    """Linear correlation; 0 if one side is constant, NaN if a value is not finite."""
    _paired(gold, predicted)
    a, b = (np.asarray(x, np.float64) for x in (gold, predicted))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    a = a - a.mean()
    b = b - b.mean()
    if not a.any() or not b.any():
        return 0.0
    # scaled so that squares neither underflow nor overflow
    a /= np.abs(a).max()
    b /= np.abs(b).max()
    return float(np.clip(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)), -1, 1))


def ranks(values: NumberSeq) -> np.ndarray[Any, Any]:
    """Ranks from 1, the mean rank for ties; all NaN if a value is NaN."""
    array = np.asarray(values, np.float64)
    if np.isnan(array).any():
        return np.full_like(array, math.nan)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(gold: NumberSeq, predicted: NumberSeq) -> float:
    """The correlation of the ranks; NaN if a value is NaN."""
    _paired(gold, predicted)
    return pearson(ranks(gold), ranks(predicted))


def mse(gold: NumberSeq, predicted: NumberSeq) -> float:
    """The mean squared error."""
    return _mean(lambda g, p: (float(g) - float(p)) ** 2, gold, predicted)


# ------------------------------------------------------------------ ranks


def recall_at_1(gold: Labels, predicted: NumberSeq) -> float:
    """The share of queries whose text is ranked first."""
    return _mean(lambda _, rank: rank <= 1, gold, predicted)


def recall_at_10(gold: Labels, predicted: NumberSeq) -> float:
    """The share of queries whose text is among the first ten."""
    return _mean(lambda _, rank: rank <= 10, gold, predicted)


def mrr(gold: Labels, predicted: NumberSeq) -> float:
    """The mean of 1 / rank."""
    return _mean(lambda _, rank: 1 / rank, gold, predicted)


# ------------------------------------------------------------------ entities


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
    """B-PER or B_PER → ("B", "PER"); a tag without a label gets the label _."""
    mark = {"L": "E", "U": "S"}.get(tag[:1], tag[:1])
    return ("O", "") if tag == "O" or not tag else (mark, tag[2:] or "_")


def _entity_counts(gold: Tags, predicted: Tags) -> tuple[int, int, int]:
    _paired(gold, predicted)
    for number, (g, p) in enumerate(zip(gold, predicted, strict=True), start=1):
        if len(g) != len(p):
            raise UsageError(f"Sentence {number} has {len(g)} tags and {len(p)} predicted ones.")
    golds = [entities(tags) for tags in gold]
    given = [entities(tags) for tags in predicted]
    right = sum(len(a & b) for a, b in zip(golds, given, strict=True))
    return right, sum(map(len, given)), sum(map(len, golds))


def entity_scores(gold: Tags, predicted: Tags) -> dict[str, LabelScore]:
    """Precision, recall, F1 and support of each type of entity."""
    counts: dict[str, list[int]] = {}
    for wanted, said in zip(map(entities, gold), map(entities, predicted), strict=True):
        for column, found in enumerate((wanted & said, said, wanted)):
            for label, _, _ in found:
                counts.setdefault(label, [0, 0, 0])[column] += 1
    return {name: _label_score(*counts[name]) for name in sorted(counts)}


def entity_precision(gold: Tags, predicted: Tags) -> float:
    right, given, _ = _entity_counts(gold, predicted)
    return _ratio(right, given)


def entity_recall(gold: Tags, predicted: Tags) -> float:
    right, _, wanted = _entity_counts(gold, predicted)
    return _ratio(right, wanted)


def entity_f1(gold: Tags, predicted: Tags) -> float:
    """F1 of whole entities: label and both boundaries must match (CoNLL-2003)."""
    return _f(*_entity_counts(gold, predicted))


# ------------------------------------------------------------------ answers


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
    return _f((Counter(a) & Counter(b)).total(), len(b), len(a))


def _best(measure: Callable[[str, str], float], golds: Sequence[str], predicted: str) -> float:
    """The score against the best gold; golds that normalize to nothing are dropped.

    SQuAD 2.0's script does the same.
    """
    meant = [gold for gold in golds if normalize_answer(gold)] or [""]
    return max(measure(gold, predicted) for gold in meant)


def span_exact(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of answers equal to a gold; an empty one is right if there is no gold."""
    return _mean(partial(_best, exact_match), gold, predicted)


def span_f1(gold: Golds, predicted: Sequence[str]) -> float:
    """The mean word F1 with the best gold."""
    return _mean(partial(_best, token_f1), gold, predicted)


_KORQUAD_MARKS = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))


@lru_cache(maxsize=100_000)
def normalize_korquad(text: str) -> str:
    """KorQuAD 1.0's normalization: quotes and brackets become spaces, other punctuation is cut."""
    return " ".join(text.translate(_KORQUAD_MARKS).lower().translate(_UNPOINTED).split())


def korquad_exact(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of answers equal to a gold (evaluate-v1.0.py of KorQuAD)."""

    def equal(golds: Sequence[str], answer: str) -> bool:
        return normalize_korquad(answer) in map(normalize_korquad, golds or ("",))

    return _mean(equal, gold, predicted)


def korquad_f1(gold: Golds, predicted: Sequence[str]) -> float:
    """The mean F1 of the characters shared with the best gold, spaces aside (Lim et al. 2019)."""

    def shared(golds: Sequence[str], answer: str) -> float:
        texts = [normalize_korquad(text).replace(" ", "") for text in (answer, *(golds or ("",)))]
        return max(_shared_f1(one, texts[0]) for one in texts[1:])

    return _mean(shared, gold, predicted)


def match(gold: Golds, predicted: Sequence[str]) -> float:
    """The share of exact string matches with a gold: unlike span_exact, a minus sign counts."""
    return _mean(lambda g, p: p.strip() in {one.strip() for one in g}, gold, predicted)


@dataclass(frozen=True)
class Threshold:
    """The best reachable score, and its threshold: no answer if `null` is above it."""

    score: float
    threshold: float


def best_threshold(gold: Golds, predicted: Sequence[str], null: NumberSeq) -> Threshold:
    """SQuAD 2.0's search: answers are added from the most certain on, and the best F1 is kept."""
    _paired(gold, predicted)
    _paired(gold, null)
    missing = np.flatnonzero(np.isnan(np.asarray(null, np.float64)))
    if len(missing):
        raise UsageError(
            f"There is no best threshold: the score of question {missing[0] + 1} is NaN."
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


# ------------------------------------------------------------------ calibration

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
    _paired(right, confidence)
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


# ------------------------------------------------------------------ language models


def perplexity(logprobs: NumberSeq) -> float:
    """exp of the mean loss in nats; infinite if that overflows a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(_some(logprobs))))


def bits_per_byte(logprobs: NumberSeq, text: str) -> float:
    """The loss in bits per byte of the text: comparable between tokenizers."""
    size = len(text.encode())
    if not size:
        raise UsageError("There is no text to count the bytes of.")
    return -float(np.sum(_some(logprobs))) / math.log(2) / size


def _some(values: NumberSeq) -> np.ndarray[Any, Any]:
    array = np.asarray(values, np.float64)
    if not array.size:
        raise UsageError("There are no values to score.")
    return array


@dataclass(frozen=True)
class MeanWithError:
    """A mean with its standard error (0 for a single value) and standard deviation."""

    mean: float
    standard_error: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.standard_error:.2g}"


def mean_with_error(values: NumberSeq) -> MeanWithError:
    """The mean over runs or examples, and its standard error s / √n."""
    array = _some(values)
    deviation = float(array.std(ddof=1)) if array.size > 1 else 0.0
    return MeanWithError(float(array.mean()), deviation / math.sqrt(array.size), deviation)


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
