"""Several sources in fixed proportions: sample number → (source, its sample), in O(1).

Samples come in blocks of 1,024. Weights are integer parts of 2^20, so a cycle of 1,024 blocks holds
each source exactly as often as its weight says; within a cycle, systematic sampling gives each
block its quotas; within a block the order is permuted. Each source is read in its own order,
without replacement within its epochs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.errors import UsageError
from malmoi.training.data.permute import permutation_key, permute_all

SAMPLES_PER_BLOCK = 1 << 10  # samples per block, and blocks per cycle
MixtureInts = NDArray[np.int64]


class SampleSource(Protocol):
    """Numbered samples: `len` of them make an epoch; any number is valid."""

    def __len__(self) -> int: ...
    def batch(self, indices: ArrayLike) -> dict[str, Any]: ...


class Mixture:
    """One source made of several, drawn in proportion to `weights` (any positive numbers)."""

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float], seed: int = 0):
        if len(sources) != len(weights) or not sources:
            raise UsageError(
                "A mixture needs one weight for each source: {sources} and {weights} were given.",
                sources=len(sources),
                weights=len(weights),
            )
        if not all(0 < weight < float("inf") for weight in weights):
            raise UsageError(
                "The weights {weights} of a mixture must all be positive numbers.",
                weights=list(weights),
            )
        self.sources = list(sources)
        self.seed = seed
        self.units = _units(np.array(weights, float))
        quotas = _quotas(self.units)
        self._edges = np.concatenate(
            [np.zeros((SAMPLES_PER_BLOCK, 1), np.int64), np.cumsum(quotas, axis=1)], axis=1
        )
        self._before = np.cumsum(quotas, axis=0) - quotas

    def __len__(self) -> int:
        """An epoch of the mixture: the total number of samples of its sources."""
        return sum(len(source) for source in self.sources)

    def pick(self, indices: ArrayLike) -> tuple[MixtureInts, MixtureInts]:
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


def _units(weights: NDArray[np.float64]) -> MixtureInts:
    """Weights as integer parts of 2^20 by largest remainder, each at least one."""
    exact = weights / weights.sum() * SAMPLES_PER_BLOCK**2
    units: MixtureInts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while units.sum() != SAMPLES_PER_BLOCK**2:
        step = 1 if units.sum() < SAMPLES_PER_BLOCK**2 else -1
        units[np.argmax((exact - units) * step - (units + step < 1) * SAMPLES_PER_BLOCK**2)] += step
    return units


def _quotas(units: MixtureInts) -> MixtureInts:
    """quotas [block, source]: each row adds up to 1,024, each column to its units.

    Every block holds the integer part of its share; the remainders lie end to end on a line, and
    block b takes those that the points o, o + 1024, … fall into, with o running through 0 … 1023 in
    an even order.
    """
    edges = np.concatenate([[0], np.cumsum(units % SAMPLES_PER_BLOCK)])
    # 633 ≈ 1024 / golden ratio; odd, so every offset occurs once
    offsets = (np.arange(SAMPLES_PER_BLOCK) * 633 % SAMPLES_PER_BLOCK)[:, None]
    points = -(-(edges - offsets) // SAMPLES_PER_BLOCK)
    return units // SAMPLES_PER_BLOCK + np.diff(points, axis=1)
