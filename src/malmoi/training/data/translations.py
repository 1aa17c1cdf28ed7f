"""Samples of translations: batches for an encoder and a decoder, and rows for an MLM (TLM).

Batches are made by their number of tokens, each of pairs of similar length: an epoch sorts its
pairs by length, shuffled among equals, and cuts them into units of at most `length` tokens a side.
Batches are runs of `group` units, in random order. A unit is a pure function of its number, as
every sample is. B pairs, S source tokens, T target tokens.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.errors import MalmoiError
from malmoi.training.data.loader import WIDTH_MULTIPLE, ArrayBatch
from malmoi.training.data.mask import UNMASKED_LABEL
from malmoi.training.data.pairs import HasSpecials, frame_of
from malmoi.training.data.permute import Draws, permutation_key, permute_all
from malmoi.training.data.store import Store

PairIndex = NDArray[np.int64]


def pair_sides(store: Store) -> PairIndex:
    """Where each pair's source starts, its target starts, and it ends: [N, 3]."""
    starts = store.sentences
    if starts is None or len(starts) != 2 * len(store.documents) - 1:
        raise MalmoiError(
            f"{store.folder} does not hold pairs of two sides; remove it to build it anew."
        )
    return np.stack((starts[:-1:2], starts[1::2], starts[2::2]), 1)


@dataclass(frozen=True, eq=False)
class PairUnits:
    """The pairs of a store in units of up to `length` padded tokens on the longer side."""

    store: Store
    length: int
    group: int  # units that follow one another in the order of lengths
    seed: int

    def __post_init__(self) -> None:
        if not len(self.sides):
            raise MalmoiError(
                f"{self.store.folder} has no pair of up to {self.length} tokens a side to make "
                "samples of."
            )

    def __len__(self) -> int:
        return -(-len(self._cuts) // self.group) * self.group

    @cached_property
    def sides(self) -> PairIndex:
        """Where each pair's source starts, its target starts, and it ends: [N, 3].

        Pairs that are longer than a unit are left out.
        """
        sides = self._all_sides
        short: PairIndex = sides[np.diff(sides).max(1, initial=0) < self.length]
        return short

    @property
    def left_out(self) -> int:
        """Pairs that are too long."""
        return len(self._all_sides) - len(self.sides)

    @cached_property
    def _all_sides(self) -> PairIndex:
        return pair_sides(self.store)

    @cached_property
    def _longest(self) -> PairIndex:
        """Tokens of each pair's longer side, with the end."""
        longer: PairIndex = np.diff(self.sides).max(1) + 1
        return longer

    @cached_property
    def _cuts(self) -> PairIndex:
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
        sides = self.units.sides[self.units.pairs(first, size)]
        tokens = self.units.store.tokens
        sources = [tokens[a:b] for a, b, _ in sides.tolist()]
        targets = [tokens[b:c] for _, b, c in sides.tolist()]
        source, source_keep = padded([[*text, self.end] for text in sources], self.pad)
        shifted, _ = padded([[self.end, *text] for text in targets], self.pad)
        labels, _ = padded([[*text, self.end] for text in targets], UNMASKED_LABEL)
        return {
            "source": source,
            "source_keep": source_keep,
            "tokens": shifted,  # its padding needs no mask: it is after all that see no later one
            "lm_labels": labels,
        }


def padded(rows: list[list[int]], fill: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Rows in one array, as wide as the longest rounded up, and which places hold a token."""
    width = -(-max(map(len, rows)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    filled = np.full((len(rows), width), fill, np.int64)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    lengths = np.array([len(values) for values in rows])
    return filled, np.arange(width) < lengths[:, None]


@dataclass(frozen=True, eq=False)
class LanguageRows:
    """Rows for a masked language model of two languages (Lample & Conneau 2019 §3).

    A share of the rows is a pair, [CLS] A [SEP] [CLS] B [SEP], whose masks can be filled from the
    other language (TLM); the others are one of its sides (MLM). Segments are the languages, and
    positions start again with B.
    """

    store: Store
    context: int
    seed: int
    specials: HasSpecials
    together: float  # share of the pairs

    def __post_init__(self) -> None:
        if not len(self):
            raise MalmoiError(f"{self.store.folder} has no pair to make samples of.")

    def __len__(self) -> int:
        return len(self.sides)

    @cached_property
    def sides(self) -> PairIndex:
        return pair_sides(self.store)

    def batch(self, indices: ArrayLike) -> dict[str, PairIndex]:
        """Returns tokens, segments and positions [B, T], lengths [B], and labels [B] of no use."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        draws = Draws(permutation_key(self.seed, 10), numbers).random((len(numbers), 2))
        rows = [self._row(int(n), *draw) for n, draw in zip(numbers, draws, strict=True)]
        lengths = np.array([sum(map(len, row.values())) for row in rows])
        shape = (len(rows), int(lengths.max()))
        tokens, segments, positions = (np.zeros(shape, np.int64) for _ in range(3))
        for i, row in enumerate(rows):
            tokens[i, : lengths[i]] = np.concatenate(list(row.values()))
            segments[i, : lengths[i]] = np.repeat(list(row), [len(side) for side in row.values()])
            positions[i, : lengths[i]] = np.concatenate([np.arange(len(s)) for s in row.values()])
        labels = np.zeros(len(rows), np.int64)
        return dict(
            tokens=tokens, segments=segments, positions=positions, lengths=lengths, labels=labels
        )

    def _row(self, number: int, both: float, side: float) -> dict[int, list[int]]:
        """The framed sides of a row, by language."""
        epoch, place = divmod(number, len(self))
        pair = int(permute_all([place], len(self), permutation_key(self.seed, epoch, 11))[0])
        start, middle, end = self.sides[pair].tolist()
        cls, sep = frame_of(self.specials)
        languages = (0, 1) if both < self.together else (int(side >= 0.5),)
        room = self.context // len(languages) - 2
        texts = (self.store.tokens[start:middle], self.store.tokens[middle:end])
        return {one: [cls, *texts[one][:room].tolist(), sep] for one in languages}
