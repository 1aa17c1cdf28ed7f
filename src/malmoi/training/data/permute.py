"""Shuffling without a shuffled list: a keyed bijection and keyed random numbers, both in O(1).

The position in the data is computed from (seed, step), never replayed.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from malmoi.system.bits import mix_bits

Ints = NDArray[np.int64]

# a Feistel network of 4 rounds is pseudo-random; 6 also scrambles the 2- and 3-bit halves of tiny
# sets
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def permutation_key(*parts: int) -> int:
    """Mixes several numbers (a seed, an epoch, a purpose) into a 64-bit key with SplitMix64."""
    state = 0
    for part in parts:
        state = (state + ((part & _MASK) * 2 + 1) * _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute_all(indices: ArrayLike, size: int, key: int) -> Ints:
    """Maps each of `indices` in [0, size) through the permutation that `key` selects."""
    left = np.array(indices, dtype=np.uint64, ndmin=1)
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    result = _feistel(left, bits, key)
    outside = np.flatnonzero(result >= size)
    # cycle walking: the network permutes a power of four ≥ size; repeat until inside
    while len(outside):
        result[outside] = _feistel(result[outside], bits, key)
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def permute_epochs(numbers: Ints, count: int, seed: int, purpose: int) -> Ints:
    """Sample numbers as places in the orders of their epochs, of `count` samples each."""
    epochs, places = np.divmod(numbers, count)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places[here] = permute_all(places[here], count, permutation_key(seed, epoch, purpose))
    return places


def permute_grid(numbers: Ints, count: int, seed: int, purpose: int, width: int, room: int) -> Ints:
    """Where samples start on a grid of `width`, which every later epoch shifts within `room`."""
    points = permute_epochs(numbers, count, seed, purpose) * width
    epochs = numbers // count
    for epoch in np.unique(epochs[epochs > 0]).tolist():
        points[epochs == epoch] += permutation_key(seed, epoch, purpose + 1) % room
    return points


def _feistel(values: NDArray[np.uint64], bits: np.uint64, key: int) -> NDArray[np.uint64]:
    low = np.uint64((1 << int(bits)) - 1)
    left = values >> bits
    right = values & low
    for turn in range(6):
        salt = np.uint64((key + (turn + 1) * _GOLDEN) & _MASK)
        left, right = right, left ^ (mix_bits(right + salt) >> np.uint64(32) & low)
    return left << bits | right


class Draws:
    """Uniform numbers for many samples, each row a pure function of (seed, sample number).

    A row does not depend on the others of its batch, which several processes may share.
    """

    def __init__(self, seed: int, indices: ArrayLike):
        numbers = np.array(indices, dtype=np.int64, ndmin=1).astype(np.uint64)
        keyed = numbers * np.uint64(_GOLDEN) + np.uint64(permutation_key(seed))
        self._rows = mix_bits(mix_bits(keyed))
        self._calls = 0

    def random(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """New numbers in [0, 1) by sample; the n-th does not depend on how many are drawn."""
        if not size or size[0] != len(self._rows):
            raise ValueError(f"the first axis must be the {len(self._rows)} samples, not {size}")
        columns = int(np.prod(size[1:], dtype=np.int64))
        counter = np.arange(columns, dtype=np.uint64) + np.uint64(self._calls << 40)
        self._calls += 1
        bits = mix_bits(self._rows[:, None] + counter * np.uint64(_GOLDEN)) >> np.uint64(11)
        return (bits.astype(np.float64) * 2.0**-53).reshape(size)
