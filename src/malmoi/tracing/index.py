"""The training text of a run, indexed: what occurs in it, how often and where."""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import ensure, require_that
from malmoi.messages import logger
from malmoi.system.files import DiskError, atomic_write
from malmoi.system.machine import this_machine
from malmoi.system.native import cache_or_temporary, native_functions
from malmoi.system.result import Result
from malmoi.text.documents import read_documents
from malmoi.text.sentences import split_sentences
from malmoi.tokenizer import Tokenizer
from malmoi.training.data.encode import build_stores
from malmoi.training.data.store import Store

PlaceArray = NDArray[np.int32]
TokenArray = NDArray[Any]  # uint16 or uint32, as a token store has them


def suffix_array(text: PlaceArray) -> PlaceArray:
    """The places of a text in the order of their suffixes; only its last number is 0."""
    calls = (("malmoi_suffix_array", 4),)
    native = native_functions("malmoi.tracing", "suffixes.c", calls, this_machine())
    if native is None:
        return doubled_prefixes(text)
    found = np.empty(len(text), np.int32)
    ensure(
        not native[0](text.ctypes.data, found.ctypes.data, len(text), int(text.max()) + 1),
        "There is not enough memory to index the training text.",
    )
    return found


def doubled_prefixes(text: PlaceArray) -> PlaceArray:
    """The same without a compiler: sorted by 1, 2, 4, 8… numbers (Manber & Myers 1990)."""
    ranks = text.astype(np.int64)
    length = 1
    while True:
        keys = ranks << 32
        keys[:-length] |= ranks[length:]
        places = np.argsort(keys, kind="stable")
        ordered = keys[places]
        ranks[places] = np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))
        if ranks[places[-1]] == len(text) - 1:
            return places.astype(np.int32)
        length *= 2


def sort_places(tokens: TokenArray, ends: NDArray[np.int64], vocab: int) -> PlaceArray:
    """The suffix array of some documents; one that ends precedes one that goes on.

    Tokens are ordered as their bytes are, so that pieces of a store are compared by their bytes.
    `ends` are the places where documents end without a token that says so.
    """
    n = len(tokens)
    fits = n + len(ends) < np.iinfo(np.int32).max
    ensure(fits, "A text of {n:,} tokens is too long to index.", n=n)
    order = np.argsort(np.arange(vocab, dtype=tokens.dtype).view(tokens.dtype.newbyteorder(">")))
    numbers = np.empty(vocab, np.int32)
    numbers[order] = np.arange(2, vocab + 2)
    # a 1 between documents, a 0 after them
    text = np.append(np.insert(numbers[tokens], ends, 1), np.int32(0))
    places = suffix_array(text)
    if not len(ends):
        return places[1:]
    places = places[text[places] > 1]
    return places - np.cumsum(text == 1, dtype=np.int32)[places]


LONGEST = 1024  # tokens of a match; what goes on is the next match
AROUND = 96  # tokens before and after a match in which its sentence is sought
Lengths = NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Passage(Result):
    """A sentence of the training text, and which of its characters are meant."""

    text: str
    start: int
    end: int
    document: int  # its number in the training text, from 0

    def marked(self) -> str:
        """The sentence with the characters that are meant in «»."""
        match = f"«{self.text[self.start : self.end]}»"
        return f"{self.text[: self.start]}{match}{self.text[self.end :]}"


@dataclass(frozen=True, eq=False)
class IndexedStore:
    """A token store and the order of its suffixes."""

    store: Store
    places: PlaceArray

    @classmethod
    def open(cls, folder: Path) -> "IndexedStore":
        """Reads the index beside the store, or builds it there; in memory if that is read-only."""
        store = Store.open(folder)
        # named after what it was made from, so that another store's index is not taken for it
        made = hashlib.sha256(json.dumps(store.about, sort_keys=True).encode()).hexdigest()
        path = folder / f"suffixes-{made[:12]}.bin"
        if path.is_file() and path.stat().st_size == 4 * len(store.tokens):
            return cls(store, np.memmap(path, np.int32, "r").view(np.ndarray))
        logger.info("Indexing {tokens:,} tokens of training text …", tokens=len(store.tokens))
        ends = store.documents[1:] if store.end is None else store.documents[:0]
        vocab = max(store.about["vocab"], int(store.tokens.max()) + 1)
        places = sort_places(store.tokens, ends, vocab)
        with suppress(DiskError, OSError):
            for old in folder.glob("suffixes-*.bin"):
                old.unlink()
            with atomic_write(path) as file:
                file.write(places.data)
        return cls(store, places)

    def piece(self, length: int, place: int) -> bytes:
        """The bytes of the tokens from a place on, up to the end of the document."""
        stop = place + length
        if self.store.end is None:
            documents = self.store.documents
            stop = min(stop, int(documents[np.searchsorted(documents, place, "right")]))
        return self.store.tokens[place:stop].tobytes()

    def longest(self, query: TokenArray) -> int:
        """How many of the first tokens of the query occur here one after another."""
        piece = partial(self.piece, min(len(query), LONGEST))
        after = bisect_left(self.places, query[:LONGEST].tobytes(), key=piece)
        best = 0
        for place in self.places[max(after - 1, 0) : after + 1]:
            other = np.frombuffer(piece(place), query.dtype)
            best = max(best, int(np.append(query[: len(other)] != other, True).argmax()))
        return best

    def occurrences(self, query: TokenArray) -> PlaceArray:
        """Every place where these tokens occur, in the order of what follows them."""
        piece = partial(self.piece, len(query))
        first = bisect_left(self.places, query.tobytes(), key=piece)
        return self.places[first : bisect_right(self.places, query.tobytes(), first, key=piece)]

    def passage(self, tokenizer: Tokenizer, place: int, length: int) -> Passage:
        """The sentence, or sentences, that the tokens from a place on belong to."""
        number = int(np.searchsorted(self.store.documents, place, "right")) - 1
        first, last = (int(edge) for edge in self.store.documents[number : number + 2])
        begin = max(first, place - AROUND)
        tokens = self.store.tokens[begin : min(last, place + length + AROUND)]
        rows = [tokens, tokens[: place - begin], tokens[: place - begin + length]]
        whole, before, until = tokenizer.decode_batch(rows)
        start = len(until) - len(until[len(before) :].lstrip())
        end = max(start, len(until.rstrip()))
        left, right = _sentence_around(whole, start, end)
        opening = "…" if left == 0 and begin > first else ""
        closing = "…" if right == len(whole) and begin + len(tokens) < last else ""
        shift = len(opening) - left
        return Passage(f"{opening}{whole[left:right]}{closing}", start + shift, end + shift, number)


