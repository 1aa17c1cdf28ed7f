"""Step 4, dedup: removes exact and near duplicates (MinHash, Broder 1997).

Signatures, 512 bytes for a document at 128 hashes, stay on disk. In memory are those of documents
that share a band with another one, and some 50 bytes for each of the others.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import IndexArray
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import (
    BASE,
    HashArray,
    HashedTexts,
    native_ngrams,
    random_odd,
    seeded_hash,
)
from malmoi.system.bits import mix_bits

RUNS_PER_BLOCK = 1 << 11  # n-grams hashed together, so that they stay in the cache
TEXTS_PER_BLOCK = 1 << 16  # whose band keys are computed together
Signatures = NDArray[np.uint32]


def signatures_of(group: HashedTexts, config: CorpusConfig) -> tuple[HashArray, Signatures]:
    """A hash of each text's words in order, and its MinHash signature."""
    exact = _exact_hashes(group)
    runs = group.words.ngrams(config.run)
    counts = group.lasts - group.firsts - config.run + 1
    signatures = minhash(runs, group.firsts, counts.clip(0), config.hashes)
    for place in np.flatnonzero(counts < 1).tolist():  # shorter than a run: one of all its words
        all_words = group.part(place)
        one = all_words.ngrams(len(all_words)) if len(all_words) else exact[place : place + 1]
        signatures[place] = signature(one, config.hashes)
    return exact, signatures


def _exact_hashes(group: HashedTexts) -> HashArray:
    """A polynomial in the hashes of a text's words, modulo 2⁶⁴; without words, its own hash."""
    native = native_ngrams()
    exact = np.empty(len(group), np.uint64)
    if native is None:
        exact[:] = [_polynomial(group.part(row).hashes) for row in range(len(group))]
    else:
        native["hash_texts"](len(group), BASE, group.words.hashes, group.firsts, group.lasts, exact)
    for row in np.flatnonzero(group.firsts == group.lasts).tolist():
        exact[row] = seeded_hash(group.texts[row], 0)
    return exact


def _polynomial(hashes: HashArray) -> np.uint64:
    powers = np.full(len(hashes), BASE, np.uint64).cumprod()[::-1]
    return np.uint64((hashes * powers).sum())


def signature(runs: HashArray, hashes: int) -> Signatures:
    """The smallest of (a·x + b) mod 2³² over a text's n-grams, for each of `hashes` pairs a, b."""
    found: Signatures = minhash(runs, np.array([0]), np.array([len(runs)]), hashes)[0]
    return found


def minhash(runs: HashArray, begins: IndexArray, counts: IndexArray, hashes: int) -> Signatures:
    """The signatures of texts whose n-grams are `counts` from `begins` on."""
    native = native_ngrams()
    if native is None:
        ranges = zip(begins.tolist(), counts.tolist(), strict=True)
        return np.stack([_minhash_in_numpy(runs[a : a + n], hashes) for a, n in ranges])
    found = np.empty((len(begins), hashes), np.uint32)
    native["signatures"](runs, begins, counts, len(begins), *_pairs(hashes), hashes, found)
    return found


def _minhash_in_numpy(runs: HashArray, hashes: int) -> Signatures:
    factors, terms = _pairs(hashes)
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


def exact_duplicates(exact: HashArray) -> IndexArray:
    """For each text the first with the same hash, or −1 if it is the first."""
    _, first, group = np.unique(exact, return_index=True, return_inverse=True)
    found = first[group].astype(np.int64)
    found[found == np.arange(len(found))] = -1
    return found


def near_duplicates(
    signatures: Signatures, rows: int, share: float, among: IndexArray | None = None
) -> IndexArray:
    """For each text an earlier kept one that shares `share` of its hashes, or −1.

    Only texts that share a band of `rows` hashes are compared (LSH, Indyk and Motwani 1998), and
    only those of `among`, if given.
    """
    found = np.full(len(signatures), -1, np.int64)
    meeting = _meeting(signatures, rows, np.arange(len(signatures)) if among is None else among)
    if not len(meeting):
        return found
    compared = np.ascontiguousarray(signatures[meeting])
    keys = np.stack(list(_bands(compared, rows)), axis=1)
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for place, mine in enumerate(keys.tolist()):
        near = sorted({other for key in mine for other in buckets[key]})
        alike = (compared[near] == compared[place]).mean(axis=1) >= share if near else np.zeros(0)
        if alike.any():
            found[meeting[place]] = meeting[near[int(alike.argmax())]]
        else:
            for key in mine:
                buckets[key].append(place)
    return found


def _bands(signatures: Signatures, rows: int) -> Iterator[HashArray]:
    factors = random_odd(rows, seed=5)
    for band in range(signatures.shape[1] // rows):
        columns = signatures[:, band * rows : (band + 1) * rows]
        keys = np.empty(len(signatures), np.uint64)
        for begin in range(0, len(keys), TEXTS_PER_BLOCK):
            part = columns[begin : begin + TEXTS_PER_BLOCK].astype(np.uint64)
            total = (part * factors).sum(axis=1, dtype=np.uint64)
            keys[begin : begin + TEXTS_PER_BLOCK] = mix_bits(total + np.uint64(band))
        yield keys


def _meeting(signatures: Signatures, rows: int, among: IndexArray) -> IndexArray:
    """Those of these texts that share a band's key with another of them."""
    shared = np.zeros(len(among), bool)
    for keys in _bands(signatures, rows):
        mine = keys[among]
        ordered = np.sort(mine)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            shared |= twice[np.searchsorted(twice, mine).clip(max=len(twice) - 1)] == mine
    return among[shared]


def duplicates(
    exact: HashArray, signatures: Signatures, config: CorpusConfig
) -> tuple[IndexArray, IndexArray]:
    """For each document its exact and its near duplicate among earlier ones; −1: none."""
    equal = exact_duplicates(exact)
    left = np.flatnonzero(equal < 0)
    return equal, near_duplicates(signatures, config.rows, config.similar, left)
