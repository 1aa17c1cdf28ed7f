"""A first accuracy within a second: naive Bayes on the tokens of a text, without their order.

It is also the baseline that a network should beat: what the words alone tell.
"""

import random
from collections.abc import Sequence

import numpy as np

from malmoi.evaluation.task import Example
from malmoi.tokenizer import Tokenizer

MAX_TRAINING_ROWS = 20_000
MAX_JUDGED_ROWS = 2_000


def word_baseline(
    train: Sequence[Example],
    judged: Sequence[Example],
    labels: Sequence[str],
    tokenizer: Tokenizer,
) -> float:
    """The accuracy of multinomial naive Bayes on which tokens occur, with Laplace's smoothing."""
    train = _sample(train, MAX_TRAINING_ROWS)
    judged = _sample(judged, MAX_JUDGED_ROWS)
    place = {name: i for i, name in enumerate(labels)}
    counts = np.ones((len(labels), tokenizer.vocab_size))
    rows = np.ones(len(labels))
    for row, tokens in zip(train, _tokens(train, tokenizer), strict=True):
        counts[place[row.label], tokens] += 1
        rows[place[row.label]] += 1
    logs = np.log(counts) - np.log(counts.sum(1, keepdims=True))
    prior = np.log(rows / rows.sum())
    said = [(prior + logs[:, tokens].sum(1)).argmax() for tokens in _tokens(judged, tokenizer)]
    right = sum(labels[i] == row.label for i, row in zip(said, judged, strict=True))
    return float(right / len(judged))


def _sample(rows: Sequence[Example], most: int) -> Sequence[Example]:
    return rows if len(rows) <= most else random.Random(0).sample(rows, most)


def _tokens(rows: Sequence[Example], tokenizer: Tokenizer) -> list[list[int]]:
    """The distinct tokens of each row's texts."""
    texts = [row.text if row.pair is None else f"{row.text} {row.pair}" for row in rows]
    return [sorted(set(tokens)) for tokens in tokenizer.ids(texts)]