def _sentence_around(text: str, start: int, end: int) -> tuple[int, int]:
    """The characters of the sentences that some characters belong to."""
    left = at = 0
    for sentence in split_sentences(text):
        begin = text.index(sentence, at)
        at = begin + len(sentence)
        if begin <= start:
            left = begin
        if at >= end:
            return left, at
    return left, len(text)


@dataclass(frozen=True, eq=False)
class TextIndex:
    """The training text of a run: one store, or one for each weighted source."""

    tokenizer: Tokenizer
    parts: tuple[IndexedStore, ...]

    @classmethod
    def open(cls, run: Path, tokenizer: Tokenizer) -> "TextIndex":
        """The index of a run's folder; built on first use."""
        folders = find_stores(run)
        require_that(
            folders or not (run / "recipe.json").is_file(),
            "The training text of {run} is gone: its folder data is not there. Encode it "
            "again, without training again: malmoi pretrain {run}/recipe.json --data SOURCE "
            "--out {run}",
            run=run,
        )
        require_that(
            folders,
            "{run} has no training text, which only folders of malmoi pretrain keep: give the "
            "text with --data FILE (data=).",
            run=run,
        )
        return cls(tokenizer, tuple(map(IndexedStore.open, folders)))

    @classmethod
    def of_sources(cls, sources: Sequence[str], tokenizer: Tokenizer) -> "TextIndex":
        """The index of any text, encoded into the user's cache."""
        name = hashlib.sha256(json.dumps([*sources, tokenizer.fingerprint()]).encode()).hexdigest()
        folder = cache_or_temporary("texts") / name[:16]
        end = tokenizer.specials.eos
        build_stores(read_documents(sources), tokenizer, folder, valid=0, end=end)
        return cls(tokenizer, (IndexedStore.open(folder / "train"),))

    @property
    def size(self) -> int:
        return sum(len(part.places) for part in self.parts)

    def array(self, tokens: Sequence[int]) -> TokenArray:
        return np.array(tokens, self.parts[0].store.tokens.dtype)

    def longest(self, tokens: TokenArray) -> Lengths:
        """From each token on, how many occur in the training text one after another.

        An unknown word is not the same as another unknown word: nothing matches it.
        """
        places = np.arange(len(tokens))
        found = [max(part.longest(tokens[place:]) for part in self.parts) for place in places]
        unknown = self.tokenizer.specials.unk
        if unknown is None or self.tokenizer.kind == "byte-bpe":  # it knows every text
            return np.array(found, np.int64)
        barriers = np.append(np.flatnonzero(tokens == unknown), len(tokens))
        return np.minimum(found, barriers[np.searchsorted(barriers, places)] - places)

    def forms(self, tokens: TokenArray, text: str) -> list[TokenArray]:
        """The ways in which words are encoded: at the beginning of a line, and after a space."""
        if not self.tokenizer.tokens_have_spaces:
            return [tokens]
        kept: list[list[int]] = []
        for row in sorted([tokens.tolist(), *self.tokenizer.ids([text, f" {text}"])], key=len):
            if not any(row[-len(one) :] == one for one in kept):  # where a space is a token
                kept.append(row)
        return [self.array(row) for row in kept]

    def count(self, *forms: TokenArray) -> int:
        """How often these tokens occur, in any of their forms."""
        return sum(len(part.occurrences(tokens)) for part in self.parts for tokens in forms)

    def documents(self, *forms: TokenArray) -> int:
        found = 0
        for part in self.parts:
            places = np.concatenate([part.occurrences(tokens) for tokens in forms])
            found += len(np.unique(np.searchsorted(part.store.documents, places, "right")))
        return found

    def passages(self, *forms: TokenArray, most: int) -> Iterator[Passage]:
        """Different sentences with these tokens, drawn evenly from their occurrences."""
        seen: set[str] = set()
        for part, tokens in product(self.parts, forms):
            places = part.occurrences(tokens)
            for place in places[:: max(1, len(places) // (4 * most))]:
                passage = part.passage(self.tokenizer, int(place), len(tokens))
                if passage.text not in seen and len(seen) < most:
                    seen.add(passage.text)
                    yield passage


def find_stores(run: Path | None) -> list[Path]:
    """The folders of a run's token stores; a snapshot's are those of its run."""
    if run is None:
        return []
    home = run.parents[1] if run.parent.name == "snapshots" else run
    found = [*home.glob("data/train/store.json"), *home.glob("data/[0-9]*/train/store.json")]
    return sorted(path.parent for path in found)
