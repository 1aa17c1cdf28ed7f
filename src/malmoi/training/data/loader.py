"""Batches by number: the samples from number n on are a pure function of n.

B sequences, T tokens of the longest (rounded up), N tokens when packed, M predicted slots.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError, required
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import pad_to_width
from malmoi.training.data.permute import Draws, Ints, permutation_key
from malmoi.training.data.windows import SampleSource
from malmoi.training.recipe import DataConfig

Bools = NDArray[np.bool_]
IGNORE_LABEL = -100  # of what is not predicted, in every loss


@dataclass(frozen=True)
class Masking:
    """How to corrupt tokens: the shares of the recipe, and properties of the vocabulary.

    `special` ids are never chosen and never inserted; `starts` marks ids that start a word.
    """

    mask_id: int
    special: Bools
    data: DataConfig
    starts: Bools | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, data: DataConfig) -> "Masking":
        """Masking for this vocabulary; a WordPiece token starts a word unless it begins with ##."""
        mask_id = required(
            tokenizer.specials.mask,
            "This tokenizer has no [MASK] to train with: use a WordPiece one.",
            raises=MalmoiError,
        )
        special = np.zeros(tokenizer.vocab_size, bool)
        special[[value for value in vars(tokenizer.specials).values() if value is not None]] = True
        starts = None
        if data.whole_word:
            words = [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
            starts = np.array([not word.startswith("##") for word in words])
        return cls(mask_id, special, data, starts)

    @cached_property
    def ordinary(self) -> Ints:
        """The ids that may replace a token."""
        return np.flatnonzero(~self.special)

    def slots(self, tokens: int) -> int:
        """The maximum number of predictions among `tokens` maskable tokens of one sequence."""
        return max(1, int(np.rint(self.data.mask_rate * tokens)))


def mask(tokens: Ints, maskable: Bools, rng: Draws, how: Masking) -> tuple[Ints, Ints]:
    """Returns corrupted tokens [..., T], and labels that are -100 wherever nothing is predicted.

    An exact number of tokens is chosen in each sequence, at least one, as in google's code.
    """
    shape = tokens.shape
    flat = tokens.reshape(-1, shape[-1])
    maskable = maskable.reshape(flat.shape)
    total = maskable.sum(axis=1)
    count = np.minimum(np.maximum(np.rint(how.data.mask_rate * total).astype(np.int64), 1), total)
    if how.starts is None:
        chosen = _tokens(maskable, count, rng)
    else:
        chosen = _words(maskable, how.starts[flat], count, rng)
    labels = np.where(chosen, flat, IGNORE_LABEL)
    dice = rng.random(flat.shape)
    other = how.ordinary[(rng.random(flat.shape) * len(how.ordinary)).astype(np.int64)]
    corrupted = np.where(chosen & (dice < how.data.mask_token), how.mask_id, flat)
    random_below = how.data.mask_token + how.data.mask_random
    replaced = chosen & (dice >= how.data.mask_token) & (dice < random_below)
    return np.where(replaced, other, corrupted).reshape(shape), labels.reshape(shape)


def _tokens(maskable: Bools, count: Ints, rng: Draws) -> Bools:
    """Chooses the `count` maskable tokens of each row with the smallest random numbers."""
    order = np.argsort(np.where(maskable, rng.random(maskable.shape), 2.0), axis=1)
    chosen = np.zeros_like(maskable)
    np.put_along_axis(chosen, order, np.arange(maskable.shape[1]) < count[:, None], axis=1)
    return chosen


def _words(maskable: Bools, starts: Bools, count: Ints, rng: Draws) -> Bools:
    """Chooses whole words in random order, each if it still fits, like google's whole-word masking.

    The greedy choice takes, over all rows, the words before the first that does not fit, drops
    that.
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


def _greedy(sizes: Ints, count: Ints) -> Bools:
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


ArrayBatch = dict[str, NDArray[Any]]
WIDTH_MULTIPLE = 8  # T is a multiple of this: the tensor cores' tile
PACKED_MULTIPLE = 128  # N is a multiple of this; at most this much padding ends a packed batch


@dataclass(frozen=True)
class LMBatches:
    """tokens [B, context + 1], and documents if the windows provide them."""

    source: SampleSource

    def at(self, first: int, size: int) -> ArrayBatch:
        """Returns the batch of `size` samples starting at `first`."""
        return self.source.batch(first + np.arange(size))


@dataclass(frozen=True)
class BertBatches:
    """Masked samples: padded to the longest, or packed one after another without padding."""

    source: SampleSource
    masking: Masking
    pad: int
    seed: int
    packed: bool = False
    own_masks: float = 0.0  # the share that the network fills where a generator fills the others

    def at(self, first: int, size: int) -> ArrayBatch:
        """Returns the batch of `size` samples starting at `first`."""
        indices = first + np.arange(size)
        samples = self.source.batch(indices)
        keep = np.arange(samples["tokens"].shape[1]) < samples["lengths"][:, None]
        tokens = np.where(keep, samples["tokens"], self.pad)
        maskable = keep & ~self.masking.special[tokens]
        draws = Draws(permutation_key(self.seed, 5), indices)
        corrupted, labels = mask(tokens, maskable, draws, self.masking)
        form = self._packed if self.packed else self._padded
        if self.own_masks:
            samples["own"] = draws.random(labels.shape) < self.own_masks
        batch = {**form(corrupted, labels, keep, samples), "nsp_labels": samples["labels"]}
        if self.own_masks:
            own = batch.pop("own").reshape(-1)[batch["mlm_slots"]]
            batch["own_labels"] = np.where(own, batch["mlm_labels"], IGNORE_LABEL)
        return batch

    def _padded(
        self, tokens: NDArray[Any], labels: NDArray[Any], keep: NDArray[Any], samples: ArrayBatch
    ) -> ArrayBatch:
        width = round_up(tokens.shape[1], WIDTH_MULTIPLE)
        labels = _widen(labels, width, IGNORE_LABEL)
        limit = len(tokens) * self.masking.slots(width - 2)
        # pairs have positions that restart in the second language
        others = ("segments", "positions", "own")
        return {
            **{name: _widen(samples[name], width, 0) for name in others if name in samples},
            "tokens": _widen(tokens, width, self.pad),
            "keep": _widen(keep, width, 0),
            **_slots(labels.reshape(-1), limit),
        }

    def _packed(
        self, tokens: NDArray[Any], labels: NDArray[Any], keep: NDArray[Any], samples: ArrayBatch
    ) -> ArrayBatch:
        bounds = np.concatenate([[0], np.cumsum(samples["lengths"])])
        size = round_up(int(bounds[-1]), PACKED_MULTIPLE)
        rows = np.broadcast_to(np.arange(len(tokens))[:, None], tokens.shape)
        counted = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        places = samples.get("positions", counted)
        limit = int(self.masking.data.mask_rate * (size - 2 * len(tokens))) + len(tokens)
        predicted = _tail(labels[keep], size, IGNORE_LABEL)[0]
        own = {"own": _tail(samples["own"][keep], size, 0)} if "own" in samples else {}
        return {
            **own,
            "tokens": _tail(tokens[keep], size, self.pad),
            "segments": _tail(samples["segments"][keep], size, 0),
            "positions": _tail(places[keep], size, 0),
            "documents": _tail(rows[keep], size, len(tokens)),
            "firsts": bounds[:-1],
            "bounds": np.append(bounds, size).astype(np.int32),
            **_slots(predicted, round_up(max(limit, 1), WIDTH_MULTIPLE)),
        }


@dataclass(frozen=True)
class MaskedWindows:
    """Windows cut into `parts` rows, each masked token predicted from the position *before* it.

    So a model that reads both ways has one head for both (Charpentier & Samuel 2024 §2.1).
    """

    source: SampleSource
    masking: Masking
    seed: int
    parts: int = 1

    def at(self, first: int, size: int) -> ArrayBatch:
        windows = {
            name: rows[:, :-1].reshape(size * self.parts, -1)
            for name, rows in self.source.batch(first + np.arange(size)).items()
        }
        tokens = windows["tokens"]
        indices = first * self.parts + np.arange(len(tokens))
        maskable = ~self.masking.special[tokens]
        maskable[:, 0] = False  # no position precedes it
        draws = Draws(permutation_key(self.seed, 7), indices)
        corrupted, labels = mask(tokens, maskable, draws, self.masking)
        before = np.full_like(labels, IGNORE_LABEL)
        before[:, :-1] = labels[:, 1:]
        limit = len(tokens) * self.masking.slots(tokens.shape[1] - 1)
        return {**windows, "tokens": corrupted, **_slots(before.reshape(-1), limit)}


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _widen(rows: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    """Pads rows [B, T] to [B, width]."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)


def _tail(flat: NDArray[Any], size: int, fill: int) -> NDArray[Any]:
    """Pads a packed array to [1, size]."""
    return np.pad(flat, (0, size - len(flat)), constant_values=fill)[None]


def _slots(labels: NDArray[Any], limit: int) -> ArrayBatch:
    """Positions and labels of predictions, padded to `limit` (slot 0, label -100)."""
    found = np.flatnonzero(labels != IGNORE_LABEL)
    wanted = _tail(labels[found], limit, IGNORE_LABEL)
    return {"mlm_slots": _tail(found, limit, 0)[0], "mlm_labels": wanted[0]}


def padded(rows: list[list[int]], fill: int) -> NDArray[np.int64]:
    """Rows in one array, as wide as the longest rounded up."""
    return pad_to_width(rows, round_up(max(map(len, rows)), WIDTH_MULTIPLE), fill)
