"""Encodes a corpus into training and validation stores, resumably and in bounded memory."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError, ensure
from malmoi.messages import msg
from malmoi.system.files import folder_lock, write_json
from malmoi.system.groups import sized_batches
from malmoi.system.progress import Progress, report_progress
from malmoi.system.untrusted import read_object
from malmoi.text.documents import DocumentReader, require_documents
from malmoi.tokenizer import Tokenizer
from malmoi.training.data.background import prefetched
from malmoi.training.data.permute import permutation_key
from malmoi.training.data.store import STORE_FORMAT, Appender, Store, StoreCounts, holds

JOURNAL_BYTES = 8 << 20  # bytes of text between two journal entries
# the tokenizer's own records take a hundred times the memory of the text
TOKENIZER_CHARACTERS_PER_CALL = 1 << 20
Chunk = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64] | None, int]  # see `Appender`


@dataclass(frozen=True)
class Stores:
    """Both stores, and their origin: "built", "continued …", "reused" or "rebuilt because …"."""

    train: Store
    valid: Store
    how: str


@dataclass(frozen=True)
class EncodePlan:
    """One build: input, settings and output folder."""

    reader: DocumentReader
    tokenizer: Tokenizer
    out: Path
    sentences: Callable[[str], list[str]] | None
    valid: float
    end: int | None
    fraction: float

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every id."""
        return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32)

    def appender(self, part: str, counts: StoreCounts) -> Appender:
        return Appender(self.out / part, self.dtype, counts, sentences=self.sentences is not None)

    def made(self) -> dict[str, str]:
        """What determines the stores' content, part by part, so that a change can be named."""
        split: Any = self.sentences
        name = split and (getattr(split, "name", "") or f"{split.__module__}.{split.__qualname__}")
        settings = [name, self.valid, 0, self.end]  # 0 was a seed, and old stores are still good
        settings += [self.fraction] * (self.fraction < 1)
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        found = {"text": self.reader.fingerprint(), "tokenizer": self.tokenizer.fingerprint()}
        return found | {"settings": digest}


def build_stores(  # noqa: PLR0913  # the settings of a store
    reader: DocumentReader,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    sentences: Callable[[str], list[str]] | None = None,
    valid: float = 0.01,
    end: int | None = None,
    fraction: float = 1.0,
) -> Stores:
    """Encodes `reader` into out/train and out/valid, or reuses stores made from the same input.

    `sentences` splits a document where sentence starts are needed; `end` is appended to each. A
    killed build resumes where it stopped.
    """
    plan = EncodePlan(reader, tokenizer, Path(out), sentences, valid, end, fraction)
    made = plan.made()
    how = "reused"
    with folder_lock(plan.out, wait=True):
        changed = _finished(plan.out, made)
        if changed != "":
            state = _State.load(plan, made)
            how = state.describe(changed)
            _encode_all(plan, state)
            _publish(plan, state)
    return open_stores(plan.out, how)


def open_stores(folder: Path, how: str = "reused") -> Stores:
    return Stores(Store.open(folder / "train"), Store.open(folder / "valid"), how)


def _finished(out: Path, made: dict[str, str]) -> str | None:
    """Returns "" if both stores are current, else what changed; None if there are none."""
    if (out / "journal.json").exists() or not (out / "train" / "store.json").exists():
        return None
    try:
        stores = [Store.open(out / part) for part in ("train", "valid")]
    except MalmoiError as error:
        return msg("it was damaged ({error})", error=error)
    before = [store.about["made"] for store in stores]
    changed = [name for name in made if any(old.get(name) != made[name] for old in before)]
    return msg("the {changed} changed", changed=", ".join(changed)) if changed else ""


