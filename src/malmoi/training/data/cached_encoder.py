"""Fast encoding of large corpora: every word, or character, is encoded once and cached.

WordPiece, GPT-1's BPE and byte-level BPE never merge across words, so the ids of a text are those
of its words, each with its preceding space. A few thousand words cover most of a corpus, and a
look-up costs a tenth of encoding the word again.
"""

import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.control import names_pattern

TokenInts = NDArray[np.int64]
# cached words take about 100 MB; beyond either limit the cache is cleared
MAX_CACHED_WORDS = 1 << 19
MAX_CACHED_CHARACTERS = 1 << 25
WORDS_PER_CALL = 200  # words joined into one text
# A word begins where a letter or sign is followed by a plain space, and where a plain word is
# followed by the sign that ends a phrase, so that "word" and "word," share an entry. Other kinds of
# space do not separate words in every tokenizer (BERT's drops some as control characters), and only
# Python counts \x1c-\x1f as spaces.
_SPACE = r"[^\S\x1c-\x1f]"
_SOLID = r"[\S\x1c-\x1f]"
_MORE = rf"(?:[^\S\x1c-\x1f \t\n\r]{_SPACE}*{_SOLID}*)*"
_WORD = re.compile(
    rf"{_SPACE}*(?:[A-Za-z0-9가-힣]+(?:(?=[.,!?;:\"')])|{_SOLID}*{_MORE})|{_SOLID}+{_MORE})|{_SPACE}+"
)
_KINDS = ("wordpiece", "bpe", "byte-bpe")
_SIDES = [*"a.가é中👍", "Ab1", "(b)", "it's", "e\u0301", "##", *"\x1c\x85\x0c\u200b\xad"]
_SPACES = [*" \n\t\u3000\x85\x0b", "  ", "\n\n", " \n ", "\xa0 ", " \xa0", "\r\n", "\u200b "]
_SIGNS = [".", ", ", "!?", ";", ":", '"', "'", ")", "...", "'ll", ".\n"]


class Coder(Protocol):
    """Encodes texts to arrays of ids."""

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], TokenInts]:
        """Returns the ids of all texts, concatenated, and the number of ids of each text."""
        ...


def make_encoder(tokenizer: Tokenizer) -> Coder:
    """Caches words or characters if the tokenizer keeps them apart, else encodes text by text."""
    plain = CachedTexts(tokenizer)
    kind = getattr(tokenizer, "kind", None)
    quick: Coder = plain
    if kind in _KINDS:
        quick = CachedWords(tokenizer, _mark(tokenizer))
    elif kind == "char":
        quick = CharacterEncoder(tokenizer)
    return quick if quick is plain or _alike(quick, plain) else plain


def _alike(one: Coder, other: Coder) -> bool:
    """Whether both give the same ids at every boundary of letters, signs, scripts and spaces."""
    between = _SPACES + _SIGNS
    texts = ["".join(parts) for parts in product(_SIDES, between, _SIDES)] + between
    return all(map(np.array_equal, one.encode(texts), other.encode(texts)))


def _mark(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """Finds a control token to write between words, so that many are encoded in one call."""
    specials = tokenizer.specials
    id = specials.eos if specials.sep is None else specials.sep
    if id is None or id not in tokenizer.control_ids or not tokenizer.names_are_literal:
        return None
    return tokenizer.token(id), id


@dataclass(frozen=True)
class CachedTexts:
    """The tokenizer without a cache."""

    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], TokenInts]:
        ids = self.tokenizer.ids(list(texts))
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum())), lengths


class CharacterEncoder:
    """The tokenizer with a cache of characters: a table indexed by code point."""

    def __init__(self, tokenizer: Tokenizer):
        self._texts = CachedTexts(tokenizer)
        self._ids = np.full(sys.maxunicode + 1, -1, np.int64)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], TokenInts]:
        if not all(unicodedata.is_normalized("NFC", text) for text in texts):
            return self._texts.encode(texts)  # the tokenizer may merge two of these characters
        try:
            codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        except UnicodeEncodeError:
            return self._texts.encode(texts)  # raises an error with the position
        if not self._learn(np.unique(codes[self._ids[codes] < 0])):
            return self._texts.encode(texts)
        return self._ids[codes], np.fromiter(map(len, texts), np.int64, len(texts))

    def _learn(self, codes: NDArray[Any]) -> bool:
        """Caches these characters; returns whether each has exactly one id."""
        ids, lengths = self._texts.encode([chr(code) for code in codes])
        if not (lengths == 1).all():
            return False
        self._ids[codes] = ids
        return True


class CachedWords:
    """The tokenizer with a cache of words; `mark` is a control token's name and id."""

    def __init__(self, tokenizer: Tokenizer, mark: tuple[str, int] | None = None):
        self._tokenizer = tokenizer
        self._mark = mark
        self._names = None if mark is None else names_pattern(tokenizer.control_tokens)
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        # word n is ids[ends[n] : ends[n + 1]]
        self._ids = np.zeros(0, np.int64)
        self._ends = np.zeros(1, np.int64)
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], TokenInts]:
        found = [_WORD.findall(text) for text in texts]
        words = list(chain.from_iterable(found))
        self._learn(set(words))
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        begins = self._ends[numbers]
        lengths = self._ends[numbers + 1] - self._ends[numbers]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Token t of word w is ids[begins[w] + t - ends[w]]: one gather for all of them.
        ids = self._ids[np.repeat(begins - ends[:-1], lengths) + np.arange(ends[-1])]
        texts_end = np.cumsum([0, *map(len, found)])
        return ids, np.diff(ends[texts_end])

    def _learn(self, words: set[str]) -> None:
        many = len(self._numbers) + len(words) > MAX_CACHED_WORDS
        if many or self._characters > MAX_CACHED_CHARACTERS:
            self._forget()
        new = list(words.difference(self._numbers))
        if not new:
            return
        ids, lengths = self._marked(new) or CachedTexts(self._tokenizer).encode(new)
        self._ids = np.concatenate([self._ids, ids])
        self._ends = np.concatenate([self._ends, self._ends[-1] + np.cumsum(lengths)])
        self._numbers |= {word: n for n, word in enumerate(new, len(self._numbers))}
        self._characters += sum(map(len, new))

    def _marked(self, words: list[str]) -> tuple[TokenInts, TokenInts] | None:
        """Encodes words as one text, each followed by the mark: half the cost of separate texts.

        Returns None if a word contains the name of a control token, which would not be encoded as
        text.
        """
        if self._mark is None or self._names is None or self._names.search("\n".join(words)):
            return None
        text, id = self._mark
        firsts = range(0, len(words), WORDS_PER_CALL)
        joined = [text.join([*words[at : at + WORDS_PER_CALL], ""]) for at in firsts]
        ids = np.concatenate(self._tokenizer.ids(joined, parse_special=True)).astype(np.int64)
        ends = np.flatnonzero(ids == id)
        return (ids[ids != id], np.diff(ends, prepend=-1) - 1) if len(ends) == len(words) else None
