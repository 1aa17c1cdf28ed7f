"""Step 5, decontaminate: what a corpus shares with a test set goes (Brown et al. 2020, appendix C)."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import clean
from malmoi.corpus.formats import Want, plain
from malmoi.corpus.grams import Numbers, words
from malmoi.corpus.read import Document, read
from malmoi.corpus.settings import CorpusConfig
from malmoi.corpus.sources import kind_of
from malmoi.corpus.tally import Tally
from malmoi.errors import MalmoiError, UsageError

SHORTEST, LONGEST = 8, 13  # words in a row that count as an overlap
PERCENTILE = 5  # of the examples' lengths: the number between
Example = list[str]  # the texts of one row


def examples(path: Path) -> Iterator[Example]:
    """The rows of a test set; every text of a row counts."""
    kind = kind_of(path) or ".txt"
    if kind not in KINDS:
        raise UsageError(f"{path} cannot be a test set to compare with: give {' '.join(KINDS)}.")
    yield from KINDS[kind](path)


def _plain(path: Path) -> Iterator[Example]:
    return ([document.text] for document in read(path))


def _json(path: Path) -> Iterator[Example]:
    for number, line in enumerate(_lines(path), 1):
        try:
            yield list(_texts(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise MalmoiError(f"{path}:{number} is not JSON ({error}).") from error


def _table(path: Path) -> Iterator[Example]:
    tabs = kind_of(path) == ".tsv"
    return (line.split("\t") for line in _lines(path)) if tabs else csv.reader(_lines(path))


def _lines(path: Path) -> Iterator[str]:
    want = Want("line", "", lambda line, why: None, lambda rule: None)
    return (text for text, _ in plain(path, want) if text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


KINDS: dict[str, Callable[[Path], Iterator[Example]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".jsonl": _json,
    ".tsv": _table,
    ".csv": _table,
}


def length_of(lengths: Sequence[int]) -> int:
    """How many words in a row count as an overlap: the 5th percentile of the examples' lengths, from 8 to 13."""
    return int(np.clip(np.percentile(lengths, PERCENTILE), SHORTEST, LONGEST)) if lengths else LONGEST


@dataclass(frozen=True)
class ExamSets:
    """Runs of words of test sets, by their length."""

    runs: dict[int, Numbers]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "ExamSets":
        found: dict[int, list[Numbers]] = {}
        for path in paths:
            rows = [[words(clean(text)) for text in example] for example in examples(path)]
            length = length_of([sum(map(len, row)) for row in rows if row])
            found.setdefault(length, []).extend(text.runs(length) for row in rows for text in row)
        return cls({length: np.unique(np.concatenate(parts)) for length, parts in found.items() if parts})

    def overlaps(self, text: str) -> list[tuple[int, int]]:
        """From where to where a text has words of a test set; what touches is one."""
        found = words(text)
        spans: list[tuple[int, int]] = []
        for length, known in self.runs.items():
            hits = np.flatnonzero(_among(found.runs(length), known))
            spans += zip(found.starts[hits].tolist(), found.ends[hits + length - 1].tolist(), strict=True)
        return _joined(spans)

    def save(self, file: IO[bytes]) -> None:
        np.savez(file, **{str(length): known for length, known in self.runs.items()})  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "ExamSets":
        with np.load(path) as file:
            return cls({int(name): file[name] for name in file.files})


def _among(values: Numbers, known: Numbers) -> NDArray[np.bool_]:
    """Which values are among the known ones, which are sorted."""
    if not len(known):
        return np.zeros(len(values), bool)
    return known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def pieces(text: str, overlaps: list[tuple[int, int]], margin: int) -> list[str]:
    """What is left of a text without the overlaps and `margin` characters around each."""
    gone = _joined([(max(begin - margin, 0), end + margin) for begin, end in overlaps])
    begins, ends = [0, *(end for _, end in gone)], [*(begin for begin, _ in gone), len(text)]
    parts = (text[begin:end].strip() for begin, end in zip(begins, ends, strict=True))
    return [part for part in parts if part]


def cleared(documents: Iterable[Document], known: ExamSets, c: CorpusConfig, tally: Tally) -> Iterator[Document]:
    """Documents without overlaps; the pieces around one are documents of their own."""
    for document in documents:
        tally.came(document)
        overlaps = known.overlaps(document.text)
        if not overlaps:
            yield tally.kept(document)
            continue
        left = pieces(document.text, overlaps, c.margin)
        large = [piece for piece in left if len(piece) >= c.piece] if len(left) <= c.pieces else []
        tally.said("cut" if large else "too many pieces" if len(left) > c.pieces else "nothing left", document)
        for number, piece in enumerate(large, 1):
            yield tally.kept(replace(document, text=piece, place=f"{document.place}#{number}"))
