"""Fast encoding of many texts: every word is encoded once and cached.

WordPiece, GPT-1's BPE, byte-level BPE and characters never merge across words, so the ids of a text
are those of its words, each with its preceding space. A few thousand words cover most of a corpus.
Where there is a compiler, new words of plain letters are encoded in C too (word_cache.c).
"""

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, product
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from malmoi.system.machine import this_machine
from malmoi.system.native import native_functions
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.pipeline import byte_alphabet

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
# cached words take about 100 MB (200 without a compiler); beyond a limit the cache is cleared
MAX_CACHED_WORDS = 1 << 20
MAX_CACHED_BYTES = 1 << 25
COUNTED_CHARACTERS = 1 << 20  # at a time
JOINED_CHARACTERS = 1024  # of short texts, that become bytes at once
PADDING = 16  # bytes that C may read beyond a text; see word_cache.c
_SIDES = [*"a.가é中👍", "Ab1", "(b)", "it's", "e\u0301", "##", *"\x1c\x85\x0c\u200b\xad"]
_BETWEEN = [
    *(*" \n\t\u3000\x85\x0b", "  ", "\n\n", " \n ", "\xa0 ", " \xa0", "\r\n", "\u200b "),
    *(".", ", ", "!?", ";", ":", '"', "'", ")", "...", "'ll", ".\n"),
]

EncodedTexts = tuple[NDArray[Any], NDArray[Any]]  # all ids, and how many each text has
LibraryIds = Callable[[list[str]], list[list[int]]]
TextEncoder = Callable[[Sequence[str]], EncodedTexts]


def make_encoder(ids: LibraryIds, kind: str, state: pipeline.State) -> TextEncoder:
    """Caches words if the tokenizer keeps them apart, else encodes text by text.

    `ids` and `state` are those of the tokenizer that finds no control tokens in text.
    """
    plain, quick = partial(encode_plainly, ids), CachedWords(empty_caches(ids, state))
    known = kind in ("wordpiece", "bpe", "byte-bpe", "char")
    # pipelines that C knows keep words apart, and a sample shows that it was compiled well
    every = 13 if by_merges(state) or by_pieces(state) else 1
    return quick if known and _alike(quick, plain, every) else plain


def encode_plainly(ids: LibraryIds, texts: Sequence[str]) -> EncodedTexts:
    return _joined(ids(list(texts)))


def empty_caches(ids: LibraryIds, state: pipeline.State) -> "list[NativeWords | PythonWords]":
    """One cache a core in C, or without a compiler one in Python."""
    machine = this_machine()
    calls = native_functions("malmoi.tokenizer", "word_cache.c", _CALLS, machine)
    if calls is None:
        return [PythonWords(ids)]
    vocabulary = _learnt(by_merges(state) or by_pieces(state) or LIBRARY, calls)
    count = min(machine.cores, 4)
    return [NativeWords(ids, vocabulary, count, calls) for _ in range(count)]


def _alike(one: TextEncoder, other: TextEncoder, every: int) -> bool:
    """Whether both give the same ids at boundaries of letters, signs, scripts and spaces."""
    texts = ["".join(parts) for parts in product(_SIDES, _BETWEEN, _SIDES)][::every] + _BETWEEN
    return all(map(np.array_equal, one(texts), other(texts)))


def _joined(rows: Sequence[Sequence[int]]) -> EncodedTexts:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


@dataclass(frozen=True)
class CachedWords:
    """The tokenizer with caches of words that share the texts. Thread-safe."""

    caches: "list[NativeWords | PythonWords]"
    _lock: Lock = field(default_factory=Lock)

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        cuts = np.linspace(0, len(texts), len(self.caches) + 1).astype(int).tolist()
        parts = [texts[start:end] for start, end in pairwise(cuts)]
        with self._lock, ThreadPoolExecutor(len(parts)) as pool:
            found = pool.map(lambda cache, part: cache.encode(part), self.caches, parts)
            columns = zip(*found, strict=True)
            return np.concatenate(next(columns)), np.concatenate(next(columns))


@dataclass
class PythonWords:
    """A cache in a dict."""

    ids: LibraryIds
    _known: dict[str, list[int]] = field(default_factory=dict)
    _bytes: int = 0

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        found = [WORD.findall(text) for text in texts]
        new = list(set(chain.from_iterable(found)).difference(self._known))
        self._bytes += sum(map(len, new))
        if len(self._known) + len(new) > MAX_CACHED_WORDS or self._bytes > MAX_CACHED_BYTES:
            self._known, self._bytes = {}, 0
            return encode_plainly(self.ids, texts)
        self._known |= zip(new, self.ids(new), strict=True)
        return _joined([[id for word in words for id in self._known[word]] for words in found])


# ------------------------------------------------------------------ how C encodes new words


