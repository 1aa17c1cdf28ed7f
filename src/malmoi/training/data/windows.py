"""Language model samples: windows of the token store without replacement, and mixtures of stores.

A mixture maps a sample's number to (source, its sample) in O(1). Samples come in blocks of 1,024.
Weights are integer parts of 2^20, so a cycle of 1,024 blocks holds each source exactly as often as
its weight says; systematic sampling gives each block its quotas, and permutes within it.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.errors import ensure, require_that
from malmoi.training.data.permute import Ints, permutation_key, permute_all, permute_grid
from malmoi.training.data.store import Store


@dataclass(eq=False)
class Windows:
    """Windows of context + 1 tokens (inputs, and labels shifted by one); `len` is an epoch.

    `shuffled` reorders the documents every epoch, so that a window never joins the same ones twice.
    """

    store: Store
    context: int
    seed: int
    _: KW_ONLY
    documents: bool = False
    shuffled: bool = False

    def __post_init__(self) -> None:
        tokens = len(self.store.tokens)
        self.store.ensure(
            tokens > self.context,
            "The text in {folder} has {tokens:,} tokens, fewer than one context of {context:,} "
            "and the token after it: give more text or a shorter context.",
            tokens=tokens,
            context=self.context,
        )
        self.store.ensure(
            not self.documents or self.store.end is not None,
            "{folder} has no end-of-text tokens, so its windows cannot tell documents apart.",
        )
        # One window fewer than fit (if more than one does) leaves room for every shift of the grid.
        self.count = max(1, (tokens - 1) // self.context - 1)
        self._room = min(self.context, tokens - self.count * self.context)
        # a batch lies in one epoch, or in two at their boundary
        self._order = lru_cache(maxsize=2)(self._ordered)

    def __len__(self) -> int:
        return self.count

    def starts(self, indices: ArrayLike) -> NDArray[np.int64]:
        """The first token of each window: permuted per epoch, on a grid that shifts every epoch."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        return permute_grid(numbers, self.count, self.seed, 0, self.context, self._room)

    def batch(self, indices: ArrayLike) -> dict[str, NDArray[np.int64]]:
        """Returns tokens [B, context + 1] and optionally documents, numbered within each window."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        tokens = np.empty((len(numbers), self.context + 1), np.int64)
        starts, epochs = self.starts(numbers).tolist(), (numbers // self.count).tolist()
        for row, start, epoch in zip(tokens, starts, epochs, strict=True):
            if self.shuffled:
                self._fill(row, start, epoch)
            else:
                row[:] = self.store.tokens[start : start + self.context + 1]
        if not self.documents:
            return {"tokens": tokens}
        ends = tokens == self.store.end
        return {"tokens": tokens, "documents": np.cumsum(ends, axis=1) - ends}

    def _fill(self, row: NDArray[np.int64], start: int, epoch: int) -> None:
        """Fills a row with the tokens from `start` on, in this epoch's order of documents."""
        ends, stops = self._order(epoch)
        document = int(np.searchsorted(stops, start, side="right"))
        done = 0
        while done < len(row):
            left = int(stops[document]) - start - done  # tokens of this document not yet used
            end = int(ends[document])
            piece = self.store.tokens[end - left : end][: len(row) - done]
            row[done : done + len(piece)] = piece
            done += len(piece)
            document += 1

    def _ordered(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each document in this epoch's order: its end in the store and in the epoch."""
        count = len(self.store)
        order = permute_all(np.arange(count), count, permutation_key(self.seed, epoch, 6))
        edges = self.store.documents
        return edges[1:][order], np.cumsum(np.diff(edges)[order])


@dataclass(eq=False)
class Stretches:
    """Windows in reading order: each of `rows` rows reads its own stretch of the text.

    Sample i is segment i // rows of stretch i mod rows (Dai et al. 2019 §3.2).
    """

    store: Store
    context: int
    rows: int

    def __post_init__(self) -> None:
        tokens = len(self.store.tokens) - 1
        self.store.ensure(
            tokens >= self.rows * self.context,
            "The text in {folder} has {tokens:,} tokens, too few for {rows} rows with segments of "
            "{context:,}: set a smaller train.batch.",
            tokens=tokens + 1,
            rows=self.rows,
            context=self.context,
        )
        self.stretch = tokens // self.rows
        self.segments = self.stretch // self.context

    def __len__(self) -> int:
        return self.rows * self.segments

    def at(self, first: int, size: int) -> dict[str, NDArray[np.int64]]:
        """Returns tokens [B, context + 1], the first row, and the number of its segment."""
        segment = first // self.rows % self.segments
        row = first % self.rows
        ensure(
            row + size <= self.rows,
            "A batch of {size} rows does not fit into {rows} stretches.",
            size=size,
            rows=self.rows,
        )
        begins = (row + np.arange(size)) * self.stretch + segment * self.context
        tokens = np.stack([self.store.tokens[b : b + self.context + 1] for b in begins.tolist()])
        return {"tokens": tokens.astype(np.int64), "stretch": np.array([row, segment])}


SAMPLES_PER_BLOCK = 1 << 10  # samples per block, and blocks per cycle


class SampleSource(Protocol):
    """Numbered samples: `len` of them make an epoch; any number is valid."""

    def __len__(self) -> int: ...
    def batch(self, indices: ArrayLike) -> dict[str, Any]: ...


class Mixture:
    """One source made of several, drawn in proportion to `weights` (any positive numbers)."""

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float], seed: int = 0):
        require_that(
            len(sources) == len(weights) and all(0 < weight < np.inf for weight in weights),
            "{count} sources need one weight for each, all of them positive, not {weights}.",
            count=len(sources),
            weights=list(weights),
        )
        self.sources = list(sources)
        self.seed = seed
        self.units = _units(np.array(weights, float))
        quotas = _quotas(self.units)
        self._edges = np.pad(np.cumsum(quotas, axis=1), ((0, 0), (1, 0)))
        self._before = np.cumsum(quotas, axis=0) - quotas

    def __len__(self) -> int:
        """An epoch of the mixture: the total number of samples of its sources."""
        return sum(len(source) for source in self.sources)

    def pick(self, indices: ArrayLike) -> tuple[Ints, Ints]:
        """Returns the source of each number, and the sample within that source."""
        numbers = np.array(indices, dtype=np.int64, ndmin=1)
        blocks, places = np.divmod(numbers, SAMPLES_PER_BLOCK)
        chosen = np.empty_like(numbers)
        local = np.empty_like(numbers)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            cycle, row = divmod(block, SAMPLES_PER_BLOCK)
            key = permutation_key(self.seed, block, 4)
            place = permute_all(places[here], SAMPLES_PER_BLOCK, key)
            source = np.searchsorted(self._edges[row], place, side="right") - 1
            chosen[here] = source
            local[here] = cycle * self.units[source] + self._before[row, source]
            local[here] += place - self._edges[row, source]
        return chosen, local

    def batch(self, indices: ArrayLike) -> dict[str, Any]:
        """Returns the samples with these numbers, in order; shorter rows are padded with zeros."""
        chosen, local = self.pick(indices)
        numbers = np.unique(chosen).tolist()
        parts = {n: self.sources[n].batch(local[chosen == n]) for n in numbers}
        merged: dict[str, Any] = {}
        for name in next(iter(parts.values())):
            width = np.max([part[name].shape[1:] for part in parts.values()], axis=0).astype(int)
            merged[name] = np.zeros((len(chosen), *width), np.int64)
            for number, part in parts.items():
                columns = tuple(slice(0, size) for size in part[name].shape[1:])
                merged[name][(chosen == number, *columns)] = part[name]
        return merged


