"""Translations: two files aligned by line, or a table with a column for each language.

A pair is read as a document of two lines, the source and the target, so that everything that reads
documents reads pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError
from malmoi.system.paths import require_path
from malmoi.text.documents import DocumentReader
from malmoi.text.formats import FORMATS, FoundDocument, FoundDocuments, ReadOptions
from malmoi.text.lines import read_lines
from malmoi.text.open_file import whole_items
from malmoi.text.sources import FileSource, format_of

TABLES = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".arrow")
Columns = tuple[str, str]


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
        for number, source, target in _aligned(*self._sides(want)):
            if number == 0:
                self._check_counts(source, target)
            elif not source.strip() or not target.strip():
                empty = "the target is empty" if source.strip() else "the source is empty"
                want.on_bad_line(number, empty)
            else:
                yield FoundDocument(f"{_one_line(source)}\n{_one_line(target)}", number)

    def _sides(self, want: ReadOptions) -> tuple[FoundDocuments, FoundDocuments]:
        kind = format_of(self.source)
        if self.source != self.target or kind is None:
            return _lines(self.source, want), _lines(self.target, want)
        first, second = (
            whole_items(
                self.source,
                FORMATS[kind](self.source, ReadOptions(want.rule, column, bad, want.on_rule)),
            )
            for column, bad in zip(self.columns, (want.on_bad_line, _ignore), strict=True)
        )
        return first, second

    def _check_counts(self, sources: str, targets: str) -> None:
        """Refuses files of different lengths: no line after the first gap would be a pair."""
        if self.source != self.target and sources != targets:
            last = min(int(sources), int(targets))
            raise MalmoiError(
                "{source} has {sources:,} lines and {target} {targets:,}: translations are "
                "paired line by line, and line {last:,} has no partner.",
                source=self.source,
                sources=int(sources),
                target=self.target,
                targets=int(targets),
                last=last + 1,
            )


def _ignore(line: int, why: str) -> None:
    """A table is read once for each column; its bad rows are reported by the first."""


def _lines(path: Path, want: ReadOptions) -> FoundDocuments:
    return (FoundDocument(text, number) for number, text in read_lines(path, want.on_bad_line))


def _aligned(sources: FoundDocuments, targets: FoundDocuments) -> Iterator[tuple[int, str, str]]:
    """Yields line, source and target where both have a line; last (0, and both last lines)."""
    sides = (sources, targets)
    heads = [next(side, None) for side in sides]
    last = [0, 0]
    while at := min((head.line for head in heads if head is not None), default=0):
        texts = [head.text for head in heads if head is not None and head.line == at]
        if len(texts) == 2:
            yield at, texts[0], texts[1]
        for i, head in enumerate(heads):
            if head is not None and head.line == at:
                last[i] = at
                heads[i] = next(sides[i], None)
    yield 0, str(last[0]), str(last[1])


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
