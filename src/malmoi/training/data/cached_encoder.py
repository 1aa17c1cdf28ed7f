"""Fast encoding of large corpora: every word is encoded once and cached.

WordPiece, GPT-1's BPE, byte-level BPE and characters never merge across words, so the ids of a text
are those of its words, each with its preceding space. A few thousand words cover most of a corpus,
and a look-up costs a tenth of encoding the word again.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.core import WORDS_PER_GROUP

# A word begins where a letter or sign is followed by a plain space, and where a plain word is
# followed by the sign that ends a phrase, so that "word" and "word," share an entry. Other kinds of
# space do not separate words in every tokenizer (BERT's drops some as control characters), and only
# Python counts \x1c-\x1f as spaces.
SPACE = r"[^\S\x1c-\x1f]"
SOLID = r"[\S\x1c-\x1f]"
MORE = rf"(?:[^\S\x1c-\x1f \t\n\r]{SPACE}*{SOLID}*)*"
WORD = re.compile(
    rf"{SPACE}*(?:[A-Za-z0-9가-힣]+(?:(?=[.,!?;:\"')])|{SOLID}*{MORE})|{SOLID}+{MORE})|{SPACE}+"
)


@dataclass(frozen=True)
class NumberedWords:
    """The words of some texts by number, how many each text has, and the words seen first here."""

    numbers: NDArray[Any]
    counts: NDArray[np.int64]
    new: list[str]


def word_numbers(max_words: int, max_bytes: int) -> "PythonWordNumbers | NativeWordNumbers":
    """An empty table that numbers up to so many words in the order in which they first appear."""
    calls = (("malmoi_number_words", 6),)
    found = native_functions("malmoi.training.data", "word_numbers.c", calls, this_machine())
    if found is None:
        return PythonWordNumbers(max_words, max_bytes)
    return NativeWordNumbers(found[0], max_words, max_bytes)


class PythonWordNumbers:
    def __init__(self, max_words: int, max_bytes: int) -> None:
        self._numbers: dict[str, int] = {}
        self._max_words = max_words
        self._bytes_left = max_bytes

    def number(self, texts: Sequence[str]) -> NumberedWords | None:
        """The words of these texts; None if there is no room for the new ones."""
        found = [WORD.findall(text) for text in texts]
        words = list(chain.from_iterable(found))
        new = list(set(words).difference(self._numbers))
        self._bytes_left -= sum(map(len, new))
        if len(self._numbers) + len(new) > self._max_words or self._bytes_left < 0:
            return None
        self._numbers |= {word: n for n, word in enumerate(new, len(self._numbers))}
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        return NumberedWords(numbers, np.fromiter(map(len, found), np.int64, len(found)), new)


class _Table(ctypes.Structure):
    """`Words` in word_numbers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "hashes", "starts", "bytes")),
        *((name, ctypes.c_int64) for name in ("mask", "count", "max_words", "max_bytes")),
    )


class NativeWordNumbers:
    def __init__(self, call: Callable[..., int], max_words: int, max_bytes: int) -> None:
        self._call = call
        slots = 1 << (2 * max_words).bit_length()  # at most half full
        self._starts = np.zeros(max_words + 1, np.int64)
        self._bytes = np.empty(max_bytes, np.uint8)
        kept = (np.zeros(slots, np.int32), np.empty(max_words, np.uint32), self._starts)
        self._kept = (*kept, self._bytes)  # the table has only addresses
        places = (array.ctypes.data for array in self._kept)
        self._table = _Table(*places, slots - 1, 0, max_words, max_bytes)

    def number(self, texts: Sequence[str]) -> NumberedWords | None:
        encoded = [text.encode() for text in texts]
        data = b"".join(encoded)
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        numbers = np.empty(len(data), np.int32)  # pages that are not written take no memory
        counts = np.empty(len(encoded), np.int64)
        before = self._table.count
        arrays = (ends.ctypes.data, len(encoded), numbers.ctypes.data, counts.ctypes.data)
        found = self._call(ctypes.addressof(self._table), data, *arrays)
        if found < 0:
            return None
        starts = self._starts[before : self._table.count + 1].tolist()
        new = self._bytes[starts[0] : starts[-1]].tobytes()
        cuts = [start - starts[0] for start in starts]
        words = [new[a:b].decode() for a, b in pairwise(cuts)]
        return NumberedWords(numbers[:found], counts, words)


