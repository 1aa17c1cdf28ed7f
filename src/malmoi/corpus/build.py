"""Builds a corpus: read, select, clean, filter, rate, de-duplicate, decontaminate, mix.

Shards go through the steps one by one, on any executor; in between come the steps that need all
shards at once (menus, the classifier, duplicates, shares). Every write is atomic, so a killed build
resumes.
"""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus import mix, steps as stages
from malmoi.corpus.clean import clean, menus
from malmoi.corpus.columns import (
    IndexArray,
    Shard,
    StepStats,
    describe_rules,
    total_control_names,
    total_stats,
)
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.decontaminate import BenchmarkSets
from malmoi.corpus.duplicates import duplicates
from malmoi.corpus.filter import check_language
from malmoi.corpus.links import LinkList, selection_record
from malmoi.corpus.mix import NamedSource, benchmark_files, named_sources
from malmoi.corpus.ngrams import HashArray
from malmoi.corpus.quality import QualityScorer, sample_texts
from malmoi.corpus.steps import (
    BuildFolder,
    Execution,
    Pool,
    ShardJob,
    read_account,
    read_arrays,
    write_arrays,
)
from malmoi.errors import MalmoiError, UsageError, ensure, explained, require_that
from malmoi.messages import logger
from malmoi.system.files import LOCK_NAME, PARTIAL_SUFFIX, folder_lock, write_json
from malmoi.system.result import PlainValue, Result
from malmoi.system.run_folder import FINISHED, RunFolder
from malmoi.text.documents import DocumentBatch, read_documents

FAILED = "failed"  # in the record of a build that ended in an error
PAGES_AHEAD = 8  # web pages being extracted for each shard being cleaned: a page is small

# The corpus folder, and the record of the build it holds


def corpus_folder(out: Path) -> RunFolder:
    others = {
        "sources": "of other sources",
        "against": "of other test sets",
        "links": "of other link lists",
        "good": "with other reference text",
    }
    return RunFolder(out, "corpus.json", "corpus", can_restart=True, unreadable=others)


def begin_build(out: Path, record: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any]:
    """Opens the folder's record for this build; rejects folders with other builds or files.

    A build that ended in an error is discarded where it is corrected.
    """
    if overwrite or _failed_otherwise(out, record):
        _forget(out)
    # another part of the build may be writing the record
    others = any(not file.name.endswith((LOCK_NAME, PARTIAL_SUFFIX)) for file in out.iterdir())
    require_that(
        not others or (out / "corpus.json").is_file(),
        "{out} is not empty and holds no corpus; choose another folder.",
        out=out,
    )
    found = corpus_folder(out).begin(record)
    (out / "work").mkdir(exist_ok=True)
    return found


def _failed_otherwise(out: Path, record: Mapping[str, Any]) -> bool:
    """Whether the folder holds a build of other settings that ended in an error."""
    before = corpus_folder(out).read()
    return FAILED in before and before != {**json.loads(json.dumps(record)), FAILED: True}


def _forget(out: Path) -> None:
    """Removes the files that a build writes, and nothing else."""
    if not (out / "corpus.json").is_file():
        return
    shutil.rmtree(out / "work", ignore_errors=True)
    for path in (*out.glob("shard-*.jsonl"), out / "corpus.json"):
        path.unlink()


STEP_FILES = {
    **dict.fromkeys(("select", "clean"), "cleaned"),
    **dict.fromkeys(("menus", "filter", "quality"), "filtered"),
    **dict.fromkeys(("dedup", "decontaminate"), "lines"),
}


@dataclass(frozen=True)
class CorpusPlan:
    """One build: its sources, output folder and settings."""

    sources: list[NamedSource]
    quality_reference: list[str]
    decontaminate: list[Path]
    out: Path
    config: CorpusConfig
    execution: Execution
    pool: Pool

    @property
    def work(self) -> BuildFolder:
        return BuildFolder(self.out / "work", self.config)

    def lock(self) -> AbstractContextManager[None]:
        """For what all parts of the build share."""
        return folder_lock(self.work.folder / "shared", wait=True)

    def record(self) -> dict[str, Any]:
        """Everything that determines the result."""
        return {
            "settings": self.config.to_dict(),
            "sources": [source.about() for source in self.sources],
            "good": _fingerprint(self.quality_reference),
            "against": _fingerprint(list(map(str, self.decontaminate))),
            **selection_record(self.config),
        }


def _fingerprint(sources: list[str]) -> str:
    return read_documents(sources).fingerprint() if sources else ""


