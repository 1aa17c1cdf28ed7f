"""Step 3, quality: GPT-3's classifier of good text against raw text (Brown et al. 2020, appendix A)."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.grams import words
from malmoi.corpus.read import Document
from malmoi.corpus.tally import Tally
from malmoi.errors import UsageError

BITS = 18  # features: 2^18
EPOCHS = 5
RATE = 0.5  # of AdaGrad
LOOK = 1 << 16  # characters of a document that are judged
Features = tuple[NDArray[np.int64], NDArray[np.float64]]


def features(text: str) -> Features:
    """Hashed words: which are there, and 1 + log of how often, at length 1."""
    found, counts = np.unique(words(text[:LOOK]).hashes >> np.uint64(64 - BITS), return_counts=True)
    values = 1 + np.log(counts)
    return found.astype(np.int64), values / max(float(np.sqrt((values**2).sum())), 1.0)


@dataclass(frozen=True)
class Scorer:
    """A logistic regression; the last weight is the bias."""

    weights: NDArray[np.float64]

    def __call__(self, text: str) -> float:
        """How likely the text is one of the good ones."""
        return _chance(self.weights, features(text))

    @classmethod
    def learn(cls, good: Sequence[str], raw: Sequence[str], seed: int = 0) -> "Scorer":
        """As many good as raw texts, in random order, several times; AdaGrad (Duchi et al. 2011)."""
        number = min(len(good), len(raw))
        if number < 2:
            raise UsageError(
                f"The quality classifier needs good and raw documents; there are {len(good)} and {len(raw)}."
            )
        rows = [(features(text), label) for label, texts in ((1, good), (0, raw)) for text in even(texts, number)]
        weights, seen = np.zeros(2**BITS + 1), np.full(2**BITS + 1, 1e-8)
        random = np.random.default_rng(seed)
        for _ in range(EPOCHS):
            for place in random.permutation(len(rows)):
                _step(weights, seen, *rows[place])
        return cls(weights)

    @classmethod
    def load(cls, path: Path) -> "Scorer":
        return cls(np.load(path))


def _chance(weights: NDArray[np.float64], row: Features) -> float:
    return float(1 / (1 + np.exp(-(weights[row[0]] @ row[1] + weights[-1]))))


def _step(weights: NDArray[np.float64], seen: NDArray[np.float64], row: Features, label: int) -> None:
    at, values = np.append(row[0], 2**BITS), np.append(row[1], 1.0)
    slope = (_chance(weights, row) - label) * values
    seen[at] += slope**2
    weights[at] -= RATE * slope / np.sqrt(seen[at])


def even(texts: Sequence[str], number: int) -> list[str]:
    """So many of the texts, at even distances."""
    return [texts[len(texts) * place // number] for place in range(number)]


def some(documents: Iterable[Document], total: int, number: int) -> list[str]:
    """Every so manieth of `total` documents, so that about `number` are taken."""
    return [document.text for document in islice(documents, 0, None, max(total // number, 1))][:number]


def rated(documents: Iterable[Document], scorer: Scorer, pareto: float, seed: int, tally: Tally) -> Iterator[Document]:
    """Documents that are good, and now and then one that is not: it stays if pareto(9) > 1 − score."""
    for document in documents:
        tally.came(document)
        if draw(document.text, pareto, seed) > 1 - scorer(document.text):
            yield tally.kept(document)
        else:
            tally.said("quality", document)


def draw(text: str, pareto: float, seed: int) -> float:
    """A number as numpy's pareto draws them (Lomax), decided by the seed and the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=str(seed).encode()).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / 2.0**64
    return float(uniform ** (-1 / pareto) - 1)