# ------------------------------------------------------------------ the cache

TokenInts = NDArray[np.int64]
# cached words take about 100 MB (200 without a compiler); beyond either limit the cache is cleared
MAX_CACHED_WORDS = 1 << 20
MAX_CACHED_BYTES = 1 << 25
_KINDS = ("wordpiece", "bpe", "byte-bpe", "char")
_SIDES = [*"a.가é中👍", "Ab1", "(b)", "it's", "e\u0301", "##", *"\x1c\x85\x0c\u200b\xad"]
_SPACES = [*" \n\t\u3000\x85\x0b", "  ", "\n\n", " \n ", "\xa0 ", " \xa0", "\r\n", "\u200b "]
_SIGNS = [".", ", ", "!?", ";", ":", '"', "'", ")", "...", "'ll", ".\n"]


def make_encoder(tokenizer: Tokenizer) -> "CachedWords | CachedTexts":
    """Caches words if the tokenizer keeps them apart, else encodes text by text."""
    plain = CachedTexts(tokenizer)
    if getattr(tokenizer, "kind", None) not in _KINDS:
        return plain
    quick = CachedWords(tokenizer)
    return quick if _alike(quick, plain) else plain


def _alike(one: "CachedWords", other: "CachedTexts") -> bool:
    """Whether both give the same ids at every boundary of letters, signs, scripts and spaces."""
    between = _SPACES + _SIGNS
    texts = ["".join(parts) for parts in product(_SIDES, between, _SIDES)] + between
    return all(map(np.array_equal, one.encode(texts), other.encode(texts)))


@dataclass(frozen=True)
class CachedTexts:
    """The tokenizer without a cache."""

    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], TokenInts]:
        """Returns the ids of all texts, concatenated, and the number of ids of each text."""
        ids = self.tokenizer.ids(list(texts))
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum())), lengths


class CachedWords:
    """The tokenizer with a cache of words."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._forget()

    def _forget(self) -> None:
        self._words = word_numbers(MAX_CACHED_WORDS, MAX_CACHED_BYTES)
        # word n is ids[ends[n] : ends[n + 1]]
        self._ids = np.zeros(0, np.int64)
        self._ends = np.zeros(1, np.int64)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], TokenInts]:
        try:
            found = self._words.number(texts)
        except UnicodeEncodeError:  # a lone surrogate: the tokenizer says where
            found = None
        if found is None:
            self._forget()  # the cache is full
            return CachedTexts(self._tokenizer).encode(texts)
        if found.new:
            self._learn(found.new)
        begins = self._ends[found.numbers]
        lengths = self._ends[1:][found.numbers] - begins
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Token t of word w is ids[begins[w] + t - ends[w]]: one gather for all of them.
        ids = self._ids[np.repeat(begins - ends[:-1], lengths) + np.arange(ends[-1])]
        texts_end = np.cumsum([0, *found.counts])
        return ids, np.diff(ends[texts_end])

    def _learn(self, new: list[str]) -> None:
        groups = self._tokenizer.ids_of_words(new)
        ids = [np.asarray(tokens, np.int64) for tokens, _ in groups]
        sizes = [min(WORDS_PER_GROUP, len(new) - i) for i in range(0, len(new), WORDS_PER_GROUP)]
        lengths = [
            np.bincount(np.array(words, np.int64), minlength=size)
            for (_, words), size in zip(groups, sizes, strict=True)
        ]
        self._ids = np.concatenate([self._ids, *ids])
        ends = self._ends[-1] + np.cumsum(np.concatenate(lengths))
        self._ends = np.concatenate([self._ends, ends])