def _units(weights: NDArray[np.float64]) -> Ints:
    """Weights as integer parts of 2^20 by largest remainder, each at least one."""
    exact = weights / weights.sum() * SAMPLES_PER_BLOCK**2
    units: Ints = np.maximum(np.floor(exact).astype(np.int64), 1)
    while units.sum() != SAMPLES_PER_BLOCK**2:
        step = 1 if units.sum() < SAMPLES_PER_BLOCK**2 else -1
        units[np.argmax((exact - units) * step - (units + step < 1) * SAMPLES_PER_BLOCK**2)] += step
    return units


def _quotas(units: Ints) -> Ints:
    """quotas [block, source]: each row adds up to 1,024, each column to its units.

    A block holds the integer part of its share; remainders lie end to end on a line, and block b
    takes those that the points o, o + 1024, … fall into, with o through 0 … 1023 in an even order.
    """
    edges = np.concatenate([[0], np.cumsum(units % SAMPLES_PER_BLOCK)])
    # 633 ≈ 1024 / golden ratio; odd, so every offset occurs once
    offsets = (np.arange(SAMPLES_PER_BLOCK) * 633 % SAMPLES_PER_BLOCK)[:, None]
    points = -(-(edges - offsets) // SAMPLES_PER_BLOCK)
    return units // SAMPLES_PER_BLOCK + np.diff(points, axis=1)
