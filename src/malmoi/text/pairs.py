"""Translations: two files aligned by line, or a table with a column for each language.

A pair is read as a document of two lines, the source and the target, so that everything that reads
documents reads pairs.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError
from malmoi.messages import msg
from malmoi.system.paths import require_path
from malmoi.text.documents import DocumentReader
from malmoi.text.formats import TABLES, FoundDocument, FoundDocuments, ReadOptions
from malmoi.text.lines import read_lines, whole_items
from malmoi.text.records import WantedColumns, checked_column, label_name, read_records
from malmoi.text.sources import FileSource, format_of

Columns = tuple[str, str]
NumberedPair = tuple[int, str, str]  # line, source and target


def split_pair(text: str) -> list[str]:
    """A document of two lines as source and target."""
    return text.split("\n")


@dataclass(frozen=True)
class PairSource:
    """Two files of one language each, or one table with a column for each (then twice the path)."""

    source: Path
    target: Path
    columns: Columns

    @property
    def name(self) -> str:
        same = self.source == self.target
        return str(self.source) if same else f"{self.source} and {self.target}"

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in {self.source, self.target})

    def fingerprint(self) -> list[Any]:
        paths = (self.source, self.target)
        return [*self.columns, *(FileSource(path, "").fingerprint() for path in paths)]

    def documents(self, want: ReadOptions) -> FoundDocuments:
        """Pairs that have text on both sides; the others are reported by their line."""
        is_table = self.source == self.target and format_of(self.source) is not None
        for number, source, target in self._cells(want) if is_table else self._lines(want):
            if not source.strip() or not target.strip():
                empty = "the target is empty" if source.strip() else "the source is empty"
                want.on_bad_line(number, empty)
            else:
                yield FoundDocument(f"{_one_line(source)}\n{_one_line(target)}", number)

    def _cells(self, want: ReadOptions) -> Iterator[NumberedPair]:
        wanted = WantedColumns(tuple(map(label_name, self.columns)), only=True)
        records = read_records(self.source, want.on_bad_line, wanted)
        names: list[str] = []
        for number, record in whole_items(self.source, records):
            if isinstance(record, str):
                want.on_bad_line(number, record)
                continue
            names = names or [checked_column(self.source, one, record) for one in wanted.names]
            source, target = (record.get(name) for name in names)
            if isinstance(source, str) and isinstance(target, str):
                yield number, source, target
            else:
                lacking = names[isinstance(source, str)]
                want.on_bad_line(number, msg("no text in {column!r}", column=lacking))

    def _lines(self, want: ReadOptions) -> Iterator[NumberedPair]:
        """Lines that both files have; no line after the first gap would be a pair."""
        paths = (self.source, self.target)
        sides = (_numbered(path, side, want) for side, path in enumerate(paths))
        last = [0, 0]
        for number, found in groupby(heapq.merge(*sides), key=itemgetter(0)):
            texts = []
            for _, side, text in found:
                last[side] = number
                texts.append(text)
            if len(texts) == 2:
                yield number, texts[0], texts[1]
        if last[0] != last[1]:
            raise MalmoiError(
                "{source} has {sources:,} lines and {target} {targets:,}: translations are "
                "paired line by line, and line {last:,} has no partner.",
                source=self.source,
                sources=last[0],
                target=self.target,
                targets=last[1],
                last=min(last) + 1,
            )


def _numbered(path: Path, side: int, want: ReadOptions) -> Iterator[tuple[int, int, str]]:
    return ((number, side, text) for number, text in read_lines(path, want.on_bad_line))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def read_pairs(sources: Sequence[str | Path], columns: Columns) -> DocumentReader:
    """The pairs of tables, and of other files taken two by two: source, target."""
    found: list[PairSource] = []
    alone: list[Path] = []
    for path in (Path(given).expanduser() for given in sources):
        require_path(path)
        if format_of(path) in TABLES:
            found.append(PairSource(path, path, columns))
        else:
            alone.append(path)
    if len(alone) % 2:
        raise UsageError(
            "{alone} has no partner: give two files with the same number of lines, source and "
            "target, or a table (.tsv, .csv, .jsonl) with a column for each.",
            alone=alone[-1],
        )
    found += [
        PairSource(first, second, columns)
        for first, second in zip(alone[::2], alone[1::2], strict=True)
    ]
    return DocumentReader(found, "line", "")