@dataclass
class _State:
    """The journal: how many documents are done and how much of each store is valid."""

    made: dict[str, str]
    done: int = 0
    train: StoreCounts = field(default_factory=StoreCounts)
    valid: StoreCounts = field(default_factory=StoreCounts)

    @classmethod
    def load(cls, plan: EncodePlan, made: dict[str, str]) -> "_State":
        path = plan.out / "journal.json"
        try:
            kept = read_object(path)
            train, valid = (StoreCounts.read(kept.object(part)) for part in ("train", "valid"))
            state = cls(kept.map_of("made", str), kept.whole("done"), train, valid)
        except MalmoiError:  # missing or unreadable: nothing is known to be valid
            return cls(made)
        sentences = plan.sentences is not None
        whole = all(
            holds(plan.out / part, counts, plan.dtype.itemsize, sentences=sentences)
            for part, counts in state.parts.items()
        )
        return state if whole and state.made == made else cls(made)

    @property
    def parts(self) -> dict[str, StoreCounts]:
        return {"train": self.train, "valid": self.valid}

    def save(self, out: Path) -> None:
        write_json(out / "journal.json", asdict(self))

    def describe(self, changed: str | None) -> str:
        if changed:
            return msg("rebuilt because {changed}", changed=changed)
        return msg("continued after {done:,} documents", done=self.done) if self.done else "built"

    def progress(self, seconds: float) -> Progress:
        tokens = self.train.tokens + self.valid.tokens
        megabytes = (self.train.bytes + self.valid.bytes) / 1e6
        speed = megabytes / max(seconds, 1e-9)
        metrics = {"tokens": tokens, "megabytes": megabytes, "megabytes_per_second": speed}
        return Progress("encode", self.done, None, "documents", metrics)


def _encode_all(plan: EncodePlan, state: _State) -> None:
    """Encodes in this thread while another reads and splits; every batch is journalled."""
    began = time.monotonic()
    for part in state.parts:
        (plan.out / part / "store.json").unlink(missing_ok=True)
    train = plan.appender("train", state.train)
    valid = plan.appender("valid", state.valid)
    with train, valid, prefetched(_batches(plan, state.done), ahead=2) as batches:
        state.save(plan.out)
        for batch in batches:
            encoded = _encode(batch, plan.tokenizer, plan.end)
            held_out = np.array([item.valid for item in batch])
            for appender, chosen in ((train, ~held_out), (valid, held_out)):
                appender.append(*encoded.chunk(chosen, sentences=plan.sentences is not None))
                appender.sync()
            state.done += len(batch)
            state.save(plan.out)
            report_progress(state.progress(time.monotonic() - began))


@dataclass(frozen=True)
class _Item:
    """One document to encode: its sentences, or the pieces of a long text."""

    pieces: list[str]
    bytes: int
    valid: bool


def _batches(plan: EncodePlan, skip: int) -> Iterator[list[_Item]]:
    texts = (document.text for document in require_documents([plan.reader]))
    split = draw(assign(texts, plan.valid), plan.fraction)
    pieces = plan.sentences or cut
    items = (
        _Item(pieces(text), len(text.encode("utf-8", "surrogatepass")), valid)
        for text, valid in islice(split, skip, None)
    )
    return sized_batches(items, lambda item: item.bytes, JOURNAL_BYTES)


@dataclass(frozen=True)
class _Encoded:
    """A batch as arrays: all ids, each piece's document and length, each document's bytes."""

    ids: NDArray[Any]
    owners: NDArray[np.int64]
    lengths: NDArray[np.int64]
    bytes: NDArray[np.int64]

    def documents(self) -> NDArray[np.int64]:
        """Token counts of the documents."""
        return np.bincount(self.owners, self.lengths, len(self.bytes)).astype(np.int64)

    def chunk(self, chosen: NDArray[np.bool_], *, sentences: bool) -> Chunk:
        """Returns what to append of the chosen documents; those without tokens are dropped."""
        documents = self.documents()
        chosen = chosen & (documents > 0)
        pieces = self.lengths[chosen[self.owners] & (self.lengths > 0)] if sentences else None
        ids = self.ids[np.repeat(chosen, documents)]
        return ids, documents[chosen], pieces, int(self.bytes[chosen].sum())


