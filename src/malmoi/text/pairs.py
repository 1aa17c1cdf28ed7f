"""Translations: two files aligned by line, or a table with a column for each language.

A pair is read as a document of two lines, the source and the target, so that everything that reads
documents reads pairs.
"""

import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from malmoi.errors import ensure, require_that
from malmoi.messages import msg
from malmoi.system.paths import require_path
from malmoi.text.documents import DocumentReader
from malmoi.text.formats import TABLES, FoundDocument, FoundDocuments, ReadOptions
from malmoi.text.lines import read_lines, whole_items
from malmoi.text.records import WantedColumns, checked_column, label_name, read_records
from malmoi.text.sources import FileSource, OtherSource, format_of

Columns = tuple[str, str]
Pairs = Iterator[tuple[int, str, str]]  # line, source and target


def split_pair(text: str) -> list[str]:
    """A document of two lines as source and target."""
    return text.split("\n")


def _pair_source(source: Path, target: Path, columns: Columns) -> OtherSource:
    """Two files of one language each, or one table with a column for each (then twice the path)."""
    paths = list(dict.fromkeys((source, target)))
    files = [FileSource(path, "") for path in (source, target)]
    return OtherSource(
        " and ".join(map(str, paths)),
        sum(path.stat().st_size for path in paths),
        partial(_pairs, source, target, columns),
        lambda: [*columns, *(file.fingerprint() for file in files)],
    )


def _pairs(source: Path, target: Path, columns: Columns, want: ReadOptions) -> FoundDocuments:
    """Pairs that have text on both sides; the others are reported by their line."""
    is_table = source == target and format_of(source) is not None
    pairs = _cells(source, columns, want) if is_table else _lines((source, target), want)
    for number, *texts in pairs:
        first, second = (" ".join(text.split()) for text in texts)
        if first and second:
            yield FoundDocument(f"{first}\n{second}", number)
        else:
            want.on_bad_line(number, "the target is empty" if first else "the source is empty")


def _cells(path: Path, columns: Columns, want: ReadOptions) -> Pairs:
    wanted = WantedColumns(tuple(map(label_name, columns)), only=True)
    names: list[str] = []
    for number, record in whole_items(path, read_records(path, want.on_bad_line, wanted)):
        if isinstance(record, str):
            want.on_bad_line(number, record)
            continue
        names = names or [checked_column(path, name, record) for name in wanted.names]
        source, target = (record.get(name) for name in names)
        if isinstance(source, str) and isinstance(target, str):
            yield number, source, target
        else:
            lacking = names[isinstance(source, str)]
            want.on_bad_line(number, msg("no text in {column!r}", column=lacking))


def _lines(paths: tuple[Path, Path], want: ReadOptions) -> Pairs:
    """Lines that both files have; no line after the first gap would be a pair."""
    sides = (_numbered(path, side, want) for side, path in enumerate(paths))
    last = [0, 0]
    for number, found in groupby(heapq.merge(*sides), key=itemgetter(0)):
        texts = []
        for _, side, text in found:
            last[side] = number
            texts.append(text)
        if len(texts) == 2:
            yield number, texts[0], texts[1]
    ensure(
        last[0] == last[1],
        "{source} has {sources:,} lines and {target} {targets:,}: line {last:,} has no partner.",
        source=paths[0],
        sources=last[0],
        target=paths[1],
        targets=last[1],
        last=min(last) + 1,
    )


def _numbered(path: Path, side: int, want: ReadOptions) -> Iterator[tuple[int, int, str]]:
    return ((number, side, text) for number, text in read_lines(path, want.on_bad_line))


def read_pairs(sources: Sequence[str | Path], columns: Columns) -> DocumentReader:
    """The pairs of tables, and of other files taken two by two: source, target."""
    found: list[OtherSource] = []
    alone: list[Path] = []
    for path in (Path(given).expanduser() for given in sources):
        require_path(path)
        if format_of(path) in TABLES:
            found.append(_pair_source(path, path, columns))
        else:
            alone.append(path)
    require_that(
        len(alone) % 2 == 0,
        "{alone} has no partner: give two files with the same number of lines, source and "
        "target, or a table (.tsv, .csv, .jsonl) with a column for each.",
        alone=alone and alone[-1],
    )
    found += [_pair_source(*both, columns) for both in zip(alone[::2], alone[1::2], strict=True)]
    return DocumentReader(found, "line", "")
