"""The steps of one shard, as jobs for several processes: each reads a work file, writes the next.

NNNNN.STEP holds documents (`Shard.save`); NNNNN.STEP.json their statistics, which are written last
and mark the job as done.
"""

import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain, compress, repeat
from json.encoder import encode_basestring as quoted
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.clean import cleaned, short_lines, without_menus
from malmoi.corpus.columns import Reasons, Shard, StepStats, count_control_names, run_lengths
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.decontaminate import BenchmarkSets, Spans, decontaminated
from malmoi.corpus.duplicates import signatures_of
from malmoi.corpus.filter import broken_rules
from malmoi.corpus.links import LinkList, blocked_domains, selected
from malmoi.corpus.ngrams import HashedTexts, seeded_hashes
from malmoi.corpus.quality import QualityScorer, low_quality
from malmoi.errors import MalmoiError, require_known, require_that
from malmoi.system.files import atomic_write, write_text
from malmoi.system.packages import optional_package
from malmoi.system.parts import part_slice
from malmoi.system.progress import Progress, report_progress
from malmoi.system.untrusted import collection_paused
from malmoi.text.documents import run_now

Loaded = TypeVar("Loaded")
Tallies = Mapping[str, StepStats]  # by step
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

    def finish(self, number: int, step: str, shard: Shard, tallies: Tallies, **facts: Any) -> None:
        """Writes the documents, then the statistics."""
        with atomic_write(self.path(number, step)) as file:
            shard.save(file)
        self.record(number, step, tallies, **facts)

    def record(self, number: int, step: str, tallies: Tallies, **facts: Any) -> None:
        """Writes the statistics and other facts, which mark the job as done."""
        account = {name: stats.to_dict() for name, stats in tallies.items()} | facts
        write_text(self.path(number, f"{step}.json"), json.dumps(account, ensure_ascii=False))


