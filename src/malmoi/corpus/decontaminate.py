"""Step 5, decontaminate: removes overlaps with test sets, or finds the items of a test set that
overlap with a corpus (Brown et al. 2020, appendix C).
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import clean, clean_columns
from malmoi.corpus.columns import IndexArray, Shard, StepStats
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import (
    BASE,
    HashArray,
    HashedTexts,
    HashedWords,
    hash_words,
    is_among,
    native_ngrams,
)
from malmoi.errors import explained, require_that
from malmoi.evaluation.task import Overlaps
from malmoi.messages import logger
from malmoi.system.progress import Progress, report_progress
from malmoi.text.documents import Document, read_documents
from malmoi.text.lines import read_lines
from malmoi.text.sources import format_of

# bounds of the n-gram length, in words, that counts as an overlap
MIN_OVERLAP_WORDS = 8
MAX_OVERLAP_WORDS = 13
PERCENTILE = 5  # of the examples' lengths gives the n-gram length, within those bounds
TABLE_BITS = 20  # first bits of a run's hash
BenchmarkRow = list[str]  # the texts of one row
Spans = list[tuple[int, int]]


def read_benchmark_rows(path: Path) -> Iterator[BenchmarkRow]:
    """Reads the rows of a test set; every text of a row counts."""
    kind = format_of(path) or ".txt"
    require_that(
        kind in TEST_SET_READERS,
        "{path} cannot be used as a test set: give {readers}.",
        path=path,
        readers=" ".join(TEST_SET_READERS),
    )
    yield from TEST_SET_READERS[kind](path)


def _plain(path: Path) -> Iterator[BenchmarkRow]:
    return ([document.text] for document in read_documents(path))


def _json(path: Path) -> Iterator[BenchmarkRow]:
    for number, line in enumerate(_lines(path), 1):
        wrong = (ValueError, RecursionError)
        with explained(wrong, "{place} is not JSON ({error}).", place=f"{path}:{number}"):
            yield list(_texts(json.loads(line)))


def _table(path: Path) -> Iterator[BenchmarkRow]:
    tabs = format_of(path) == ".tsv"
    return (line.split("\t") for line in _lines(path)) if tabs else csv.reader(_lines(path))


def _lines(path: Path) -> Iterator[str]:
    lines = (line.strip() for _, line in read_lines(path, lambda number, why: None))
    return filter(None, lines)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


TEST_SET_READERS: dict[str, Callable[[Path], Iterator[BenchmarkRow]]]
TEST_SET_READERS = {".txt": _plain, ".md": _plain, ".jsonl": _json, ".tsv": _table, ".csv": _table}


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
            rows = list(read_benchmark_rows(path))
            columns = clean_columns(text for row in rows for text in row)
            texts = [HashedTexts.of(column) for column in columns]
            sizes = chain.from_iterable((part.lasts - part.firsts).tolist() for part in texts)
            length = overlap_words([sum(islice(sizes, len(row))) for row in rows if row])
            found.setdefault(length, []).extend(_runs_within(part, length) for part in texts)
        return cls(
            {length: np.unique(np.concatenate(parts)) for length, parts in found.items() if parts}
        )

    def overlaps(self, texts: HashedTexts) -> dict[int, Spans]:
        """By number of the text, its spans that occur in a test set; adjacent ones are merged."""
        spans: dict[int, Spans] = {}
        for length in self.runs:
            hits = self._hits(texts.words, length)
            owner = np.searchsorted(texts.lasts, hits, side="right").clip(max=len(texts) - 1)
            # not across two texts, or in one that is left out
            whole = (texts.firsts[owner] <= hits) & (hits + length <= texts.lasts[owner])
            for text, begin, end in _spans(texts.words, hits[whole], owner[whole], length):
                spans.setdefault(text, []).append((begin, end))
        return {text: _joined(found) for text, found in spans.items()}

    def _hits(self, words: HashedWords, length: int) -> IndexArray:
        """Where known runs of words begin; in C, a table of first bits rules most out."""
        native = native_ngrams()
        known = self.runs[length]
        if native is None:
            return np.flatnonzero(is_among(hash_runs(words, length), known))
        found = np.empty(len(words), np.int64)
        powers = (_powers(length), pow(BASE, -1, 1 << 64), length)
        others = (self._tables[length], TABLE_BITS, known, len(known), found)
        return found[: native["find_runs"](words.hashes, len(words), *powers, *others)]

    @cached_property
    def _tables(self) -> dict[int, NDArray[np.uint8]]:
        tables = {}
        for length, known in self.runs.items():
            table = np.zeros(1 << TABLE_BITS, bool)
            table[known >> np.uint64(64 - TABLE_BITS)] = True
            tables[length] = np.packbits(table, bitorder="little")
        return tables


@cache
def _powers(length: int) -> HashArray:
    return np.array([pow(BASE, place, 1 << 64) for place in range(length)], np.uint64)


def hash_runs(words: HashedWords, length: int) -> HashArray:
    """A hash of every `length` consecutive words that is cheap to move along by one."""
    total = np.zeros(max(len(words) - length + 1, 0), np.uint64)
    for place, power in enumerate(_powers(length)):
        total += words.hashes[place : place + len(total)] * power
    return total


def _runs_within(texts: HashedTexts, length: int) -> HashArray:
    """The hashes of the runs of all texts, none across two."""
    runs = hash_runs(texts.words, length)
    owner = np.repeat(np.arange(len(texts)), texts.lasts - texts.firsts)
    found: HashArray = runs[owner[: len(runs)] == owner[len(owner) - len(runs) :]]
    return found


def _spans(
    words: HashedWords, hits: IndexArray, owner: IndexArray, length: int
) -> Iterator[tuple[int, int, int]]:
    """The text, begin and end of each stretch of runs that touch; `hits` are in order."""
    begins, ends = words.starts[hits], words.ends[hits + length - 1]
    apart = np.flatnonzero((owner[1:] != owner[:-1]) | (begins[1:] > ends[:-1]))
    firsts, lasts = np.append(-1, apart) + 1, np.append(apart, len(hits) - 1)
    found = (owner[firsts], begins[firsts], ends[lasts]) if len(hits) else (hits, hits, hits)
    return zip(*(column.tolist() for column in found), strict=True)


def _joined(spans: Spans) -> Spans:
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def cut_overlaps(text: str, overlaps: Spans, margin: int) -> list[str]:
    """Removes the overlaps and `margin` characters around each, and returns the remaining parts."""
    gone = _joined([(max(begin - margin, 0), end + margin) for begin, end in overlaps])
    begins = [0, *(end for _, end in gone)]
    ends = [*(begin for begin, _ in gone), len(text)]
    parts = (text[begin:end].strip() for begin, end in zip(begins, ends, strict=True))
    return [part for part in parts if part]


def decontaminated(
    shard: Shard, overlaps: Mapping[int, Spans], c: CorpusConfig, stats: StepStats
) -> Shard:
    """The documents without their overlaps, by row; the pieces around one become documents."""
    changes: dict[int, list[Document]] = {}
    for row, spans in overlaps.items():
        document = shard[row]
        left = cut_overlaps(document.text, spans, c.margin)
        large = [piece for piece in left if len(piece) >= c.piece] if len(left) <= c.pieces else []
        nothing = "too many pieces" if len(left) > c.pieces else "nothing left"
        stats.count_rule("cut" if large else nothing, document)
        changes[row] = [
            document._replace(text=piece, place=f"{document.place}#{number}")
            for number, piece in enumerate(large, 1)
        ]
    return stats.count(shard, shard.changed(changes))


# ------------------------------------------------------------------ test items in a corpus


def find_overlaps(items: Sequence[Sequence[str]], corpus: Sequence[str]) -> Overlaps:
    """Looks for the items' n-grams in a corpus of any size; only theirs are held in memory."""
    hashed = [[hash_words(clean(text)) for text in item] for item in items]
    # an n-gram is within one text, so the longest decides
    length = overlap_words([max(map(len, item)) for item in hashed if item])
    empty = np.zeros(0, np.uint64)
    ngrams = [np.concatenate([empty, *(hash_runs(t, length) for t in item)]) for item in hashed]
    known = np.unique(np.concatenate([empty, *ngrams]))
    seen = _seen(known, length, corpus)
    dirty = tuple(bool(seen[np.searchsorted(known, found)].any()) for found in ngrams)
    return Overlaps(length, dirty, tuple(not len(found) for found in ngrams))


def _seen(known: HashArray, length: int, corpus: Sequence[str]) -> NDArray[np.bool_]:
    seen = np.zeros(len(known), bool)
    reader = read_documents(corpus)
    number = 0
    for column in clean_columns(one.text for one in reader):
        found = _runs_within(HashedTexts.of(column), length)
        seen[np.searchsorted(known, found[is_among(found, known)])] = True
        number += len(column)
        report_progress(Progress("compare", number, None, "documents"))
    report_progress(Progress("compare", number, number, "documents"))
    for sentence in reader.describe()[len(reader.rules) :]:
        logger.warning(sentence)
    return seen