def _encode(batch: list[_Item], tokenizer: Tokenizer, end: int | None) -> _Encoded:
    """Encodes a batch in bounded calls and appends the end-of-text token to every document."""
    pieces = [piece for item in batch for piece in item.pieces]
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    calls = np.flatnonzero(np.diff(np.cumsum(sizes) // TOKENIZER_CHARACTERS_PER_CALL)) + 1
    edges = [0, *calls.tolist(), len(pieces)]
    parts = [tokenizer.encode_texts(pieces[a:b]) for a, b in pairwise(edges)]
    ids, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    owners = np.repeat(np.arange(len(batch)), [len(item.pieces) for item in batch])
    encoded = _Encoded(ids, owners, lengths, np.array([item.bytes for item in batch]))
    return encoded if end is None else _ended(encoded, end)


def _ended(encoded: _Encoded, end: int) -> _Encoded:
    documents = encoded.documents()
    some = documents > 0
    ids = np.insert(encoded.ids, np.cumsum(documents)[some], end)
    last = np.full(len(documents), -1)
    pieces = np.flatnonzero(encoded.lengths)
    # with several pieces per document, the last assignment wins
    last[encoded.owners[pieces]] = pieces
    lengths = encoded.lengths.copy()
    lengths[last[some]] += 1
    return replace(encoded, ids=ids, lengths=lengths)


def _publish(plan: EncodePlan, state: _State) -> None:
    """Completes the arrays, writes store.json, then removes the journal."""
    ensure(
        state.train.tokens != 0,
        "There is no text to encode: the sources hold no document with a single token.",
    )
    for part, counts in state.parts.items():
        with plan.appender(part, counts) as appender:
            appender.finish()
        about = {
            "format": STORE_FORMAT,
            "dtype": plan.dtype.name,
            **asdict(counts),
            "end": plan.end,
            "vocab": plan.tokenizer.vocab_size,
            "made": state.made,
            **({} if plan.sentences else {"sentences": None}),
        }
        write_json(plan.out / part / "store.json", about)
    (plan.out / "journal.json").unlink()


MIN_CUT_CHARACTERS = 1 << 14  # a shorter last document of several validates as a whole
MIN_STRETCH_CHARACTERS = 1 << 14  # a document of which a fraction is shorter is drawn as a whole
DRAW = 14  # the purpose of a permutation's key
MAX_PIECE_CHARACTERS = 1 << 17  # a longer document is encoded in pieces, on all cores


def assign(texts: Iterable[str], share: float, seed: int = 0) -> Iterator[tuple[str, bool]]:
    """Pairs every document's text with whether it is for validation, by a hash of its number.

    At least one of several validates, and the first always trains. If only the last could validate
    and it is long, or if it is the only one, it is cut, and its last part validates.
    """
    held: str | None = None
    number = 0
    characters = 0
    validated = share == 0
    for text in texts:
        if held is not None:
            chosen = number > 0 and permutation_key(seed, number) < share * 2.0**64
            validated |= chosen
            yield held, chosen
            number += 1
        held = text
        characters += len(text)
    if held is None:
        return
    wanted = share * characters
    if not validated and (number == 0 or len(held) > max(2 * wanted, MIN_CUT_CHARACTERS)):
        at = _before_space(held, int(len(held) - wanted), len(held) // 2)
        parts = ((held[:at], False), (held[at:], True))
        yield from (part for part in parts if part[0])
    else:
        chosen = permutation_key(seed, number) < share * 2.0**64
        yield held, number > 0 and (chosen or not validated)


def draw(documents: Iterable[tuple[str, bool]], fraction: float) -> Iterator[tuple[str, bool]]:
    """All that validates; of the training text some short documents, a stretch of each long."""
    for number, (text, valid) in enumerate(documents):
        key = permutation_key(0, number, DRAW) if fraction < 1 else 0
        if valid or fraction >= 1:
            yield text, valid
        elif len(text) * fraction >= MIN_STRETCH_CHARACTERS:
            size = int(len(text) * fraction)
            start = _before_space(text, (key * (len(text) - size)) >> 64, 0)
            yield text[start : _before_space(text, start + size, start)].lstrip(), valid
        elif key < fraction * 2.0**64:
            yield text, valid


def cut(text: str, most: int = MAX_PIECE_CHARACTERS) -> list[str]:
    """Cuts a long text before spaces, so that the pieces' ids join to those of the whole."""
    pieces = []
    start = 0
    while len(text) - start > most:
        stop = _before_space(text, start + most, start)
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _before_space(text: str, at: int, lowest: int) -> int:
    """The last position ≤ `at` and > `lowest` after a word; `at` itself if there is none."""
    place = max(text.rfind("\n", lowest + 1, at + 1), text.rfind(" ", lowest + 1, at + 1))
    while place > lowest and text[place - 1].isspace():
        place -= 1
    return place if place > lowest else at
