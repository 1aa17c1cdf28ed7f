"""Texts compared by the words they share in order: BLEU for translations, ROUGE-L for summaries."""

import math
import re
from collections import Counter
from collections.abc import Sequence

ORDERS = 4  # BLEU counts runs of up to so many words
JOINED = re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])")  # signs that stand alone
INNER = ((re.compile(r"([^0-9])([\.,])"), r"\1 \2 "), (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
         (re.compile(r"([0-9])(-)"), r"\1 \2 "))  # fmt: skip


def words_13a(text: str) -> list[str]:
    """The words that WMT's own script (mteval-v13a) and sacrebleu count: signs apart, numbers whole."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for mark, sign in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(mark, sign)
    text = JOINED.sub(r" \1 ", f" {text} ")
    for pattern, put in INNER:
        text = pattern.sub(put, text)
    return text.split()


def _runs(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def _matches(golds: Sequence[Sequence[str]], said: Sequence[str], order: int) -> int:
    """Runs of words that a gold has too, each counted as often as in the gold that has most of it."""
    allowed: Counter[tuple[str, ...]] = Counter()
    for gold in golds:
        allowed |= _runs(gold, order)
    return sum((_runs(said, order) & allowed).values())


def bleu(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> float:
    """BLEU of a whole set, 0 to 100 (Papineni et al. 2002): brevity · exp(mean log precision of 1 to 4 words).

    Each prediction may have several golds. A precision of 0 counts as 1/2, 1/4… (sacrebleu's "exp" smoothing).
    """
    found, possible = [0] * ORDERS, [0] * ORDERS
    length = wanted = 0
    for golds, text in zip(gold, predicted, strict=True):
        said, references = words_13a(text), [words_13a(one) for one in golds]
        length += len(said)
        wanted += min((abs(len(one) - len(said)), len(one)) for one in references)[1]
        for n in range(ORDERS):
            found[n] += _matches(references, said, n + 1)
            possible[n] += max(len(said) - n, 0)
    if not all(possible) or not any(found):
        return 0.0
    brevity = min(0.0, 1 - wanted / length)
    return 100 * math.exp(brevity + sum(_log_precisions(found, possible)) / ORDERS)


def _log_precisions(found: Sequence[int], possible: Sequence[int]) -> list[float]:
    logs, share = [], 1.0
    for right, all_ in zip(found, possible, strict=True):
        share = share if right else share / 2
        logs.append(math.log((right or share) / all_))
    return logs


def rouge_l(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> float:
    """The mean F1 of the longest common subsequence of words with the best gold (Lin 2004 §3), 0 to 1."""
    best = [max(_subsequence_f1(g, said) for g in golds) for golds, said in zip(gold, predicted, strict=True)]
    return sum(best) / len(best)


def _subsequence_f1(gold: str, said: str) -> float:
    a, b = (re.findall(r"[^\W_]+", text.lower()) for text in (gold, said))
    return 2 * _common(a, b) / (len(a) + len(b)) if a and b else 0.0


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, row by row."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if word == other else max(row[j], row[j + 1])
    return row[-1]
