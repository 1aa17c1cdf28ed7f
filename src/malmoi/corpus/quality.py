"""Step 3, quality: GPT-3's classifier of good against raw text (Brown et al. 2020, appendix A)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import Reasons
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import HashedTexts, hash_words, seeded_hash
from malmoi.errors import require_that

FEATURE_BITS = 18  # 2^18 features
TRAINING_EPOCHS = 5
LEARNING_RATE = 0.5  # of AdaGrad
MAX_RATED_CHARACTERS = 1 << 16  # characters of a document that are scored
HashedFeatures = tuple[NDArray[np.int64], NDArray[np.float64]]


def hashed_features(text: str) -> HashedFeatures:
    """Hashed words with 1 + log of their counts, normalised to length 1."""
    hashes = hash_words(text[:MAX_RATED_CHARACTERS]).hashes >> np.uint64(64 - FEATURE_BITS)
    found, counts = np.unique(hashes, return_counts=True)
    values = 1 + np.log(counts)
    return found.astype(np.int64), values / max(float(np.sqrt((values**2).sum())), 1.0)


@dataclass(frozen=True)
class QualityScorer:
    """A logistic regression; the last weight is the bias."""

    weights: NDArray[np.float64]

    def __call__(self, text: str) -> float:
        return _chance(self.weights, hashed_features(text))

    @classmethod
    def fit(cls, good: Sequence[str], raw: Sequence[str], seed: int = 0) -> "QualityScorer":
        """Trains on equally many good and raw texts with AdaGrad (Duchi et al. 2011)."""
        number = min(len(good), len(raw))
        require_that(
            number >= 2,
            "The quality classifier needs good and raw documents; there are {good} and {raw}.",
            good=len(good),
            raw=len(raw),
        )
        rows = [
            (hashed_features(text), label)
            for label, texts in ((1, good), (0, raw))
            for text in (texts[len(texts) * place // number] for place in range(number))
        ]
        weights = np.zeros(2**FEATURE_BITS + 1)
        seen = np.full(2**FEATURE_BITS + 1, 1e-8)
        random = np.random.default_rng(seed)
        for _ in range(TRAINING_EPOCHS):
            for place in random.permutation(len(rows)):
                _step(weights, seen, *rows[place])
        return cls(weights)


def _chance(weights: NDArray[np.float64], row: HashedFeatures) -> float:
    return float(1 / (1 + np.exp(-(weights[row[0]] @ row[1] + weights[-1]))))


def _step(
    weights: NDArray[np.float64], seen: NDArray[np.float64], row: HashedFeatures, label: int
) -> None:
    at = np.append(row[0], 2**FEATURE_BITS)
    slope = (_chance(weights, row) - label) * np.append(row[1], 1.0)
    seen[at] += slope**2
    weights[at] -= LEARNING_RATE * slope / np.sqrt(seen[at])


def sample_texts(texts: Iterable[str], total: int, number: int) -> list[str]:
    """About `number` of `total` texts, evenly spaced."""
    return list(islice(islice(texts, 0, None, max(total // number, 1)), number))


def low_quality(texts: HashedTexts, scorer: QualityScorer, config: CorpusConfig) -> Reasons:
    """Keeps good texts, and some others: those with pareto(9) > 1 − score; "quality": dropped."""
    draws = (pareto_draw(text, config.pareto, config.seed) for text in texts.texts)
    found = zip(draws, map(scorer, texts.texts), strict=True)
    return np.array(["" if draw > 1 - score else "quality" for draw, score in found], object)


def pareto_draw(text: str, pareto: float, seed: int) -> float:
    """A Pareto (Lomax) number like numpy's, determined by the seed and the text alone."""
    uniform = (seeded_hash(text, seed) + 1) / 2.0**64
    return float(uniform ** (-1 / pareto) - 1)