class Algorithm(NamedTuple):
    """How C encodes a word: `Vocabulary` in word_cache.c."""

    kind: int = 0  # not at all, by merges of bytes (1) or as the longest pieces (2)
    lowercase: bool = False
    whole: bool = True  # syllables and accents are not taken apart
    pieces: Sequence[str] = ()
    ids: Sequence[int] = ()  # of the pieces, then of the 256 bytes or of the unknown word
    merges: Sequence[str] = ()  # left and right of each


LIBRARY = Algorithm()


def by_merges(state: pipeline.State) -> Algorithm | None:
    """The algorithm of GPT-2's pipeline, lowercased or not; None of others."""
    model, vocab, alphabet = state["model"], state["model"]["vocab"], byte_alphabet()
    normalizer = pipeline.normalizer_of(state)
    made = _is_made_of(state, {"type": "ByteLevel", "use_regex": True}, {"type": "BPE"})
    if not made or normalizer not in (None, {"type": "Lowercase"}) or alphabet.keys() - vocab:
        return None
    letters = [vocab[letter] for letter in sorted(alphabet, key=alphabet.__getitem__)]
    merges = [*chain.from_iterable(model["merges"])]
    ids = [*vocab.values(), *letters]
    return Algorithm(1, normalizer is not None, whole=True, pieces=[*vocab], ids=ids, merges=merges)


def by_pieces(state: pipeline.State) -> Algorithm | None:
    """The algorithm of BERT's pipeline; None of others."""
    vocab, unknown = state["model"]["vocab"], state["model"].get("unk_token")
    model = {
        "type": "WordPiece",
        "unk_token": unknown,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    made = _is_made_of(state, {"type": "BertPreTokenizer"}, model) and unknown in vocab
    normalizer = pipeline.normalizer_of(state) or {"type": None}
    if not made or normalizer["type"] != "BertNormalizer":
        return None
    lowercase, strips = normalizer["lowercase"], normalizer["strip_accents"]
    # stripping accents, which lowercasing does by default, takes syllables apart
    whole = not (lowercase if strips is None else strips)
    return Algorithm(2, lowercase, whole, [*vocab], [*vocab.values(), vocab[unknown]])


def _is_made_of(state: pipeline.State, *parts: dict[str, Any]) -> bool:
    """Whether the pre_tokenizer and the model are these, and all added tokens are special."""
    given = (state["pre_tokenizer"] or {}, state["model"] | {"vocab": None, "merges": None})
    settings = [{k: v for k, v in one.items() if v and k != "trim_offsets"} for one in given]
    return settings == [*parts] and all(token["special"] for token in state["added_tokens"])


# ------------------------------------------------------------------ in C


class _Strings(ctypes.Structure):
    """`Strings` in word_cache.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "bytes")),
        *((name, ctypes.c_int64) for name in ("mask", "count", "max_count", "max_bytes")),
    )


class _Vocabulary(ctypes.Structure):
    """`Vocabulary` in word_cache.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "lowercase", "whole")),
        *((name, ctypes.c_void_p) for name in ("ids", "merged", "pairs", "first_keys")),
        *((name, ctypes.c_int64) for name in ("pair_mask", "longest")),
        ("pieces", _Strings),
    )


class _Cache(ctypes.Structure):
    """`Cache` in word_cache.c."""

    _fields_ = (
        ("words", _Strings),
        *((name, ctypes.c_void_p) for name in ("vocabulary", "ids")),
        *((name, ctypes.c_int64) for name in ("used", "max_ids", "left_out", "widest")),
    )


_CALLS = (
    *(("malmoi_learn_vocabulary", 7), ("malmoi_encode_texts", 5)),
    *(("malmoi_learn_words", 5), ("malmoi_fill_ids", 5)),
)