@dataclass(frozen=True, repr=False)
class CorpusResult(Result):
    """A finished corpus: its folder, the statistics of each step, and all of corpus.json."""

    out: Path
    shards: int
    steps: dict[str, StepStats]
    record: dict[str, PlainValue] = field(repr=False)

    @classmethod
    def of(cls, out: Path, record: dict[str, Any]) -> "CorpusResult":
        done = record.get(FINISHED, {"steps": {}, "mix": {"shards": 0}})  # of a part: not yet
        steps = {name: total_stats([stats]) for name, stats in done["steps"].items()}
        return cls(out, done["mix"]["shards"], steps, record)


def run_build(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    quality_reference: Sequence[str] = (),
    decontaminate: Sequence[str] = (),
    execution: Execution | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Writes out/shard-NNNNN.jsonl and out/corpus.json, and returns the latter.

    A source is anything `read_documents` takes, or NAME=SOURCE. `quality_reference` trains the
    quality classifier; overlaps with the `decontaminate` test sets are removed. A stopped build
    resumes; another build in the same folder is refused unless `overwrite`.
    """
    config = CorpusConfig().override(settings)
    execution = execution or Execution()
    with execution.pool() as pool:
        plan = CorpusPlan(
            named_sources(sources, config),
            list(quality_reference),
            benchmark_files(decontaminate),
            Path(out),
            config,
            execution,
            pool,
        )
        _check(plan)
        return _run_plan(plan, overwrite=overwrite)


def _run_plan(plan: CorpusPlan, *, overwrite: bool) -> dict[str, Any]:
    record = plan.record()
    part = plan.execution.part
    require_that(
        not part or not overwrite,
        "One part cannot discard a build: give --overwrite without --part.",
    )
    # a build needs up to three times the size of the text
    with folder_lock(plan.out, shared=bool(part)):
        found = begin_build(plan.out, record, overwrite=overwrite)
        if FINISHED in found:
            logger.info(
                "{out} is finished; --overwrite (overwrite=True) discards it and starts over.",
                out=plan.out,
            )
        elif part:
            with folder_lock(plan.work.folder / f"part-{part.replace('/', '-of-')}"):
                _work_on_part(plan)
            return found
        else:
            try:
                corpus_folder(plan.out).finish(record, _work(plan))
            except MalmoiError:
                write_json(corpus_folder(plan.out).path, {**record, FAILED: True})
                raise
            found = corpus_folder(plan.out).read()
        if not part:
            shutil.rmtree(plan.work.folder, ignore_errors=True)
    return found


def _check(plan: CorpusPlan) -> None:
    check_language(plan.config.language)
    if plan.config.weights:
        mix.parse_weights(plan.config.weights, [source.name for source in plan.sources])
    out = plan.out
    for clash in filter(None, (source.clash(out) for source in plan.sources)):
        raise UsageError("{out} and {clash} overlap; use another folder.", out=out, clash=clash)


def _work(plan: CorpusPlan) -> dict[str, Any]:
    """Runs all steps, each resuming where it stopped."""
    about = _read(plan)
    shards = range(about["shards"])
    _filter(plan, shards)
    _finalize(plan, shards)
    steps = {
        step: total_stats(plan.work.account(n, stage)[step] for n in shards)
        for step, stage in STEP_FILES.items()
    }
    return {
        "bad": about["bad"],
        "steps": {step: one.to_dict() for step, one in steps.items() if one.documents[0]},
        "control": total_control_names(plan.work.account(n, "lines")["control"] for n in shards),
        "mix": _mix(plan, shards, steps),
    }


def _work_on_part(plan: CorpusPlan) -> None:
    """Processes this part's shards up to the next step that needs the other parts."""
    shards = range(_read(plan)["shards"])
    for step, do_next in (("cleaned", _filter), ("filtered", _finalize)):
        if left := sum(not plan.work.is_done(n, step) for n in shards):
            logger.info(
                "Part {part} waits for {left:,} shards of others: when all parts have ended, run "
                "them again.",
                part=plan.execution.part,
                left=left,
            )
            return
        do_next(plan, shards)
    logger.info(
        "Part {part} is done: when all are, the same command without --part writes the corpus.",
        part=plan.execution.part,
    )


def _filter(plan: CorpusPlan, shards: range) -> None:
    with plan.lock():
        _prepare(plan, shards)
    _run(
        plan,
        "filter",
        [(stages.filter_shard, (plan.work, n)) for n in _left(plan, "filtered", shards)],
    )


@explained(
    (KeyError, FileNotFoundError),
    "The unfinished build in this folder cannot go on ({reason}): another version of Malmoi left "
    "it, or files of it are gone. Start over with --overwrite (overwrite=True).",
)
def _finalize(plan: CorpusPlan, shards: range) -> None:
    with plan.lock():
        twins = _find_duplicates(plan, shards)
    left = _left(plan, "lines", shards)
    _run(plan, "deduplicate", [(stages.finalize_shard, (plan.work, n, twins[n])) for n in left])


def _left(plan: CorpusPlan, step: str, shards: range) -> list[int]:
    return [n for n in shards if plan.execution.owns(n) and not plan.work.is_done(n, step)]


def _run(plan: CorpusPlan, step: str, jobs: Sequence[ShardJob]) -> None:
    if jobs:
        plan.pool.run(jobs, step, len(jobs))


# ------------------------------------------------------------------ read and clean


def _read(plan: CorpusPlan) -> dict[str, Any]:
    """Splits the sources into shards of raw documents and cleans them."""
    path = plan.work.folder / "read.json"
    # another part may have read all sources, and cleaned only its own shards
    if path.is_file() and not _left(plan, "cleaned", range(read_account(path)["shards"])):
        return read_account(path)
    if plan.config.links:
        with plan.lock():
            write_arrays(
                plan.work.folder / "links.npz",
                vars(LinkList.read(Path(plan.config.links), plan.config.min_score)),
            )
    found = Counter[str]()
    plan.pool.run(_clean_jobs(plan, found), "read and clean")
    bad = [line for source in plan.sources for line in source.reader.describe()]
    for line in bad:
        logger.info(line)
    ensure(found["documents"], "There is no text in the sources.")
    about = {"shards": found["shards"], "bad": bad}
    with plan.lock():
        write_json(path, about)
    return about


def _clean_jobs(plan: CorpusPlan, found: Counter[str]) -> Iterator[ShardJob]:
    for number, batches in enumerate(_shards(plan.sources, plan.config.shard, plan.pool)):
        found.update(shards=1, documents=sum(len(batch.texts) for batch in batches))
        if plan.execution.owns(number) and not plan.work.is_done(number, "cleaned"):
            yield stages.clean_shard, (plan.work, number, Shard.of(batches))


def _shards(sources: Sequence[NamedSource], size: int, pool: Pool) -> Iterator[list[DocumentBatch]]:
    """The documents of one shard after another: as many as reach `size` characters."""
    shard: list[DocumentBatch] = []
    left = size
    for source in sources:
        for batch in source.reader.batches(pool.submit, PAGES_AHEAD * pool.ahead):
            rest = batch._replace(source=source.name)
            while sum(map(len, rest.texts)) >= left:
                reach = enumerate(accumulate(map(len, rest.texts)), 1)
                last, rest = rest.split(next(texts for texts, total in reach if total >= left))
                yield [*shard, last]
                shard = []
                left = size
            left -= sum(map(len, rest.texts))
            shard.append(rest)
    if any(batch.texts for batch in shard):
        yield shard


# ------------------------------------------------------------------ steps that need all shards


def _prepare(plan: CorpusPlan, shards: range) -> None:
    """Prepares inputs of the filter and the final step: menus, the classifier, the test sets."""
    work = plan.work
    if not (work.folder / "menus.json").is_file():
        write_json(work.folder / "menus.json", _menus(work, shards))
    if plan.quality_reference and not (work.folder / "quality.npz").is_file():
        logger.info("Training the quality classifier …")
        write_arrays(work.folder / "quality.npz", vars(_scorer(plan, shards)))
    if plan.decontaminate and not (work.folder / "against.npz").is_file():
        runs = BenchmarkSets.of(plan.decontaminate).runs
        write_arrays(work.folder / "against.npz", {str(n): known for n, known in runs.items()})


def _menus(work: BuildFolder, shards: range) -> dict[str, list[str]]:
    lines: dict[str, Counter[str]] = {}
    documents = Counter[str]()
    for number in shards:
        account = work.account(number, "cleaned")
        documents.update(account["sources"])
        for source, found in account["lines"].items():
            lines.setdefault(source, Counter()).update(found)
    return {source: menus(found, documents[source], work.config) for source, found in lines.items()}


def _scorer(plan: CorpusPlan, shards: range) -> QualityScorer:
    """Trains the classifier on reference text against raw text, both cleaned."""
    number = plan.config.examples
    raw = chain.from_iterable(plan.work.documents(n, "cleaned").texts for n in shards)
    size = sum(sum(plan.work.account(n, "cleaned")["sources"].values()) for n in shards)
    c = plan.config
    good = read_documents(plan.quality_reference, documents=c.documents, text=c.text)
    sampled = sample_texts((one.text for one in good), sum(1 for _ in good), number)
    return QualityScorer.fit(list(map(clean, sampled)), sample_texts(raw, size, number), c.seed)


def _find_duplicates(plan: CorpusPlan, shards: range) -> list[NDArray[np.uint8]]:
    """Labels every document of every shard: 0 unique, 1 exact duplicate, 2 near duplicate."""
    work = plan.work
    path = plan.work.folder / "twins.npz"
    sizes = [work.account(n, "filtered")["documents"] for n in shards]
    if not path.is_file():
        logger.info("Looking for duplicates …")
        write_arrays(path, {"twins": _compared(work, shards, sum(sizes))})
    return np.split(read_arrays(path)["twins"], np.cumsum(sizes)[:-1])


def _compared(work: BuildFolder, shards: range, size: int) -> NDArray[np.uint8]:
    if "dedup" not in work.config.steps or not size:
        return np.zeros(size, np.uint8)
    exact = np.zeros(size, np.uint64)
    begin = 0
    with tempfile.TemporaryFile(dir=work.folder) as file:
        # a band is read at a time, so that the same hash of all documents lies together
        hashes = np.memmap(file, np.uint32, "w+", shape=(work.config.hashes, size))
        for number in shards:
            with np.load(work.path(number, "marks.npz")) as found:
                end = begin + len(found["exact"])
                exact[begin:end], hashes[:, begin:end] = found["exact"], found["bands"]
                begin = end
        equal, nearly = duplicates(exact, hashes.T, work.config)
    return np.where(equal >= 0, 1, np.where(nearly >= 0, 2, 0)).astype(np.uint8)


# ------------------------------------------------------------------ mix and write


def _mix(plan: CorpusPlan, shards: range, steps: Mapping[str, StepStats]) -> dict[str, Any]:
    """Writes the corpus in several passes, so that copies of a document are far apart."""
    kept = [_kept_documents(plan, n) for n in shards]
    sources, characters, draws = map(np.concatenate, zip(*kept, strict=True))
    if not len(characters):
        rules = sum((stats.rules for stats in steps.values()), Counter[str]())
        raise MalmoiError(
            "Every document was dropped ({why}): see --set min_words=… and --steps.",
            why=describe_rules(rules),
        )
    copies, shares = _copies(plan, sources, characters, draws)
    parts = np.split(copies, np.cumsum([len(numbers) for numbers, *_ in kept])[:-1])
    for sentence in filter(None, (share.missed() for share in shares)):
        logger.warning(sentence)
    return {"shards": _write(plan, parts), "shares": [asdict(share) for share in shares]}


def _kept_documents(plan: CorpusPlan, shard: int) -> tuple[IndexArray, IndexArray, HashArray]:
    """The number of the source, the characters and the draw of each document of a shard."""
    numbers = {source.name: number for number, source in enumerate(plan.sources)}
    runs = plan.work.account(shard, "lines")["source"]
    found = np.array([(numbers[name], count) for name, count in runs], np.int64).reshape(-1, 2)
    sizes = read_arrays(plan.work.path(shard, "sizes.npz"))
    return np.repeat(*found.T), sizes["characters"], sizes["draws"]


def _copies(
    plan: CorpusPlan, sources: IndexArray, characters: IndexArray, draws: HashArray
) -> tuple[IndexArray, list[mix.SourceShare]]:
    """Computes how often each document is written, and the resulting share of each source."""
    names = [source.name for source in plan.sources]
    have = dict(zip(names, _totals(sources, characters, len(names)), strict=True))
    total = sum(have.values())
    wanted = {name: have[name] / total for name in names}
    epochs = dict.fromkeys(names, 1.0)
    if plan.config.weights:
        wanted = mix.parse_weights(plan.config.weights, names)
        epochs = mix.source_epochs(have, wanted, plan.config.size or total)
    copies = np.zeros(len(sources), np.int64)
    for i, name in enumerate(names):
        here = sources == i
        copies[here] = mix.copy_counts(characters[here], draws[here], epochs[name])
    counted = (np.ones_like(copies), copies, characters, copies * characters)
    columns = [_totals(sources, each, len(names)) for each in counted]
    after = max(sum(columns[-1]), 1)
    return copies, [
        mix.SourceShare(name, (a, b), (c, d), epochs[name], d / after, wanted[name])
        for name, a, b, c, d in zip(names, *columns, strict=True)
    ]


def _totals(sources: IndexArray, values: IndexArray, count: int) -> list[int]:
    return [int(total) for total in np.bincount(sources, values, count)]


def _write(plan: CorpusPlan, copies: Sequence[NDArray[np.int64]]) -> int:
    """Writes the shards of the corpus; returns their number."""
    rounds = range(max((int(part.max()) for part in copies if len(part)), default=0))
    wanted = [
        (n, part > turn) for turn in rounds for n, part in enumerate(copies) if (part > turn).any()
    ]
    paths = [plan.out / f"shard-{number:05d}.jsonl" for number in range(len(wanted))]
    jobs = [
        (stages.write_shard, (plan.work, n, path, chosen))
        for path, (n, chosen) in zip(paths, wanted, strict=True)
        if not path.is_file()
    ]
    _run(plan, "write", jobs)
    return len(paths)
