"""Writes documents with one process per core; the processes do not load torch."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from malmoi.studies.in_context.documents import RuleItems, document_chunk
from malmoi.studies.in_context.rules import HIDDEN_RULES
from malmoi.system.files import replace_file

DOCUMENTS_PER_CHUNK = 500  # documents made at a time, each chunk from its own seed


def write_rule_documents(
    path: Path,
    items: RuleItems,
    count: int,
    *,
    seed: int = 0,
    rules: Sequence[str] = (),
    processes: int = 0,
) -> None:
    """Writes `count` documents, the same for any number of processes (0: one per core)."""
    names = tuple(rules) or tuple(rule.name for rule in HIDDEN_RULES)
    sizes = [
        min(DOCUMENTS_PER_CHUNK, count - first) for first in range(0, count, DOCUMENTS_PER_CHUNK)
    ]
    make = partial(document_chunk, items, names, seed)
    workers = min(processes or len(os.sched_getaffinity(0)), len(sizes))

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(_made(make, list(enumerate(sizes)), workers))

    replace_file(path, write)


def _made(make: "partial[str]", jobs: list[tuple[int, int]], workers: int) -> Iterator[str]:
    if workers <= 1:
        yield from map(make, jobs)
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(make, jobs)
