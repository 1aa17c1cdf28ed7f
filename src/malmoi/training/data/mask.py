"""BERT's masking: 80 % of the predicted tokens become [MASK], 10 % a random token."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError, UsageError
from malmoi.tokenizer import Tokenizer
from malmoi.training.data.permute import Draws

MaskInts = NDArray[np.int64]
Bools = NDArray[np.bool_]
UNMASKED_LABEL = -100  # the label of tokens that are not predicted


@dataclass(frozen=True)
class Masking:
    """How to corrupt tokens: the rates, and properties of the vocabulary.

    `special` marks the special ids, which are never chosen and never inserted. `starts` marks the
    ids that start a word and enables whole-word masking.
    """

    mask_id: int
    special: Bools
    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    starts: Bools | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        whole_word: bool = False,
        rate: float = 0.15,
        mask: float = 0.8,
        random: float = 0.1,
    ) -> "Masking":
        """Masking for this vocabulary; a WordPiece token starts a word unless it begins with ##."""
        if tokenizer.specials.mask is None:
            raise MalmoiError(
                "This tokenizer has no [MASK], which masked training needs: use a WordPiece one."
            )
        if not (0 < rate < 1 and min(mask, random) >= 0 and mask + random <= 1):
            raise UsageError(
                "rate={rate}, mask={mask}, random={random} are not valid shares.",
                rate=rate,
                mask=mask,
                random=random,
            )
        special = np.zeros(tokenizer.vocab_size, bool)
        special[[value for value in vars(tokenizer.specials).values() if value is not None]] = True
        starts = None
        if whole_word:
            starts = np.array(
                [not tokenizer.token(id).startswith("##") for id in range(tokenizer.vocab_size)]
            )
        return cls(tokenizer.specials.mask, special, rate, mask, random, starts)

    @cached_property
    def ordinary(self) -> MaskInts:
        """The ids that may replace a token."""
        return np.flatnonzero(~self.special)

    def slots(self, tokens: int) -> int:
        """The maximum number of predictions among `tokens` maskable tokens of one sequence."""
        return max(1, int(np.rint(self.rate * tokens)))


def mask(tokens: MaskInts, maskable: Bools, rng: Draws, how: Masking) -> tuple[MaskInts, MaskInts]:
    """Returns corrupted tokens [..., T], and labels that are -100 wherever nothing is predicted.

    round(rate × maskable) tokens of each sequence are chosen, at least one: an exact number, as in
    google's code.
    """
    shape = tokens.shape
    flat = tokens.reshape(-1, shape[-1])
    maskable = maskable.reshape(flat.shape)
    count = _counts(maskable, how.rate)
    if how.starts is None:
        chosen = _tokens(maskable, count, rng)
    else:
        chosen = _words(maskable, how.starts[flat], count, rng)
    labels = np.where(chosen, flat, UNMASKED_LABEL)
    return _corrupt(flat, chosen, rng, how).reshape(shape), labels.reshape(shape)


def _counts(maskable: Bools, rate: float) -> MaskInts:
    total = maskable.sum(axis=1)
    counts: MaskInts = np.minimum(np.maximum(np.rint(rate * total).astype(np.int64), 1), total)
    return counts


def _tokens(maskable: Bools, count: MaskInts, rng: Draws) -> Bools:
    """Chooses the `count` maskable tokens of each row with the smallest random numbers."""
    scores = np.where(maskable, rng.random(maskable.shape), 2.0)
    order = np.argsort(scores, axis=1)
    chosen = np.zeros_like(maskable)
    np.put_along_axis(chosen, order, np.arange(maskable.shape[1]) < count[:, None], axis=1)
    return chosen


def _words(maskable: Bools, starts: Bools, count: MaskInts, rng: Draws) -> Bools:
    """Chooses whole words in random order, each if it still fits, like google's whole-word masking.

    W is the largest number of words in a row. The greedy choice runs in rounds over all rows: take
    the words before the first that does not fit, drop that one.
    """
    heads = maskable & (starts | ~np.roll(maskable, 1, axis=1))
    word = np.cumsum(heads, axis=1) - 1
    rows = np.broadcast_to(np.arange(len(word))[:, None], word.shape)
    sizes = np.zeros(word.shape, np.int64)
    np.add.at(sizes, (rows[maskable], word[maskable]), 1)
    order = np.argsort(np.where(sizes > 0, rng.random(sizes.shape), 2.0), axis=1)
    taken = _greedy(np.take_along_axis(sizes, order, axis=1), count)
    kept = np.zeros_like(maskable)
    np.put_along_axis(kept, order, taken, axis=1)
    chosen = maskable & np.take_along_axis(kept, np.maximum(word, 0), axis=1)
    # a part of the first word, in rows whose every word exceeds the limit
    first = maskable & (word == order[:, :1])
    chosen |= first & (np.cumsum(first, axis=1) <= (count * ~chosen.any(axis=1))[:, None])
    return chosen


def _greedy(sizes: MaskInts, count: MaskInts) -> Bools:
    """The words that fit into `count` tokens in this order, skipping those that do not."""
    left = count.copy()
    taken = np.zeros(sizes.shape, bool)
    open_ = (sizes > 0) & (sizes <= left[:, None])
    while open_.any():
        fits = open_ & (np.cumsum(sizes * open_, axis=1) <= left[:, None])
        taken |= fits
        left -= (sizes * fits).sum(axis=1)
        open_ &= ~fits & (sizes <= left[:, None])
    return taken


def _corrupt(tokens: MaskInts, chosen: Bools, rng: Draws, how: Masking) -> MaskInts:
    dice = rng.random(tokens.shape)
    other = how.ordinary[(rng.random(tokens.shape) * len(how.ordinary)).astype(np.int64)]
    corrupted = np.where(chosen & (dice < how.mask), how.mask_id, tokens)
    replaced = chosen & (dice >= how.mask) & (dice < how.mask + how.random)
    return np.where(replaced, other, corrupted)
