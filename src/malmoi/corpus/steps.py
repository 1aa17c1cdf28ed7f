"""The steps of one shard, as jobs for several processes: each reads a work file, writes the next.

NNNNN.STEP holds documents, a line of JSON about all of them and then their texts, one after
another; NNNNN.STEP.json their statistics, which are written last and mark the job as done.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from json.encoder import encode_basestring as quoted
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import cleaned, short_lines, without_menus
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.control import count_control_names
from malmoi.corpus.decontaminate import BenchmarkSets, Spans, decontaminated
from malmoi.corpus.duplicates import signatures_of
from malmoi.corpus.filter import broken_rules
from malmoi.corpus.links import LinkList, blocked_domains, selected
from malmoi.corpus.ngrams import HashedTexts, seeded_hash, text_groups
from malmoi.corpus.quality import QualityScorer, low_quality
from malmoi.corpus.stats import StepStats
from malmoi.system.files import atomic_write, write_text
from malmoi.system.untrusted import collection_paused
from malmoi.text.documents import Document

Loaded = TypeVar("Loaded")
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
        sizes, *about = json.loads(head)
        bounds = pairwise(accumulate(sizes, initial=0))
        return list(map(Document, (text[begin:end] for begin, end in bounds), *about))

    def finish(
        self, number: int, step: str, documents: Sequence[Document], account: dict[str, Any]
    ) -> None:
        """Writes the documents, then the statistics."""
        texts, *about = zip(*documents, strict=True) if documents else ((), (), (), ())
        with atomic_write(self.path(number, step)) as file:
            file.write(json.dumps([list(map(len, texts)), *about]).encode() + b"\n")
            file.write("".join(texts).encode())
        write_text(self.path(number, f"{step}.json"), json.dumps(account, ensure_ascii=False))


def read_account(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def write_document_file(path: Path, documents: Iterable[Document]) -> None:
    with atomic_write(path) as file:
        for one in documents:  # json.dumps would make an encoder for each
            url = f', "url": {quoted(one.url)}' if one.url else ""
            about = f'"source": {quoted(one.source)}, "place": {quoted(one.place)}{url}'
            file.write(f'{{"text": {quoted(one.text)}, {about}}}\n'.encode())


@collection_paused()
def clean_shard(work: BuildFolder, number: int, documents: Sequence[Document]) -> None:
    """Raw documents → .clean, those that are selected, and the short lines that could be menus."""
    stats = StepStats()
    chosen = StepStats()
    links, blocked = _selection(work)
    if links or blocked:
        documents = selected(documents, links, blocked, work.config.min_score, chosen)
    if "clean" in work.config.steps:
        documents = cleaned(documents, stats)
    sizes = Counter(document.source for document in documents)
    lines = {source: Counter[str]() for source in sizes}
    for document in documents if "clean" in work.config.steps else ():
        if found := short_lines(document, work.config):
            lines[document.source].update(found)
    often = {
        source: {line: n for line, n in found.items() if n > 1} for source, found in lines.items()
    }
    tallies = {"select": chosen.to_dict(), "clean": stats.to_dict()}
    work.finish(number, "clean", documents, tallies | {"lines": often, "sources": sizes})


@collection_paused()
def filter_shard(work: BuildFolder, number: int) -> None:
    """.clean → .sift, without menus and documents that break a rule or score low; signatures."""
    config = work.config
    tallies = {step: StepStats() for step in ("menus", "filter", "quality")}
    documents = work.documents(number, "clean")
    if "clean" in config.steps:
        documents = without_menus(documents, _menus(work.folder / "menus.json"), tallies["menus"])
    checks = _checks(work)
    against = work.folder / "against.npz"
    benchmarks = _benchmarks(against) if against.is_file() else BenchmarkSets({})
    kept: list[Document] = []
    exact = [np.zeros(0, np.uint64)]
    signatures = [np.zeros((0, config.hashes), np.uint32)]
    overlaps: dict[int, Spans] = {}
    for group in _groups(documents):
        texts = HashedTexts.of([document.text for document in group])
        for step, reasons_against in checks.items():
            reasons = reasons_against(texts)
            group = tallies[step].kept(group, reasons)
            texts = texts.without(reasons)
        if not group:
            continue
        found = benchmarks.overlaps(texts)
        overlaps |= {len(kept) + place: spans for place, spans in found.items()}
        kept += group
        if "dedup" in config.steps:
            both = signatures_of(texts, config)
            exact.append(both[0])
            signatures.append(both[1])
    with atomic_write(work.path(number, "marks.npz")) as file:
        np.savez(file, exact=np.concatenate(exact), signatures=np.concatenate(signatures))
    account = {step: stats.to_dict() for step, stats in tallies.items()}
    others = {"documents": len(kept), "overlaps": overlaps}
    work.finish(number, "sift", kept, account | others)
    work.path(number, "clean").unlink()


def _checks(work: BuildFolder) -> dict[str, Callable[[HashedTexts], list[str]]]:
    """The steps that drop texts, each a function to the reasons ("": none)."""
    checks: dict[str, Callable[[HashedTexts], list[str]]] = {}
    if "filter" in work.config.steps:
        checks["filter"] = partial(broken_rules, config=work.config)
    if (path := work.folder / "quality.npy").is_file():
        checks["quality"] = partial(low_quality, scorer=_scorer(path), config=work.config)
    return checks


def _groups(documents: Sequence[Document]) -> Iterator[Sequence[Document]]:
    begin = 0
    for group in text_groups(document.text for document in documents):
        yield documents[begin : begin + len(group)]
        begin += len(group)


@collection_paused()
def finalize_shard(work: BuildFolder, number: int, twins: NDArray[np.uint8]) -> None:
    """.sift → .clear, without duplicates and overlaps with test sets."""
    tallies = {step: StepStats() for step in ("dedup", "decontaminate")}
    reasons = [DUPLICATE_REASONS[reason] for reason in twins.tolist()]
    documents = tallies["dedup"].kept(work.documents(number, "sift"), reasons)
    if (work.folder / "against.npz").is_file():
        found = work.account(number, "sift")["overlaps"]
        overlaps = [found.get(str(place), []) for place, why in enumerate(reasons) if not why]
        documents = decontaminated(documents, overlaps, work.config, tallies["decontaminate"])
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


def _loaded(load: Callable[[Path], Loaded]) -> Callable[[Path], Loaded]:
    """Loads a file once, and again when it has changed."""
    cached = lru_cache(maxsize=1)(lambda path, changed: load(path))
    return lambda path: cached(path, path.stat().st_mtime_ns)


@_loaded
def _menus(path: Path) -> dict[str, frozenset[str]]:
    return {source: frozenset(lines) for source, lines in read_account(path).items()}


_scorer = _loaded(QualityScorer.load)
_benchmarks = _loaded(BenchmarkSets.load)