def read_account(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8")))


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with atomic_write(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as file:
        return dict(file)


@collection_paused()
def clean_shard(work: BuildFolder, number: int, shard: Shard) -> None:
    """Raw documents → .cleaned, those that are selected, and the short lines of possible menus."""
    tallies = {step: StepStats() for step in ("select", "clean")}
    lines: dict[str, dict[str, int]] = {}
    links, blocked = _selection(work)
    if links or blocked:
        shard = selected(shard, links, blocked, work.config.min_score, tallies["select"])
    if "clean" in work.config.steps:
        shard = cleaned(shard, tallies["clean"])
        lines = short_lines(shard, work.config)
    work.finish(number, "cleaned", shard, tallies, lines=lines, sources=Counter(shard.sources))


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
    hashes = [(np.zeros(0, np.uint64), np.zeros((config.hashes, 0), np.uint32))]
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
            exact, signatures = signatures_of(texts, config)
            hashes.append((exact, signatures.T))  # as a band of all documents is compared
    exact, signatures = map(partial(np.concatenate, axis=-1), zip(*hashes, strict=True))
    write_arrays(work.path(number, "marks.npz"), {"exact": exact, "bands": signatures})
    facts = {"documents": sum(map(len, kept)), "overlaps": overlaps}
    work.finish(number, "filtered", Shard.joined(kept), tallies, **facts)
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
    """.filtered → .lines, of JSON, without duplicates and overlaps with test sets."""
    tallies = {step: StepStats() for step in ("dedup", "decontaminate")}
    shard = tallies["dedup"].kept(work.documents(number, "filtered"), DUPLICATE_REASONS[twins])
    if (work.folder / "against.npz").is_file():
        found = work.account(number, "filtered")["overlaps"]
        rows = np.flatnonzero(twins == 0).tolist()
        overlaps = {row: found[str(old)] for row, old in enumerate(rows) if str(old) in found}
        shard = decontaminated(shard, overlaps, work.config, tallies["decontaminate"])
    draws = seeded_hashes(shard.places, work.config.seed)
    sizes = {"characters": shard.texts.characters, "draws": draws}
    write_arrays(work.path(number, "sizes.npz"), sizes)
    facts = {"source": run_lengths(shard.sources), "control": count_control_names(shard.texts)}
    with atomic_write(work.path(number, "lines")) as file:
        for batch in shard.batches():
            file.write(json_lines(batch))
    work.record(number, "lines", tallies, **facts)
    work.path(number, "filtered").unlink()


def write_shard(work: BuildFolder, number: int, path: Path, chosen: NDArray[np.bool_]) -> None:
    """.lines → a shard of the corpus with the chosen documents."""
    with atomic_write(path) as file, work.path(number, "lines").open("rb") as lines:
        file.writelines(compress(lines, chosen.tolist()))


def json_lines(shard: Shard) -> bytes:
    """A line of JSON for each document; texts are escaped together, between bytes that no UTF-8
    has.
    """
    escaped = b"\xff".join(shard.texts.all_encoded())
    codes = np.frombuffer(escaped, np.uint8)
    for sign in ("\\", '"', *map(chr, {*codes[codes < ord(" ")].tolist()})):
        escaped = escaped.replace(sign.encode(), quoted(sign)[1:-1].encode())
    urls = (f', "url": {quoted(url)}' if url else "" for url in shard.urls)
    about = (map(quoted, shard.sources), map(quoted, shard.places), urls)
    ends = "\0".join(
        f'", "source": {source}, "place": {place}{url}}}\n'
        for source, place, url in zip(*about, strict=True)
    )
    columns = (repeat(b'{"text": "'), escaped.split(b"\xff"), ends.encode().split(b"\0"))
    return b"".join(chain.from_iterable(zip(*columns, strict=False)))


@cache
def _selection(work: BuildFolder) -> tuple[LinkList | None, frozenset[str]]:
    path = work.folder / "links.npz"
    links = LinkList(**read_arrays(path)) if path.is_file() else None
    return links, blocked_domains(work.config)


def _loaded(load: Callable[[Path], Loaded]) -> Callable[[Path], Loaded]:
    """Loads a file once, and again when it has changed."""
    cached = lru_cache(maxsize=1)(lambda path, changed: load(path))
    return lambda path: cached(path, path.stat().st_mtime_ns)


_menus = _loaded(read_account)
_scorer = _loaded(lambda path: QualityScorer(**read_arrays(path)))
_benchmarks = _loaded(lambda path: BenchmarkSets({int(n): a for n, a in read_arrays(path).items()}))


# ------------------------------------------------------------------ executors

ShardJob = tuple[Callable[..., None], tuple[Any, ...]]


class Pool(NamedTuple):
    """Runs functions somewhere else, and how many to hand out before waiting for one."""

    submit: Callable[..., Future[Any]]
    ahead: int

    def run(self, jobs: Iterable[ShardJob], verb: str, total: int | None = None) -> None:
        """Runs every job; reports progress as `verb`. Finding the jobs may use the same pool."""
        report_progress(Progress(verb, 0, total, "shards"))
        for number, _ in enumerate(self._finished(jobs), 1):
            report_progress(Progress(verb, number, total, "shards"))

    def _finished(self, jobs: Iterable[ShardJob]) -> Iterator[None]:
        waiting: set[Future[None]] = set()
        for do, arguments in jobs:
            waiting.add(self.submit(do, *arguments))
            if len(waiting) >= self.ahead:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        for future in waiting:
            yield future.result()


@dataclass(frozen=True)
class Execution:
    """Where the jobs of a build run, and which of them: all, or one part of several."""

    workers: int = 1
    executor: str = "processes"
    part: str = ""  # "3/16": every 16th shard from the third on, for an array of 16 cluster jobs

    def __post_init__(self) -> None:
        require_that(self.workers >= 1, "{workers} workers: give at least 1.", workers=self.workers)
        require_known(self.executor, EXECUTORS, "There is no executor {name!r}.{hint}")
        part_slice(self.part)

    def owns(self, shard: int) -> bool:
        return shard in range(shard + 1)[part_slice(self.part)]

    def pool(self) -> AbstractContextManager[Pool]:
        """Workers for a whole build: a new one spends longer on tables than on a small shard."""
        return EXECUTORS[self.executor](self.workers)


@contextmanager
def _processes(workers: int) -> Iterator[Pool]:
    """This process itself if there is one worker."""
    if workers == 1:
        yield Pool(run_now, 1)
        return
    with ProcessPoolExecutor(workers, _start_method(), initializer=_begin) as pool:
        try:
            yield Pool(pool.submit, 2 * workers)
        except BrokenProcessPool as error:
            raise MalmoiError(
                "A worker was killed, perhaps because memory ran out: run the same command again "
                "with fewer --workers."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start_method() -> BaseContext:
    """Not a fork of this process, which could inherit a held lock; Windows has only spawn."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing.forkserver import ensure_running  # not on Windows

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["malmoi.corpus.steps"])
    ensure_running()  # it imports while this process reads the first shard
    return context


def _begin() -> None:
    """Leaves Ctrl-C to the parent; a worker exits with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


@contextmanager
def _ray_tasks(workers: int) -> Iterator[Pool]:
    """Tasks of a running Ray cluster, or of one of `workers` CPUs that is started on this machine.

    The folder of the build must be at the same path on every machine.
    """
    ray = optional_package("ray", "The executor ray")
    mine = not ray.is_initialized()
    if mine:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:  # no cluster is running
            ray.init(num_cpus=workers, include_dashboard=False, **quiet)
    try:
        yield Pool(
            lambda do, *given: ray.remote(do).remote(*given).future(),
            2 * int(ray.cluster_resources().get("CPU", workers)),
        )
    except ray.exceptions.RayTaskError as error:
        # the job's own exception, without Ray's traceback
        raise error.cause from error
    finally:
        if mine:
            ray.shutdown()


EXECUTORS: dict[str, Callable[[int], AbstractContextManager[Pool]]] = {
    "processes": _processes,
    "ray": _ray_tasks,
}
