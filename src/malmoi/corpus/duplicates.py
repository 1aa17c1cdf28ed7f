"""Step 4, dedup: removes exact and near duplicates (MinHash, Broder 1997).

Only hashes are held, 4 bytes each and 8 for the whole text: 0.52 GB for a million documents at 128
hashes, and up to 1.7 GB while they are compared.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import HashArray, hash_each, native_ngrams, random_odd
from malmoi.system.bits import mix_bits

RUNS_PER_BLOCK = 1 << 11  # n-grams hashed together, so that they stay in the cache
Signatures = NDArray[np.uint32]
DuplicateIndices = NDArray[np.int64]


def signatures_of(texts: Sequence[str], config: CorpusConfig) -> tuple[HashArray, Signatures]:
    """A hash of each text's words in order, and its MinHash signature."""
    exact = np.zeros(len(texts), np.uint64)
    signatures = np.zeros((len(texts), config.hashes), np.uint32)
    for place, (text, found) in enumerate(zip(texts, hash_each(texts), strict=True)):
        whole = found.hashes.tobytes() or text.encode("utf-8", "surrogatepass")
        exact[place] = int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little")
        runs = found.ngrams(min(config.run, len(found))) if len(found) else exact[place : place + 1]
        signatures[place] = signature(runs, config.hashes)
    return exact, signatures


def signature(runs: HashArray, hashes: int) -> Signatures:
    """The smallest of (a·x + b) mod 2³² over a text's n-grams, for each of `hashes` pairs a, b."""
    factors, terms = _pairs(hashes)
    native = native_ngrams()
    if native is not None:
        found = np.empty(hashes, np.uint32)
        pairs = (factors.ctypes.data, terms.ctypes.data)
        native[2](runs.ctypes.data, len(runs), *pairs, hashes, found.ctypes.data)
        return found
    values = (runs >> np.uint64(32)).astype(np.uint32)
    low = np.full(hashes, 2**32 - 1, np.uint32)
    for begin in range(0, len(values), RUNS_PER_BLOCK):
        hashed = factors * values[None, begin : begin + RUNS_PER_BLOCK]
        hashed += terms
        np.minimum(low, hashed.min(axis=1), out=low)
    return low


@cache
def _pairs(hashes: int) -> tuple[Signatures, Signatures]:
    factors, terms = (
        (random_odd(hashes, seed) >> np.uint64(32)).astype(np.uint32)[:, None] for seed in (3, 4)
    )
    return factors | np.uint32(1), terms


def exact_duplicates(exact: HashArray) -> DuplicateIndices:
    """For each text the first with the same hash, or −1 if it is the first."""
    _, first, group = np.unique(exact, return_index=True, return_inverse=True)
    found = first[group].astype(np.int64)
    found[found == np.arange(len(found))] = -1
    return found


def near_duplicates(signatures: Signatures, rows: int, share: float) -> DuplicateIndices:
    """For each text an earlier kept one that shares `share` of its hashes, or −1.

    Only texts that share a band of `rows` hashes are compared (LSH, Indyk and Motwani 1998).
    """
    found = np.full(len(signatures), -1, np.int64)
    meeting = _meeting(signatures, rows)
    if not len(meeting):
        return found
    keys = np.stack(list(_bands(signatures[meeting], rows)), axis=1)
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for place, mine in zip(meeting.tolist(), keys.tolist(), strict=True):
        near = sorted({other for key in mine for other in buckets[key]})
        alike = (
            (signatures[near] == signatures[place]).mean(axis=1) >= share if near else np.zeros(0)
        )
        if alike.any():
            found[place] = near[int(alike.argmax())]
        else:
            for key in mine:
                buckets[key].append(place)
    return found


def _bands(signatures: Signatures, rows: int) -> Iterator[HashArray]:
    """The key of each text in each band."""
    factors = random_odd(rows, seed=5)
    for band in range(signatures.shape[1] // rows):
        part = signatures[:, band * rows : (band + 1) * rows].astype(np.uint64)
        yield mix_bits((part * factors).sum(axis=1, dtype=np.uint64) + np.uint64(band))


def _meeting(signatures: Signatures, rows: int) -> DuplicateIndices:
    """The texts that share a band's key with another text."""
    shared = np.zeros(len(signatures), bool)
    for keys in _bands(signatures, rows):
        _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
        shared |= counts[group] > 1
    return np.flatnonzero(shared)


def duplicates(
    exact: HashArray, signatures: Signatures, config: CorpusConfig
) -> tuple[DuplicateIndices, DuplicateIndices]:
    """For each document its exact and its near duplicate among earlier ones; −1: none."""
    equal = exact_duplicates(exact)
    left = np.flatnonzero(equal < 0)
    nearly = np.full(len(exact), -1, np.int64)
    found = near_duplicates(signatures[left], config.rows, config.similar)
    nearly[left] = np.where(found < 0, -1, left[found])
    return equal, nearly
