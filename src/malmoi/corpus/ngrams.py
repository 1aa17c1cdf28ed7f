"""Hashed words and n-grams, to compare texts.

A word is a run of letters, digits and marks, case-insensitive. Its hash is the same in every
process and on every machine, and all words of a text are hashed at once.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import IndexArray, TextColumn
from malmoi.system.bits import mix_bits
from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions

LAST_CODE = 0xFFFF  # stands for all characters beyond the basic plane, mostly emoji
NATIVE = {  # function of ngrams.c → its number of arguments
    **{"hash_words": 10, "ngrams": 5, "signatures": 8, "text_stats": 14},
    **{"find_runs": 10, "clean": 9, "hash_texts": 6},
}
BASE = 0x9E3779B97F4A7C15  # of hashes of many words, polynomials modulo 2⁶⁴
HashArray = NDArray[np.uint64]


@dataclass(frozen=True)
class HashedWords:
    """The words of a text: hashes, starts and ends."""

    hashes: HashArray
    starts: IndexArray
    ends: IndexArray

    def __len__(self) -> int:
        return len(self.hashes)

    def ngrams(self, length: int) -> HashArray:
        """The hash of every `length` consecutive words."""
        count = max(len(self) - length + 1, 0)
        native = native_ngrams()
        if native is not None:
            found = np.empty(count, np.uint64)
            native["ngrams"](self.hashes, count, random_odd(length, seed=1), length, found)
            return found
        total = np.zeros(count, np.uint64)
        for place, factor in enumerate(random_odd(length, seed=1)):
            total += self.hashes[place : place + count] * factor
        return mix_bits(total)


@dataclass(frozen=True)
class HashedTexts:
    """Some texts and their words; places of words are counted from the beginning of their text."""

    texts: TextColumn
    words: HashedWords
    firsts: IndexArray  # text t has the words firsts[t] to lasts[t]
    lasts: IndexArray

    @classmethod
    def of(cls, texts: TextColumn) -> "HashedTexts":
        native = native_ngrams()
        words, lasts = (
            _plain_words(texts) if native is None else _native_words(native["hash_words"], texts)
        )
        return cls(texts, words, np.append(0, lasts)[:-1], lasts)

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, wanted: NDArray[np.bool_]) -> "HashedTexts":
        if wanted.all():
            return self
        return HashedTexts(
            self.texts.take(wanted), self.words, self.firsts[wanted], self.lasts[wanted]
        )

    def part(self, number: int) -> HashedWords:
        here = slice(self.firsts[number], self.lasts[number])
        words = self.words
        return HashedWords(words.hashes[here], words.starts[here], words.ends[here])


def native_ngrams() -> dict[str, Callable[..., int]] | None:
    """The functions of ngrams.c, where there is a compiler; the numbers are the same without."""
    calls = tuple((f"malmoi_{name}", count) for name, count in NATIVE.items())
    functions = native_functions("malmoi.corpus", "ngrams.c", calls, this_machine())
    if functions is None:
        return None
    return {name: partial(_run_native, run) for name, run in zip(NATIVE, functions, strict=True)}


def _run_native(run: Callable[..., int], *arguments: Any) -> int:
    """Runs a function of C with pointers to the arrays among its arguments."""
    whole = [np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for a in arguments]
    return run(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in whole))


def seeded_hash(text: str, seed: int) -> int:
    """A 64-bit hash determined by the seed and the text alone."""
    return int(seeded_hashes([text], seed)[0])


def seeded_hashes(texts: Iterable[str], seed: int) -> HashArray:
    begun = hashlib.blake2b(digest_size=8, key=str(seed).encode())

    def digest(text: str) -> bytes:
        hashed = begun.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return hashed.digest()

    return np.frombuffer(b"".join(map(digest, texts)), "<u8").astype(np.uint64)


def is_among(values: HashArray, known: HashArray) -> NDArray[np.bool_]:
    """Which values are in a sorted array."""
    if not len(known):
        return np.zeros(len(values), bool)
    nearest = known[np.minimum(np.searchsorted(known, values), len(known) - 1)]
    return np.equal(nearest, values)


@cache
def random_odd(count: int, seed: int = 0) -> HashArray:
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix_bits(numbers + np.uint64(seed)) | np.uint64(1)


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


@cache
def _values() -> HashArray:
    """A random number for each word character, case-insensitive; 0 for all others."""
    signs = map(chr, range(LAST_CODE + 1))
    codes = [ord(c.lower()[0]) if unicodedata.category(c)[0] in "LNM" else 0 for c in signs]
    lower = np.array(codes, np.uint64)
    spread = mix_bits(lower * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
    return np.where(lower > 0, spread, np.uint64(0))


@cache
def letter_table() -> NDArray[np.bool_]:
    """Which characters are letters or combining marks."""
    return np.array([unicodedata.category(chr(code))[0] in "LM" for code in range(LAST_CODE + 1)])


def are_letters(codes: NDArray[np.uint32]) -> NDArray[np.bool_]:
    return letter_table()[np.minimum(codes, LAST_CODE)]


def hash_words(text: str) -> HashedWords:
    return HashedTexts.of(TextColumn.of([text])).words


def _native_words(call: Callable[..., int], texts: TextColumn) -> tuple[HashedWords, IndexArray]:
    """The words of texts, and each text's last."""
    size = int((texts.characters // 2 + 1).sum())
    hashes = np.empty(size, np.uint64)
    starts, ends = np.empty((2, size), np.int64)
    lasts = np.empty(len(texts), np.int64)
    tables = (_values(), random_odd(64, seed=2))
    found_words = (hashes, starts, ends, lasts)
    found = call(len(texts), texts.data, texts.begins, texts.ends, *tables, *found_words)
    return HashedWords(hashes[:found], starts[:found], ends[:found]), lasts


def _plain_words(texts: TextColumn) -> tuple[HashedWords, IndexArray]:
    """The same in numpy, of all texts joined."""
    codes = np.minimum(code_points("\n".join(texts)), LAST_CODE)
    values = _values()[codes]
    inside = np.zeros(len(values) + 2, bool)
    inside[1:-1] = values != 0
    starts, ends = np.flatnonzero(inside[1:] != inside[:-1]).reshape(-1, 2).T
    sizes = np.diff(starts, prepend=0, append=len(codes))
    places = np.arange(len(codes)) - np.repeat(np.append(0, starts), sizes)
    values *= random_odd(64, seed=2)[places & 63]
    hashes = mix_bits(np.add.reduceat(values, starts)) if len(starts) else values[:0]
    begins = (texts.characters + 1).cumsum() - texts.characters - 1
    lasts = np.searchsorted(starts, begins + texts.characters)
    offsets = np.repeat(begins, np.diff(lasts, prepend=0))
    return HashedWords(hashes, starts - offsets, ends - offsets), lasts
