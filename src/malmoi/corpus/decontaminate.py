"""Step 5, decontaminate: removes overlaps with test sets (Brown et al. 2020, appendix C)."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import clean
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import HashArray, IndexArray, hash_words, is_among, text_groups
from malmoi.corpus.stats import StepStats
from malmoi.errors import MalmoiError, UsageError
from malmoi.text.documents import Document, read_documents
from malmoi.text.formats import ReadOptions, read_plain
from malmoi.text.sources import format_of

# bounds of the n-gram length, in words, that counts as an overlap
MIN_OVERLAP_WORDS = 8
MAX_OVERLAP_WORDS = 13
PERCENTILE = 5  # of the examples' lengths gives the n-gram length, within those bounds
TABLE_BITS = 20  # first bits of an n-gram's hash
BenchmarkRow = list[str]  # the texts of one row


def read_benchmark_rows(path: Path) -> Iterator[BenchmarkRow]:
    """Reads the rows of a test set; every text of a row counts."""
    kind = format_of(path) or ".txt"
    if kind not in TEST_SET_READERS:
        raise UsageError(f"{path} cannot be used as a test set: give {' '.join(TEST_SET_READERS)}.")
    yield from TEST_SET_READERS[kind](path)


def _plain(path: Path) -> Iterator[BenchmarkRow]:
    return ([document.text] for document in read_documents(path))


def _json(path: Path) -> Iterator[BenchmarkRow]:
    for number, line in enumerate(_lines(path), 1):
        try:
            yield list(_texts(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise MalmoiError(f"{path}:{number} is not JSON ({error}).") from error


def _table(path: Path) -> Iterator[BenchmarkRow]:
    tabs = format_of(path) == ".tsv"
    return (line.split("\t") for line in _lines(path)) if tabs else csv.reader(_lines(path))


def _lines(path: Path) -> Iterator[str]:
    want = ReadOptions("line", "", lambda line, why: None, lambda rule: None)
    return (found.text for found in read_plain(path, want) if found.text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


TEST_SET_READERS: dict[str, Callable[[Path], Iterator[BenchmarkRow]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".jsonl": _json,
    ".tsv": _table,
    ".csv": _table,
}


def overlap_words(lengths: Sequence[int]) -> int:
    """The n-gram length of an overlap: 5th percentile of the examples' lengths, within 8 to 13."""
    usual = np.percentile(lengths, PERCENTILE) if lengths else MAX_OVERLAP_WORDS
    return int(np.clip(usual, MIN_OVERLAP_WORDS, MAX_OVERLAP_WORDS))


@dataclass(frozen=True)
class BenchmarkSets:
    """N-grams of test sets, by length."""

    runs: dict[int, HashArray]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "BenchmarkSets":
        found: dict[int, list[HashArray]] = {}
        for path in paths:
            rows = [
                [hash_words(clean(text)) for text in example]
                for example in read_benchmark_rows(path)
            ]
            length = overlap_words([sum(map(len, row)) for row in rows if row])
            found.setdefault(length, []).extend(text.ngrams(length) for row in rows for text in row)
        return cls(
            {length: np.unique(np.concatenate(parts)) for length, parts in found.items() if parts}
        )

    def overlaps(self, text: str) -> list[tuple[int, int]]:
        """The spans of a text that occur in a test set; adjacent ones are merged."""
        return next(self.overlaps_of_each([text]))

    def overlaps_of_each(self, texts: Iterable[str]) -> Iterator[list[tuple[int, int]]]:
        """The `overlaps` of each text; short texts are compared together."""
        for group in text_groups(texts):
            found = hash_words("\n".join(group))
            ends = np.cumsum([len(text) + 1 for text in group])
            spans: list[list[tuple[int, int]]] = [[] for _ in group]
            for length in self.runs:
                hits = self._hits(found.ngrams(length), length)
                first = found.starts[hits]
                last = found.ends[hits + length - 1]
                owner = np.searchsorted(ends, first, side="right")
                whole = last < ends[owner]  # not across two texts
                begin = (ends - [len(text) + 1 for text in group])[owner]
                for text, a, b in zip(
                    *(part[whole].tolist() for part in (owner, first - begin, last - begin)),
                    strict=True,
                ):
                    spans[text].append((a, b))
            yield from map(_joined, spans)

    def _hits(self, ngrams: HashArray, length: int) -> IndexArray:
        """Which n-grams are known: few are, and a table of their first bits rules most out."""
        likely = np.flatnonzero(self._tables[length][ngrams >> np.uint64(64 - TABLE_BITS)])
        return likely[is_among(ngrams[likely], self.runs[length])]

    @cached_property
    def _tables(self) -> dict[int, NDArray[np.bool_]]:
        tables = {length: np.zeros(1 << TABLE_BITS, bool) for length in self.runs}
        for length, known in self.runs.items():
            tables[length][known >> np.uint64(64 - TABLE_BITS)] = True
        return tables

    def save(self, file: IO[bytes]) -> None:
        np.savez(file, **{str(length): known for length, known in self.runs.items()})  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "BenchmarkSets":
        with np.load(path) as file:
            return cls({int(name): file[name] for name in file.files})


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def cut_overlaps(text: str, overlaps: list[tuple[int, int]], margin: int) -> list[str]:
    """Removes the overlaps and `margin` characters around each, and returns the remaining parts."""
    gone = _joined([(max(begin - margin, 0), end + margin) for begin, end in overlaps])
    begins = [0, *(end for _, end in gone)]
    ends = [*(begin for begin, _ in gone), len(text)]
    parts = (text[begin:end].strip() for begin, end in zip(begins, ends, strict=True))
    return [part for part in parts if part]


def decontaminated(
    documents: Sequence[Document], known: BenchmarkSets, c: CorpusConfig, stats: StepStats
) -> list[Document]:
    """The documents without overlaps; the pieces around one become documents."""
    after = []
    found = known.overlaps_of_each(document.text for document in documents)
    for document, overlaps in zip(documents, found, strict=True):
        if not overlaps:
            after.append(document)
            continue
        left = cut_overlaps(document.text, overlaps, c.margin)
        large = [piece for piece in left if len(piece) >= c.piece] if len(left) <= c.pieces else []
        nothing = "too many pieces" if len(left) > c.pieces else "nothing left"
        stats.count_rule("cut" if large else nothing, document)
        for number, piece in enumerate(large, 1):
            place = f"{document.place}#{number}"
            after.append(document._replace(text=piece, place=place))
    return stats.count(documents, after)
