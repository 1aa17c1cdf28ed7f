"""Cuts texts into words and numbers them: in C where there is a compiler, else in Python.

A word begins where a letter or sign is followed by a plain space, and where a plain word is
followed by the sign that ends a phrase, so that "word" and "word," share an entry. Other kinds of
space do not separate words in every tokenizer (BERT's drops some as control characters), and only
Python counts \\x1c-\\x1f as spaces.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions

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


class WordNumbers(Protocol):
    """Numbers words from 0 in the order in which they first appear."""

    def number(self, texts: Sequence[str]) -> NumberedWords | None:
        """The words of these texts; None if there is no room for the new ones."""
        ...


def word_numbers(max_words: int, max_bytes: int) -> WordNumbers:
    """An empty table of at most this many words."""
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
