"""Hashed words and n-grams, to compare texts.

A word is a run of letters, digits and marks, case-insensitive. Its hash is the same in every
process and on every machine, and all words of a text are hashed at once.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from malmoi.system.bits import mix_bits
from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions

PIECE_CHARACTERS = 1 << 20  # characters hashed together
BATCH_CHARACTERS = 1 << 16  # characters of short texts hashed together
LAST_CODE = 0xFFFF  # stands for all characters beyond the basic plane, mostly emoji
NATIVE = (
    ("malmoi_hash_words", 8),
    ("malmoi_ngrams", 5),
    ("malmoi_signatures", 8),
    ("malmoi_text_stats", 14),
    ("malmoi_find_runs", 10),
    ("malmoi_may_change", 6),
)
HashArray = NDArray[np.uint64]
IndexArray = NDArray[np.int64]
CodePoints = NDArray[np.uint32]


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
            words = np.ascontiguousarray(self.hashes)
            factors = random_odd(length, seed=1)
            native[1](words.ctypes.data, count, factors.ctypes.data, length, found.ctypes.data)
            return found
        total = np.zeros(count, np.uint64)
        for place, factor in enumerate(random_odd(length, seed=1)):
            total += self.hashes[place : place + count] * factor
        return mix_bits(total)


@dataclass(frozen=True)
class HashedTexts:
    """Some texts and the words of all of them, by their places in the joined text."""

    texts: list[str]
    codes: CodePoints  # of the joined text
    words: HashedWords
    begins: IndexArray  # text t has sizes[t] characters from begins[t] on
    sizes: IndexArray
    firsts: IndexArray  # and the words firsts[t] to lasts[t]
    lasts: IndexArray

    @classmethod
    def of(cls, texts: list[str]) -> "HashedTexts":
        joined = "\n".join(texts)
        codes = code_points(joined)
        words = hash_words(joined, codes=codes)
        begins, sizes = text_places(texts)
        firsts = np.searchsorted(words.starts, begins)
        return cls(texts, codes, words, begins, sizes, firsts, np.append(firsts[1:], len(words)))

    def without(self, reasons: Sequence[str]) -> "HashedTexts":
        """The texts that there is no reason to drop."""
        left = [place for place, why in enumerate(reasons) if not why]
        texts = [self.texts[place] for place in left]
        places = (self.begins[left], self.sizes[left], self.firsts[left], self.lasts[left])
        return HashedTexts(texts, self.codes, self.words, *places)

    def part(self, number: int) -> HashedWords:
        """The words of one text, by their places in it."""
        here = slice(self.firsts[number], self.lasts[number])
        begin = self.begins[number]
        words = self.words
        return HashedWords(words.hashes[here], words.starts[here] - begin, words.ends[here] - begin)


def text_places(texts: Sequence[str]) -> tuple[IndexArray, IndexArray]:
    """Where each text begins in the joined text, and its size."""
    sizes = np.array([len(text) for text in texts], np.int64)
    return np.cumsum(sizes + 1) - sizes - 1, sizes


def native_ngrams() -> tuple[Callable[..., int], ...] | None:
    """The functions of ngrams.c, where there is a compiler; the numbers are the same without."""
    return native_functions("malmoi.corpus", "ngrams.c", NATIVE, this_machine())


def seeded_hash(text: str, seed: int) -> int:
    """A 64-bit hash determined by the seed and the text alone."""
    data = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


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


def code_points(text: str) -> CodePoints:
    """The code point of each character."""
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


def are_letters(codes: CodePoints) -> NDArray[np.bool_]:
    """Which of the characters are letters or combining marks."""
    return letter_table()[np.minimum(codes, LAST_CODE)]


def hash_words(
    text: str, chunk: int = PIECE_CHARACTERS, codes: CodePoints | None = None
) -> HashedWords:
    """Hashes all words of a text, whose code points may be known."""
    codes = code_points(text) if codes is None else codes
    parts = [_words(codes[begin:end], begin) for begin, end in _pieces(text, chunk)]
    if len(parts) == 1:
        return HashedWords(*parts[0])
    hashes, starts, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
    return HashedWords(hashes, starts, ends)


def hash_each(texts: Iterable[str]) -> Iterator[HashedWords]:
    """Hashes the words of each text; short texts are hashed together."""
    for group in text_groups(texts):
        yield from map(HashedTexts.of(group).part, range(len(group)))


def text_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        size += len(text)
        if size > BATCH_CHARACTERS and group:
            yield group
            group = []
            size = len(text)
        group.append(text)
    if group:
        yield group


def _pieces(text: str, size: int) -> Iterator[tuple[int, int]]:
    begin = 0
    while len(text) - begin > size:
        end = text.rfind(" ", begin + size // 2, begin + size) + 1 or begin + size
        yield begin, end
        begin = end
    yield begin, len(text)


def _words(codes: CodePoints, offset: int) -> tuple[HashArray, IndexArray, IndexArray]:
    native = native_ngrams()
    if native is not None:
        return _native_words(native[0], codes, offset)
    values = _values()[np.minimum(codes, LAST_CODE)]
    inside = np.zeros(len(values) + 2, bool)
    inside[1:-1] = values != 0
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts = edges[::2]
    ends = edges[1::2]
    if not len(starts):
        return np.zeros(0, np.uint64), starts, ends
    sizes = np.append(starts[1:], len(codes)) - starts
    places = np.arange(starts[0], len(codes)) - np.repeat(starts, sizes)
    values[starts[0] :] *= random_odd(64, seed=2)[places & 63]
    return mix_bits(np.add.reduceat(values, starts)), starts + offset, ends + offset


def _native_words(
    call: Callable[..., int], codes: CodePoints, offset: int
) -> tuple[HashArray, IndexArray, IndexArray]:
    size = len(codes) // 2 + 1
    hashes = np.empty(size, np.uint64)
    starts, ends = np.empty((2, size), np.int64)
    arrays = (_values(), random_odd(64, seed=2), hashes, starts, ends)
    addresses = (array.ctypes.data for array in arrays)
    found = call(codes.ctypes.data, len(codes), offset, *addresses)
    return hashes[:found], starts[:found], ends[:found]