def _learnt(
    how: Algorithm, calls: tuple[Callable[..., int], ...]
) -> tuple[_Vocabulary, tuple[NDArray[Any], ...]]:
    """The tables of a vocabulary, which caches share."""
    (pieces, sizes), (merges, merge_sizes) = utf8(how.pieces), utf8(how.merges)
    arrays: tuple[NDArray[Any], ...] = (
        *(np.array(how.ids, np.int32), np.empty(len(merge_sizes) // 2, np.int32)),
        _tables(len(merge_sizes) // 8, 0)[0],  # of pairs, at most half full
        *(np.empty(1 << 16, np.uint32), *_tables(len(sizes), len(pieces))),
    )
    found = _Vocabulary(
        *how[:3],
        *(*addresses(*arrays[:4]), len(arrays[2]) // 4 - 1, 0),
        _Strings(*addresses(*arrays[4:]), 1, 0, len(sizes), len(pieces)),
    )
    calls[0](
        *(ctypes.addressof(found), len(sizes), pieces, *addresses(sizes)),
        *(len(merge_sizes) // 2, merges, *addresses(merge_sizes)),
    )
    return found, arrays


@dataclass
class NativeWords:
    """A cache in C."""

    ids: LibraryIds
    vocabulary: tuple[_Vocabulary, Any]  # and the arrays that it points to
    caches: int  # that share the limits
    calls: tuple[Callable[..., int], ...]

    def __post_init__(self) -> None:
        words, size = MAX_CACHED_WORDS // self.caches, MAX_CACHED_BYTES // self.caches
        # pages that are not written take no memory
        self._words, self._ids = _tables(words, size), np.empty(size + PADDING, np.int32)
        self._cache = _Cache(
            _Strings(*addresses(*self._words), 1, 0, words, size),
            *(ctypes.addressof(self.vocabulary[0]), *addresses(self._ids), 0, size, 0, 1),
        )
        self._encode, self._learn_words, self._fill = (
            partial(call, ctypes.addressof(self._cache)) for call in self.calls[1:]
        )

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        data, counts = utf8(texts)
        ids = np.empty(len(data) * self._cache.widest, np.int32)
        found = self._encode(data, len(texts), *addresses(counts, ids))
        if found < 0 or (self._cache.left_out and not self._learn(ids[:found])):
            self.__post_init__()  # the cache is full: it starts anew
            return encode_plainly(self.ids, texts)
        if self._cache.left_out:
            short, ids = ids, np.empty(len(data) * self._cache.widest, np.int32)
            found = self._fill(len(texts), *addresses(counts, short, ids))
        return ids[:found], counts

    def _learn(self, ids: NDArray[np.int32]) -> bool:
        """Encodes the words among these ids that C left out; returns whether there was room."""
        numbers, (_, starts, data) = np.unique(~ids[ids < 0]).astype(np.int64), self._words
        new, sizes = _joined(
            self.ids([data[starts[n] : starts[n + 1]].tobytes().decode() for n in numbers.tolist()])
        )
        return self._learn_words(*addresses(numbers, sizes), len(numbers), *addresses(new)) >= 0

    def count(self, texts: Sequence[str], counts: NDArray[np.int64]) -> bool:
        """Adds how often each word occurs in the texts; returns whether there was room."""
        data, sizes = utf8(texts)
        numbers = np.empty(len(data), np.int32)
        found = self._encode(data, len(texts), *addresses(sizes, numbers))
        times = np.bincount(~numbers[: max(found, 0)])
        counts[: len(times)] += times
        return found >= 0

    def counted(self, counts: NDArray[np.int64]) -> Iterator[tuple[str, int]]:
        """The words that are known, with their counts."""
        _, starts, data = self._words
        edges = starts[: self._cache.words.count + 1].tolist()
        words = (data[start:end].tobytes().decode() for start, end in pairwise(edges))
        return zip(words, counts.tolist(), strict=False)


def count_words(texts: Iterable[str], many: int) -> Counter[str]:
    """How often each word occurs; of more than so many, those that occur once are left out."""
    found = Counter[str]()
    calls = native_functions("malmoi.tokenizer", "word_cache.c", _CALLS, this_machine())
    assert calls is not None  # who counts has a compiler
    words = NativeWords(lambda texts: [[] for _ in texts], _learnt(LIBRARY, calls), 1, calls)
    counts = np.zeros(MAX_CACHED_WORDS, np.int64)
    left = iter(texts)
    while batch := list(_some_texts(left)):
        if not words.count(batch, counts):
            found.update(dict(words.counted(counts)))
            words.__post_init__()  # the cache is full: it starts anew
            counts.fill(0)
            found.update(chain.from_iterable(map(WORD.findall, batch)))
    found.update(dict(words.counted(counts)))
    return found if len(found) <= many else Counter({w: n for w, n in found.items() if n > 1})


def _some_texts(texts: Iterator[str]) -> Iterator[str]:
    """The next texts, of a million characters or one."""
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters >= COUNTED_CHARACTERS:
            return


def utf8(texts: Sequence[str]) -> tuple[bytes, NDArray[np.int64]]:
    """The texts one after another, padded, and how many characters each has."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    some = 1 + JOINED_CHARACTERS * len(texts) // (1 + int(sizes.sum()))
    parts = ("".join(texts[at : at + some]).encode() for at in range(0, len(texts), some))
    return b"".join([*parts, bytes(PADDING)]), sizes


def addresses(*arrays: NDArray[Any]) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in arrays)


def _tables(count: int, size: int) -> tuple[NDArray[Any], ...]:
    """Room for so many strings and bytes: slots, of which half stay free, starts and bytes."""
    slots = np.zeros(8 + (4 << (2 * count + 1).bit_length()), np.uint64)
    # from the start of a line of the processor's cache
    aligned = slots[(first := -slots.ctypes.data % 64 // 8) : first + len(slots) - 8]
    return aligned, np.zeros(count + 1, np.int64), np.empty(size + PADDING, np.uint8)
