"""The steps of one shard, as jobs for several processes: each reads a work file, writes the next.

NNNNN.STEP holds documents, a line of JSON about all of them and then their texts, one after
another; NNNNN.STEP.json their statistics, which are written last and mark the job as done.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from json.encoder import encode_basestring as quoted
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import cleaned, short_lines, without_menus
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.control import count_control_names
from malmoi.corpus.decontaminate import BenchmarkSets, decontaminated
from malmoi.corpus.duplicates import signatures_of
from malmoi.corpus.filter import filtered
from malmoi.corpus.links import LinkList, blocked_domains, selected
from malmoi.corpus.ngrams import seeded_hash
from malmoi.corpus.quality import QualityScorer, filter_by_quality
from malmoi.corpus.stats import StepStats
from malmoi.system.files import atomic_write, write_json
from malmoi.text.documents import Document

DUPLICATE_REASONS = ("", "the same words", "similar words")  # by the numbers in twins.npy


@dataclass(frozen=True)
class BuildFolder:
    """The work folder of a running build, and its settings."""

    folder: Path
    config: CorpusConfig

    def path(self, number: int, step: str) -> Path:
        return self.folder / f"{number:05d}.{step}"

    def is_done(self, number: int, step: str) -> bool:
        return self.path(number, f"{step}.json").is_file()

    def account(self, number: int, step: str) -> dict[str, Any]:
        return read_account(self.path(number, f"{step}.json"))

    def documents(self, number: int, step: str) -> list[Document]:
        head, _, body = self.path(number, step).read_bytes().partition(b"\n")
        text = body.decode()
        documents = []
        at = 0
        for size, source, place, url in json.loads(head):
            documents.append(Document(text[at : at + size], source, place, url))
            at += size
        return documents

    def finish(
        self, number: int, step: str, documents: Sequence[Document], account: dict[str, Any]
    ) -> None:
        """Writes the documents, then the statistics."""
        head = [(len(one.text), one.source, one.place, one.url) for one in documents]
        with atomic_write(self.path(number, step)) as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.write("".join(one.text for one in documents).encode())
        write_json(self.path(number, f"{step}.json"), account)


def read_account(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def write_document_file(path: Path, documents: Iterable[Document]) -> None:
    with atomic_write(path) as file:
        for one in documents:  # json.dumps would make an encoder for each
            url = f', "url": {quoted(one.url)}' if one.url else ""
            about = f'"source": {quoted(one.source)}, "place": {quoted(one.place)}{url}'
            file.write(f'{{"text": {quoted(one.text)}, {about}}}\n'.encode())


def clean_shard(work: BuildFolder, number: int, documents: Sequence[Document]) -> None:
    """Raw documents → .clean, those that are selected, and the short lines that could be menus."""
    stats = StepStats()
    chosen = StepStats()
    links, blocked = _selection(work)
    if links or blocked:
        documents = selected(documents, links, blocked, work.config.min_score, chosen)
    if "clean" in work.config.steps:
        documents = cleaned(documents, stats)
    lines: dict[str, Counter[str]] = {document.source: Counter() for document in documents}
    for document in documents if "clean" in work.config.steps else ():
        lines[document.source].update(short_lines(document, work.config))
    often = {
        source: {line: n for line, n in found.items() if n > 1} for source, found in lines.items()
    }
    sizes = Counter(document.source for document in documents)
    tallies = {"select": chosen.to_dict(), "clean": stats.to_dict()}
    work.finish(number, "clean", documents, tallies | {"lines": often, "sources": sizes})


def filter_shard(work: BuildFolder, number: int) -> None:
    """.clean → .sift, without menus and documents that break a rule or score low; signatures."""
    config = work.config
    tallies = {step: StepStats() for step in ("menus", "filter", "quality")}
    documents = work.documents(number, "clean")
    if "clean" in config.steps:
        documents = without_menus(documents, _menus(work.folder), tallies["menus"])
    if "filter" in config.steps:
        documents = filtered(documents, config, tallies["filter"])
    if (path := work.folder / "quality.npy").is_file():
        scores = (_scorer(path), config.pareto, config.seed)
        documents = filter_by_quality(documents, *scores, tallies["quality"])
    if "dedup" in config.steps:
        texts = [document.text for document in documents]
        exact, signatures = signatures_of(texts, config)
        with atomic_write(work.path(number, "marks.npz")) as file:
            np.savez(file, exact=exact, signatures=signatures)
    account = {step: stats.to_dict() for step, stats in tallies.items()}
    work.finish(number, "sift", documents, account | {"documents": len(documents)})
    work.path(number, "clean").unlink()


def finalize_shard(work: BuildFolder, number: int, twins: NDArray[np.uint8]) -> None:
    """.sift → .clear, without duplicates and overlaps with test sets."""
    tallies = {step: StepStats() for step in ("dedup", "decontaminate")}
    reasons = [DUPLICATE_REASONS[reason] for reason in twins.tolist()]
    documents = tallies["dedup"].kept(work.documents(number, "sift"), reasons)
    if (path := work.folder / "against.npz").is_file():
        known = _benchmarks(path)
        documents = decontaminated(documents, known, work.config, tallies["decontaminate"])
    account = {step: stats.to_dict() for step, stats in tallies.items()}
    sizes: dict[str, Any] = {"source": [d.source for d in documents]}
    sizes["characters"] = [len(d.text) for d in documents]
    draws = [seeded_hash(document.place, work.config.seed) for document in documents]
    others = {"draws": draws, "control": count_control_names(documents)}
    work.finish(number, "clear", documents, account | sizes | others)
    work.path(number, "sift").unlink()


def write_shard(work: BuildFolder, number: int, path: Path, chosen: NDArray[np.bool_]) -> None:
    """.clear → a shard of the corpus with the chosen documents."""
    documents = zip(work.documents(number, "clear"), chosen.tolist(), strict=True)
    write_document_file(path, (document for document, wanted in documents if wanted))


@cache
def _selection(work: BuildFolder) -> tuple[LinkList | None, frozenset[str]]:
    path = work.folder / "links.npz"
    return LinkList.load(path) if path.is_file() else None, blocked_domains(work.config)


@cache
def _menus(folder: Path) -> dict[str, frozenset[str]]:
    return {
        source: frozenset(lines) for source, lines in read_account(folder / "menus.json").items()
    }


_scorer = cache(QualityScorer.load)
_benchmarks = cache(BenchmarkSets.load)
