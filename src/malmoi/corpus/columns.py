"""Texts and documents as columns, so that a step handles many of them in one call; and its
statistics: documents and characters in and out, and how often each rule applied.

The texts of a shard are one buffer of UTF-8 from reading to writing: a step looks at the buffer and
decodes only the texts that it changes or shows.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, groupby, repeat
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from malmoi.messages import joined, msg, plural
from malmoi.system.groups import sized_batches
from malmoi.text.documents import Document, DocumentBatch

BATCH_BYTES = 1 << 19  # of texts handled in one call, so that its own cost is small
IndexArray = NDArray[np.int64]
Rows = slice | IndexArray | NDArray[np.bool_]


@dataclass(frozen=True)
class TextColumn:
    """Texts in one buffer; text t is the bytes from begins[t] to ends[t]."""

    data: bytes
    begins: IndexArray
    ends: IndexArray
    characters: IndexArray  # of each text

    @classmethod
    def of(cls, texts: Sequence[str]) -> "TextColumn":
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        sizes, characters = (
            np.fromiter(map(len, column), np.int64, len(texts)) for column in (encoded, texts)
        )
        return cls.one_by_one(b"".join(encoded), sizes, characters)

    @classmethod
    def one_by_one(cls, data: bytes, sizes: IndexArray, characters: IndexArray) -> "TextColumn":
        """Texts of these sizes, one after another in the buffer."""
        ends = sizes.cumsum()
        return cls(data, ends - sizes, ends, characters)

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, number: int) -> str:
        return self.encoded(number).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (encoded.decode("utf-8", "surrogatepass") for encoded in self.all_encoded())

    def encoded(self, number: int) -> bytes:
        return self.data[self.begins[number] : self.ends[number]]

    def all_encoded(self) -> Iterator[bytes]:
        bounds = zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        return (self.data[begin:end] for begin, end in bounds)

    def take(self, rows: Rows) -> "TextColumn":
        """Some of the texts; the buffer is shared."""
        return TextColumn(self.data, self.begins[rows], self.ends[rows], self.characters[rows])

    def append(self, other: "TextColumn") -> "TextColumn":
        begins, ends = other.begins + len(self.data), other.ends + len(self.data)
        mine, theirs = (self.begins, self.ends, self.characters), (begins, ends, other.characters)
        both = (np.concatenate(pair) for pair in zip(mine, theirs, strict=True))
        return TextColumn(self.data + other.data, *both)

    def packed(self) -> "TextColumn":
        """The texts one after another, in a buffer of their own."""
        return TextColumn.one_by_one(
            b"".join(self.stretches()), self.ends - self.begins, self.characters
        )

    def stretches(self) -> Iterator[memoryview]:
        """The bytes of all texts; of texts that follow each other in the buffer as one."""
        gaps = np.flatnonzero(self.begins[1:] != self.ends[:-1]) + 1
        begins = self.begins[np.append(0, gaps)] if len(self) else self.begins
        ends = self.ends[np.append(gaps, len(self)) - 1] if len(self) else self.ends
        data = memoryview(self.data)
        bounds = zip(begins.tolist(), ends.tolist(), strict=True)
        return (data[begin:end] for begin, end in bounds)

    def line_breaks(self) -> IndexArray:
        begin, end = self.begins.min(initial=len(self.data)), self.ends.max(initial=0)
        breaks = np.flatnonzero(np.frombuffer(self.data, np.uint8)[begin:end] == ord("\n")) + begin
        found: IndexArray = np.searchsorted(breaks, self.ends)
        return found - np.searchsorted(breaks, self.begins)

    def batches(self) -> Iterator[slice]:
        """The rows of short texts that are handled together, or of one long text."""
        total = (self.ends - self.begins).cumsum()
        begin = 0
        while begin < len(self):
            before = total[begin - 1] if begin else 0
            end = max(int(np.searchsorted(total, before + BATCH_BYTES, "right")), begin + 1)
            yield slice(begin, end)
            begin = end


def text_columns(texts: Iterable[str]) -> Iterator[TextColumn]:
    """Any number of texts, short ones together."""
    return map(TextColumn.of, sized_batches(texts, len, BATCH_BYTES))


@dataclass(frozen=True)
class Shard:
    """Documents (`Document`) by columns."""

    texts: TextColumn
    sources: list[str]
    places: list[str]
    urls: list[str]

    @classmethod
    def of(cls, batches: Sequence[DocumentBatch]) -> "Shard":
        texts = [text for batch in batches for text in batch.texts]
        places = [place for batch in batches for place in batch.places]
        sources = [source for batch in batches for source in [batch.source] * len(batch.texts)]
        urls = [url for batch in batches for url in [batch.url] * len(batch.texts)]
        return cls(TextColumn.of(texts), sources, places, urls)

    @classmethod
    def joined(cls, parts: "Sequence[Shard]") -> "Shard":
        """The documents of several shards that share a buffer."""
        if not parts:
            return cls.of([])
        texts = [part.texts for part in parts]
        columns = zip(*((one.begins, one.ends, one.characters) for one in texts), strict=True)
        about = zip(*(part._about for part in parts), strict=True)
        joined = (list(chain.from_iterable(column)) for column in about)
        return cls(TextColumn(texts[0].data, *map(np.concatenate, columns)), *joined)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> Document:
        about = (self.sources[number], self.places[number], self.urls[number])
        return Document(self.texts[number], *about)

    def batches(self) -> "Iterator[Shard]":
        for rows in self.texts.batches():
            about = (self.sources[rows], self.places[rows], self.urls[rows])
            yield Shard(self.texts.take(rows), *about)

    def where(self, wanted: NDArray[np.bool_]) -> "Shard":
        if wanted.all():
            return self
        flags = wanted.tolist()
        about = (list(compress(column, flags)) for column in self._about)
        return Shard(self.texts.take(wanted), *about)

    def changed(self, changes: Mapping[int, Sequence[Document]]) -> "Shard":
        """With other documents, any number of them, in place of some."""
        if not changes:
            return self
        ones = [one for row in sorted(changes) for one in changes[row]]
        new = Shard.of([DocumentBatch(d.source, [d.text], [d.place], d.url) for d in ones])
        copies = np.ones(len(self), np.int64)
        for row, documents in changes.items():
            copies[row] = len(documents)
        rows = np.repeat(np.arange(len(self)), copies)
        rows[np.isin(rows, list(changes))] = np.arange(len(self), len(self) + len(new))
        places = rows.tolist()
        both = (a + b for a, b in zip(self._about, new._about, strict=True))
        about = ([column[place] for place in places] for column in both)
        return Shard(self.texts.append(new.texts).take(rows), *about)

    def packed(self) -> "Shard":
        return Shard(self.texts.packed(), *self._about)

    @property
    def _about(self) -> tuple[list[str], list[str], list[str]]:
        return self.sources, self.places, self.urls

    def save(self, file: IO[bytes]) -> None:
        """A line of JSON about the documents, the sizes of the texts, the texts."""
        sizes = np.stack([self.texts.ends - self.texts.begins, self.texts.characters])
        about = [self.places, run_lengths(self.sources), run_lengths(self.urls)]
        file.write(json.dumps(about).encode() + b"\n")
        file.write(sizes.tobytes())
        file.writelines(self.texts.stretches())

    @classmethod
    def load(cls, file: IO[bytes]) -> "Shard":
        places, sources, urls = json.loads(file.readline())
        sizes = np.frombuffer(file.read(2 * 8 * len(places)), np.int64).reshape(2, -1)
        texts = TextColumn.one_by_one(file.read(), *sizes)
        return cls(texts, _lengthened(sources), places, _lengthened(urls))


def run_lengths(column: list[str]) -> list[tuple[str, int]]:
    """Each value once where it is repeated, and how often."""
    return [(value, len(list(same))) for value, same in groupby(column)]


def _lengthened(runs: Iterable[tuple[str, int]]) -> list[str]:
    return [value for value, count in runs for value in repeat(value, count)]


# ------------------------------------------------------------------ statistics of a step

EXAMPLES_PER_RULE = 3
EXAMPLE_CHARACTERS = 80
Reasons = NDArray[np.object_]  # why each document is dropped; "": it is not


@dataclass
class StepStats:
    """Documents and characters in and out of a step, and how often each rule applied."""

    documents: list[int] = field(default_factory=lambda: [0, 0])  # in, out
    characters: list[int] = field(default_factory=lambda: [0, 0])
    rules: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def kept(self, shard: Shard, reasons: Reasons) -> Shard:
        """The documents without a reason to drop them; counts all."""
        for rule, number in Counter(reasons.tolist()).items():
            if rule:
                self.rules[rule] += number
                for row in np.flatnonzero(reasons == rule)[:EXAMPLES_PER_RULE].tolist():
                    self._show(rule, shard[row])
        return self.count(shard, shard.where(reasons == ""))

    def count(self, before: Shard, after: Shard) -> Shard:
        """Counts the documents before and after the step, and returns the latter."""
        for side, shard in enumerate((before, after)):
            self.documents[side] += len(shard)
            self.characters[side] += int(shard.texts.characters.sum())
        return after

    def count_rule(self, rule: str, document: Document) -> None:
        self.rules[rule] += 1
        self._show(rule, document)

    def _show(self, rule: str, document: Document) -> None:
        shown = self.examples.setdefault(rule, [])
        if len(shown) < EXAMPLES_PER_RULE:
            shown.append({"place": document.place, "text": document.text[:EXAMPLE_CHARACTERS]})

    def add(self, other: "StepStats") -> None:
        self.documents = [a + b for a, b in zip(self.documents, other.documents, strict=True)]
        self.characters = [a + b for a, b in zip(self.characters, other.characters, strict=True)]
        self.rules.update(other.rules)
        for rule, shown in other.examples.items():
            self.examples[rule] = (self.examples.get(rule, []) + shown)[:EXAMPLES_PER_RULE]

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"rules": dict(self.rules)}


def total_stats(parts: Iterable[dict[str, Any]]) -> StepStats:
    found = StepStats()
    for part in parts:
        found.add(StepStats(**{**part, "rules": Counter(part["rules"])}))
    return found


def describe_rules(rules: Mapping[str, int]) -> str:
    """How often each rule dropped a text, the most frequent first."""
    counts = Counter(rules).most_common()
    return joined(", ", (joined(" ", (msg(rule), f"{count:,}")) for rule, count in counts))


# ------------------------------------------------------------------ names of control tokens

# Harmless as text, but suspicious; a corpus is built before its vocabulary, so these are the names
# of common ones.
NAMES = re.compile(
    r"<\|[^\s|<>]{1,40}\|>"  # <|endoftext|>, <|im_start|>, <|eot_id|>, …
    r"|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]"
    r"|</?s>|<(?:pad|unk|cls|sep|mask|bos|eos|start_of_turn|end_of_turn)>"
    r"|\[/?INST\]|<</?SYS>>"
)
SHOWN = 5  # names listed in the sentence


def count_control_names(texts: TextColumn) -> dict[str, Any]:
    # most texts have neither of the signs that such a name begins with
    likely = (text for text in texts.all_encoded() if b"<" in text or b"[" in text)
    found = [set(NAMES.findall(text.decode())) for text in likely]
    return {"documents": sum(map(bool, found)), "names": Counter(chain.from_iterable(found))}


def total_control_names(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up several counts, the most frequent name first."""
    documents = 0
    names = Counter[str]()
    for part in parts:
        documents += part["documents"]
        names.update(part["names"])
    return {
        "documents": documents,
        "names": dict(sorted(names.items(), key=lambda item: (-item[1], item[0]))),
    }


def control_sentence(found: Mapping[str, Any]) -> str:
    if not found.get("documents"):
        return ""
    names = [f"{name} {count:,}" for name, count in found["names"].items()]
    return msg(
        "Names of control tokens in {documents} ({names}); they will be encoded as text.",
        documents=plural(found["documents"], "document"),
        names=", ".join(names[:SHOWN]) + ", …" * (len(names) > SHOWN),
    )
