"""The steps of one shard, as jobs for several processes: each reads a work file, writes the next.

NNNNN.STEP holds documents (`Shard.save`); NNNNN.STEP.json their statistics, which are written last
and mark the job as done.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from json.encoder import encode_basestring as quoted
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import cleaned, short_lines, without_menus
from malmoi.corpus.columns import Reasons, Shard, StepStats, count_control_names
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.decontaminate import BenchmarkSets, Spans, decontaminated
from malmoi.corpus.duplicates import signatures_of
from malmoi.corpus.filter import (
    LinkList,
    QualityScorer,
    blocked_domains,
    broken_rules,
    low_quality,
    selected,
)
from malmoi.corpus.ngrams import HashedTexts, seeded_hash
from malmoi.system.files import atomic_write, write_text
from malmoi.system.untrusted import collection_paused

Loaded = TypeVar("Loaded")
# by the numbers in twins.npz
DUPLICATE_REASONS = np.array(["", "the same words", "similar words"], object)


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

    def documents(self, number: int, step: str) -> Shard:
        with self.path(number, step).open("rb") as file:
            return Shard.load(file)

    def finish(self, number: int, step: str, shard: Shard, account: dict[str, Any]) -> None:
        """Writes the documents, then the statistics."""
        with atomic_write(self.path(number, step)) as file:
            shard.save(file)
        write_text(self.path(number, f"{step}.json"), json.dumps(account, ensure_ascii=False))


def read_account(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as file:
        return dict(file)


@collection_paused()
def clean_shard(work: BuildFolder, number: int, shard: Shard) -> None:
    """Raw documents → .cleaned, those that are selected, and the short lines of possible menus."""
    stats = StepStats()
    chosen = StepStats()
    lines: dict[str, Counter[str]] = {}
    links, blocked = _selection(work)
    if links or blocked:
        shard = selected(shard, links, blocked, work.config.min_score, chosen)
    if "clean" in work.config.steps:
        shard = cleaned(shard, stats)
        lines = short_lines(shard, work.config)
    often = {
        source: {line: n for line, n in found.items() if n > 1} for source, found in lines.items()
    }
    tallies = {"select": chosen.to_dict(), "clean": stats.to_dict()}
    others = {"lines": often, "sources": Counter(shard.sources)}
    work.finish(number, "cleaned", shard, tallies | others)


@collection_paused()
def filter_shard(work: BuildFolder, number: int) -> None:
    """.cleaned → .filtered, without menus and documents that break a rule or score low; hashes."""
    config = work.config
    tallies = {step: StepStats() for step in ("menus", "filter", "quality")}
    shard = work.documents(number, "cleaned")
    if "clean" in config.steps:
        shard = without_menus(shard, _menus(work.folder / "menus.json"), tallies["menus"]).packed()
    checks = _checks(work)
    against = work.folder / "against.npz"
    benchmarks = _benchmarks(against) if against.is_file() else BenchmarkSets({})
    kept: list[Shard] = []
    exact = [np.zeros(0, np.uint64)]
    signatures = [np.zeros((0, config.hashes), np.uint32)]
    overlaps: dict[int, Spans] = {}
    for batch in shard.batches():
        texts = HashedTexts.of(batch.texts)
        for step, reasons_against in checks.items():
            reasons = reasons_against(texts)
            batch = tallies[step].kept(batch, reasons)
            texts = texts.where(reasons == "")
        if not len(batch):
            continue
        begin = sum(map(len, kept))
        overlaps |= {begin + row: spans for row, spans in benchmarks.overlaps(texts).items()}
        kept.append(batch)
        if "dedup" in config.steps:
            both = signatures_of(texts, config)
            exact.append(both[0])
            signatures.append(both[1])
    with atomic_write(work.path(number, "marks.npz")) as file:
        np.savez(file, exact=np.concatenate(exact), signatures=np.concatenate(signatures))
    account = {step: stats.to_dict() for step, stats in tallies.items()}
    others = {"documents": sum(map(len, kept)), "overlaps": overlaps}
    work.finish(number, "filtered", Shard.joined(kept), account | others)
    work.path(number, "cleaned").unlink()


def _checks(work: BuildFolder) -> dict[str, Callable[[HashedTexts], Reasons]]:
    """The steps that drop texts, each a function to the reasons ("": none)."""
    checks: dict[str, Callable[[HashedTexts], Reasons]] = {}
    if "filter" in work.config.steps:
        checks["filter"] = partial(broken_rules, config=work.config)
    if (path := work.folder / "quality.npz").is_file():
        checks["quality"] = partial(low_quality, scorer=_scorer(path), config=work.config)
    return checks


@collection_paused()
def finalize_shard(work: BuildFolder, number: int, twins: NDArray[np.uint8]) -> None:
    """.filtered → .final, without duplicates and overlaps with test sets."""
    tallies = {step: StepStats() for step in ("dedup", "decontaminate")}
    shard = tallies["dedup"].kept(work.documents(number, "filtered"), DUPLICATE_REASONS[twins])
    if (work.folder / "against.npz").is_file():
        found = work.account(number, "filtered")["overlaps"]
        rows = np.flatnonzero(twins == 0).tolist()
        overlaps = {row: found[str(old)] for row, old in enumerate(rows) if str(old) in found}
        shard = decontaminated(shard, overlaps, work.config, tallies["decontaminate"])
    account = {step: stats.to_dict() for step, stats in tallies.items()}
    sizes = {"source": shard.sources, "characters": shard.texts.characters.tolist()}
    draws = [seeded_hash(place, work.config.seed) for place in shard.places]
    others = {"draws": draws, "control": count_control_names(shard.texts)}
    work.finish(number, "final", shard, account | sizes | others)
    work.path(number, "filtered").unlink()


def write_shard(work: BuildFolder, number: int, path: Path, chosen: NDArray[np.bool_]) -> None:
    """.final → a shard of the corpus with the chosen documents."""
    with atomic_write(path) as file:
        for batch in work.documents(number, "final").where(chosen).batches():
            file.writelines(json_lines(batch))


def json_lines(shard: Shard) -> Iterator[bytes]:
    """Each document in JSON; texts are escaped together, between bytes that no UTF-8 has."""
    escaped = b"\xff".join(shard.texts.all_encoded())
    codes = np.frombuffer(escaped, np.uint8)
    for sign in ("\\", '"', *map(chr, {*codes[codes < ord(" ")].tolist()})):
        escaped = escaped.replace(sign.encode(), quoted(sign)[1:-1].encode())
    columns = (escaped.split(b"\xff"), shard.sources, shard.places, shard.urls)
    for text, source, place, url in zip(*columns, strict=True):
        more = f', "url": {quoted(url)}' if url else ""
        rest = f'", "source": {quoted(source)}, "place": {quoted(place)}{more}}}\n'
        yield b'{"text": "' + text + rest.encode()


@cache
def _selection(work: BuildFolder) -> tuple[LinkList | None, frozenset[str]]:
    path = work.folder / "links.npz"
    links = LinkList(**read_arrays(path)) if path.is_file() else None
    return links, blocked_domains(work.config)


def _loaded(load: Callable[[Path], Loaded]) -> Callable[[Path], Loaded]:
    """Loads a file once, and again when it has changed."""
    cached = lru_cache(maxsize=1)(lambda path, changed: load(path))
    return lambda path: cached(path, path.stat().st_mtime_ns)


@_loaded
def _menus(path: Path) -> dict[str, frozenset[str]]:
    return {source: frozenset(lines) for source, lines in read_account(path).items()}


@_loaded
def _scorer(path: Path) -> QualityScorer:
    return QualityScorer(**read_arrays(path))


@_loaded
def _benchmarks(path: Path) -> BenchmarkSets:
    return BenchmarkSets({int(length): known for length, known in read_arrays(path).items()})
