"""Samples of translations: batches for an encoder and a decoder, and rows for an MLM (TLM).

Batches are made by their number of tokens, each of pairs of similar length: an epoch sorts its
pairs by length, shuffled among equals, and cuts them into units of at most `length` tokens a side.
Batches are runs of `group` units, in random order. A unit is a pure function of its number, as
every sample is. B pairs, S source tokens, T target tokens.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.errors import MalmoiError
from malmoi.tokenizer.core import Specials
from malmoi.training.data.loader import IGNORE_LABEL, WIDTH_MULTIPLE, ArrayBatch, round_up
from malmoi.training.data.pairs import frame_of
from malmoi.training.data.permute import Draws, permutation_key, permute_all, permute_epochs
from malmoi.training.data.store import Store

PairIndex = NDArray[np.int64]


def pair_sides(store: Store) -> PairIndex:
    """Where each pair's source starts, its target starts, and it ends: [N, 3]."""
    starts = store.sentences
    if starts is None or len(starts) != 2 * len(store.documents) - 1:
        raise MalmoiError(
            "{folder} does not hold sentence pairs; remove it to rebuild it.", folder=store.folder
        )
    return np.stack((starts[:-1:2], starts[1::2], starts[2::2]), 1)


@dataclass(eq=False)
class PairUnits:
    """The pairs of a store in units of up to `length` padded tokens on the longer side."""

    store: Store
    length: int
    group: int  # units that follow one another in the order of lengths
    seed: int

    def __post_init__(self) -> None:
        sides = pair_sides(self.store)
        lengths = np.diff(sides).max(1, initial=0)
        # pairs that are longer than a unit are left out
        self.sides = sides[lengths < self.length]
        self.left_out = len(sides) - len(self.sides)
        if not len(self.sides):
            raise MalmoiError(
                "{folder} has no pair of at most {length} tokens per side.",
                folder=self.store.folder,
                length=self.length,
            )
        # tokens of each pair's longer side, with the end
        self._longest: PairIndex = np.diff(self.sides).max(1) + 1
        self._cuts = self._unit_starts()

    def __len__(self) -> int:
        return -(-len(self._cuts) // self.group) * self.group

    def _unit_starts(self) -> PairIndex:
        """Where units start in the order of lengths: as many pairs as fit, at least one."""
        widths = np.sort(self._longest)
        cuts = []
        start = 0
        while start < len(widths):
            cuts.append(start)
            # widths grow: the n-th pair from here makes n × its own width
            fits = widths[start : start + self.length] * np.arange(
                1, 1 + min(self.length, len(widths) - start)
            )
            start += max(1, int(np.searchsorted(fits, self.length, side="right")))
        return np.array(cuts)

    @lru_cache(maxsize=2)  # noqa: B019  # one for each phase of a run, as long as the run
    def _order(self, epoch: int) -> PairIndex:
        """The pairs of an epoch by length, shuffled among equals."""
        count = len(self._longest)
        draws = Draws(permutation_key(self.seed, epoch, 8), np.arange(count)).random((count, 1))
        return np.lexsort((draws[:, 0], self._longest))

    def pairs(self, first: int, size: int) -> PairIndex:
        """The numbers of the pairs in `size` units from unit `first` on."""
        return np.concatenate([self._unit(number) for number in range(first, first + size)])

    def _unit(self, number: int) -> PairIndex:
        epoch, place = divmod(number, len(self))
        batch, within = divmod(place, self.group)
        batches = len(self) // self.group
        batch = int(permute_all([batch], batches, permutation_key(self.seed, epoch, 9))[0])
        unit = (batch * self.group + within) % len(self._cuts)
        start = self._cuts[unit]
        stop = self._cuts[unit + 1] if unit + 1 < len(self._cuts) else None
        return self._order(epoch)[start:stop]


@dataclass(frozen=True)
class TranslationBatches:
    """source [B, S] and tokens [B, T], padded: the target starts with the end token (`end`)."""

    units: PairUnits
    end: int
    pad: int

    def at(self, first: int, size: int) -> ArrayBatch:
        start, middle, stop = self.units.sides[self.units.pairs(first, size)].T
        source, source_keep = self._ended(start, middle - start, self.pad)
        labels, _ = self._ended(middle, stop - middle, IGNORE_LABEL)
        shifted = np.roll(labels, 1, axis=1)
        shifted[:, 0] = self.end
        # the end follows its last label, and padding needs no mask: no token sees a later one
        past = np.arange(labels.shape[1]) > (stop - middle)[:, None]
        return {
            "source": source,
            "source_keep": source_keep,
            "tokens": np.where(past, self.pad, shifted),
            "lm_labels": labels,
        }

    def _ended(
        self, starts: PairIndex, lengths: PairIndex, fill: int
    ) -> tuple[PairIndex, NDArray[np.bool_]]:
        """Spans of the store with the end after each, and which places hold a token."""
        places = np.arange(round_up(int(lengths.max()) + 1, WIDTH_MULTIPLE))
        tokens = self.units.store.tokens
        found = tokens[np.minimum(starts[:, None] + places, len(tokens) - 1)].astype(np.int64)
        found = np.where(places == lengths[:, None], self.end, found)
        keep = places <= lengths[:, None]
        return np.where(keep, found, fill), keep


@dataclass(eq=False)
class LanguageRows:
    """Rows for a masked language model of two languages (Lample & Conneau 2019 §3).

    A share of the rows is a pair, [CLS] A [SEP] [CLS] B [SEP], whose masks can be filled from the
    other language (TLM); the others are one of its sides (MLM). Segments are the languages, and
    positions start again with B.
    """

    store: Store
    context: int
    seed: int
    specials: Specials
    together: float  # share of the pairs

    def __post_init__(self) -> None:
        self.sides = pair_sides(self.store)
        if not len(self):
            raise MalmoiError("{folder} has no sentence pairs.", folder=self.store.folder)

    def __len__(self) -> int:
        return len(self.sides)

    def batch(self, indices: ArrayLike) -> dict[str, PairIndex]:
        """Returns tokens, segments and positions [B, T], lengths [B], and labels [B] of no use."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        both, side = Draws(permutation_key(self.seed, 10), numbers).random((len(numbers), 2)).T
        pair = both < self.together
        pairs = self.sides[permute_epochs(numbers, len(self), self.seed, 11)]
        room = np.where(pair, self.context // 2, self.context)[:, None] - 2
        framed = np.minimum(np.diff(pairs), room) + 2  # tokens of each side with [CLS] and [SEP]
        shown = np.stack((pair | (side < 0.5), pair | (side >= 0.5)), 1)
        first, second = (framed * shown).T
        return self._assemble(pairs, first, second)

    def _assemble(
        self, pairs: PairIndex, first: PairIndex, second: PairIndex
    ) -> dict[str, PairIndex]:
        """Rows of sides with these many tokens, their frames included; 0: the side is not there."""
        cls, sep = frame_of(self.specials)
        places = np.arange(int((first + second).max()))
        other = places >= first[:, None]
        positions = places - np.where(other, first[:, None], 0)
        starts = np.where(other, pairs[:, 1:2], pairs[:, :1])
        text = np.minimum(starts + np.maximum(positions - 1, 0), len(self.store.tokens) - 1)
        tokens = self.store.tokens[text].astype(np.int64)
        last = np.where(other, second[:, None], first[:, None]) - 1
        tokens = np.where(positions == last, sep, np.where(positions == 0, cls, tokens))
        keep = places < (first + second)[:, None]
        return {
            "tokens": np.where(keep, tokens, 0),
            "segments": (other & keep).astype(np.int64),
            "positions": np.where(keep, positions, 0),
            "lengths": first + second,
            "labels": np.zeros(len(pairs), np.int64),
        }
