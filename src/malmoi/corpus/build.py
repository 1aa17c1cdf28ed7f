"""From raw text to a corpus worth pre-training on: read, clean, filter, rate, de-duplicate, decontaminate, mix.

Shards go through the steps on several processes; what needs all shards at once (menus, the classifier, duplicates,
shares) lies between. Every file says when it is whole, so a build that was killed goes on.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus import mix, stages
from malmoi.corpus.clean import clean, menus
from malmoi.corpus.control import total_control_names
from malmoi.corpus.decontaminate import ExamSets
from malmoi.corpus.dedup import duplicates
from malmoi.corpus.folder import begin, run_folder
from malmoi.corpus.language import check as language_check
from malmoi.corpus.named import Named, files, named
from malmoi.corpus.quality import Scorer, some
from malmoi.corpus.read import Document, read
from malmoi.corpus.settings import CorpusConfig
from malmoi.corpus.stages import Work, read_json
from malmoi.corpus.tally import total
from malmoi.corpus.workers import Job, work_on
from malmoi.disk import alone, write_json, written
from malmoi.errors import MalmoiError, UsageError
from malmoi.run_folder import FINISHED

STEPS = {
    "clean": "clean",
    "menus": "sift",
    "filter": "sift",
    "quality": "sift",
    "dedup": "clear",
    "decontaminate": "clear",
}


@dataclass(frozen=True)
class Plan:
    """One build: from what, where to, how."""

    sources: list[Named]
    good: list[str]
    against: list[Path]
    out: Path
    config: CorpusConfig
    workers: int
    say: Callable[[str], None]

    @property
    def work(self) -> Work:
        return Work(self.out / "work", self.config)

    def record(self) -> dict[str, Any]:
        """What decides the result."""
        return {
            "settings": self.config.to_dict(),
            "sources": [source.about() for source in self.sources],
            "good": read(self.good).fingerprint() if self.good else "",
            "against": read(list(map(str, self.against))).fingerprint() if self.against else "",
        }


def build(
    sources: Sequence[str],
    out: str | Path,
    *,
    good: Sequence[str] = (),
    against: Sequence[str] = (),
    workers: int = 1,
    again: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    **settings: Any,
) -> dict[str, Any]:
    """Writes out/shard-NNNNN.jsonl and out/corpus.json, which is returned: settings, sources, what each step did.

    A source is what `read` takes, or NAME=SOURCE. `good` text teaches the quality classifier, `against` are the test
    sets whose words must go. A build that was stopped goes on; another one in the same folder is refused, unless
    `again`.
    """
    config = CorpusConfig().override(settings)
    plan = Plan(named(sources, config), list(good), files(against), Path(out), config, workers, say)
    _check(plan)
    record = plan.record()
    # while it is made it takes up to three times the text
    with alone(plan.out):
        found = begin(plan.out, record, again=again)
        if FINISHED in found:
            say(f"{plan.out} is finished; --again (again=True) would start it anew.")
        else:
            run_folder(plan.out).finish(record, _work(plan))
            found = run_folder(plan.out).read()
        shutil.rmtree(plan.work.folder, ignore_errors=True)
    return found


def _check(plan: Plan) -> None:
    language_check(plan.config.language)
    if plan.workers < 1:
        raise UsageError(f"{plan.workers} workers can do nothing: give at least 1.")
    if plan.config.weights:
        mix.weights(plan.config.weights, [source.name for source in plan.sources])
    for source in plan.sources:
        if clash := source.clash(plan.out):
            raise UsageError(f"{plan.out} and {clash} lie in one another; write the corpus to a folder of its own.")


def _work(plan: Plan) -> dict[str, Any]:
    """All steps; every one begins where it was stopped."""
    about = _read(plan)
    shards = range(about["shards"])
    _prepare(plan, shards)
    _run(plan, "sift", [(stages.sift_shard, (plan.work, n)) for n in shards if not plan.work.is_done(n, "sift")])
    twins = _twins(plan, shards)
    jobs = [(stages.clear_shard, (plan.work, n, twins[n])) for n in shards if not plan.work.is_done(n, "clear")]
    _run(plan, "clear", jobs)
    steps = {step: total(plan.work.account(n, stage)[step] for n in shards) for step, stage in STEPS.items()}
    told = {step: tally.to_dict() for step, tally in steps.items() if tally.documents[0]}
    # a shard that was finished before they were counted has no such account
    control = total_control_names(found for n in shards if (found := plan.work.account(n, "clear").get("control")))
    return {"bad": about["bad"], "steps": told, "control": control, "mix": _mix(plan, shards)}


def _run(plan: Plan, step: str, jobs: Sequence[Job]) -> None:
    if jobs:
        plan.say(f"{step}: {len(jobs):,} shards")
        work_on(jobs, min(plan.workers, len(jobs)))


# ------------------------------------------------------------------ read and clean


def _read(plan: Plan) -> dict[str, Any]:
    """Cuts the sources into shards of raw documents and cleans them; how many there are, and the bad lines."""
    path = plan.work.folder / "read.json"
    if path.is_file():
        return read_json(path)
    plan.say("read and clean")
    found = Counter[str]()
    work_on(_clean_jobs(plan, found), plan.workers)
    if not found["documents"]:
        raise MalmoiError("There is no text in the sources.")
    about = {"shards": found["shards"], "bad": [line for source in plan.sources for line in source.reader.describe()]}
    write_json(path, about)
    return about


def _clean_jobs(plan: Plan, found: Counter[str]) -> Iterator[Job]:
    for number, documents in enumerate(_shards(plan.sources, plan.config.shard)):
        found.update(shards=1, documents=len(documents))
        if not plan.work.is_done(number, "clean"):
            yield stages.clean_shard, (plan.work, number, documents)


def _shards(sources: Sequence[Named], size: int) -> Iterator[list[Document]]:
    documents: list[Document] = []
    characters = 0
    for source in sources:
        for document in source.reader:
            documents.append(replace(document, source=source.name))
            characters += len(document.text)
            if characters >= size:
                yield documents
                documents, characters = [], 0
    if documents:
        yield documents


# ------------------------------------------------------------------ what needs all shards at once


def _prepare(plan: Plan, shards: range) -> None:
    """What sifting and clearing look up: menus, the classifier, the test sets."""
    work = plan.work
    if not (work.folder / "menus.json").is_file():
        write_json(work.folder / "menus.json", _menus(work, shards))
    if plan.good and not (work.folder / "quality.npy").is_file():
        plan.say("learn quality")
        with written(work.folder / "quality.npy") as file:
            np.save(file, _scorer(plan, shards).weights)
    if plan.against and not (work.folder / "against.npz").is_file():
        with written(work.folder / "against.npz") as file:
            ExamSets.of(plan.against).save(file)


def _menus(work: Work, shards: range) -> dict[str, list[str]]:
    lines: dict[str, Counter[str]] = {}
    documents = Counter[str]()
    for number in shards:
        account = work.account(number, "clean")
        documents.update(account["sources"])
        for source, found in account["lines"].items():
            lines.setdefault(source, Counter()).update(found)
    return {source: menus(found, documents[source], work.config) for source, found in lines.items()}


def _scorer(plan: Plan, shards: range) -> Scorer:
    """Learns good text from raw text, as it is after cleaning."""
    number, seed = plan.config.examples, plan.config.seed
    raw = chain.from_iterable(plan.work.documents(n, "clean") for n in shards)
    size = sum(sum(plan.work.account(n, "clean")["sources"].values()) for n in shards)
    good = read(plan.good, documents=plan.config.documents, text=plan.config.text)
    chosen = some(good, sum(1 for _ in good), number)
    return Scorer.learn([clean(text) for text in chosen], some(raw, size, number), seed)


def _twins(plan: Plan, shards: range) -> list[NDArray[np.uint8]]:
    """Of every document of every shard: 0 it stays, 1 one before it has the same words, 2 similar words."""
    work, path = plan.work, plan.work.folder / "twins.npy"
    sizes = [work.account(n, "sift")["documents"] for n in shards]
    if not path.is_file():
        plan.say("compare")
        with written(path) as file:
            np.save(file, _compared(work, shards, sum(sizes)))
    return np.split(np.load(path), np.cumsum(sizes)[:-1])


def _compared(work: Work, shards: range, size: int) -> NDArray[np.uint8]:
    if "dedup" not in work.config.steps:
        return np.zeros(size, np.uint8)
    exact, signatures = np.zeros(size, np.uint64), np.zeros((size, work.config.hashes), np.uint32)
    begin = 0
    for number in shards:
        with np.load(work.path(number, "marks.npz")) as found:
            end = begin + len(found["exact"])
            exact[begin:end], signatures[begin:end] = found["exact"], found["signatures"]
            begin = end
    equal, nearly = duplicates(exact, signatures, work.config)
    return np.where(equal >= 0, 1, np.where(nearly >= 0, 2, 0)).astype(np.uint8)


# ------------------------------------------------------------------ mix and write


def _mix(plan: Plan, shards: range) -> dict[str, Any]:
    """Writes the corpus: one pass after another, so that the copies of a document lie far apart."""
    accounts = [plan.work.account(n, "clear") for n in shards]
    names = [name for account in accounts for name in account["source"]]
    characters = np.array([size for account in accounts for size in account["characters"]], np.int64)
    draws = np.array([draw for account in accounts for draw in account["draws"]], np.uint64)
    if not len(characters):
        raise MalmoiError(f"Nothing is left of the sources: {plan.out / 'work'} has what each step dropped.")
    sources = np.array(names)
    copies, shares = _copies(plan, sources, characters, draws)
    parts = np.split(copies, np.cumsum([len(account["source"]) for account in accounts])[:-1])
    for sentence in filter(None, (share.missed() for share in shares)):
        plan.say(sentence)
    return {"shards": _write(plan, parts), "shares": [asdict(share) for share in shares]}


def _copies(
    plan: Plan, sources: NDArray[np.str_], characters: NDArray[np.int64], draws: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], list[mix.Share]]:
    """How often each document is written, and what that makes of each source."""
    names = [source.name for source in plan.sources]
    have = {name: int(characters[sources == name].sum()) for name in names}
    wanted = {name: have[name] / sum(have.values()) for name in names}
    if plan.config.weights:
        wanted = mix.weights(plan.config.weights, names)
    size = plan.config.size if plan.config.size and plan.config.weights else sum(have.values())
    epochs = mix.epochs_of(have, wanted, size) if plan.config.weights else dict.fromkeys(names, 1.0)
    copies = np.zeros(len(sources), np.int64)
    for name in names:
        copies[sources == name] = mix.copies(characters[sources == name], draws[sources == name], epochs[name])
    return copies, _shares(sources, characters, copies, epochs, wanted)


def _shares(
    sources: NDArray[np.str_],
    characters: NDArray[np.int64],
    copies: NDArray[np.int64],
    epochs: Mapping[str, float],
    wanted: Mapping[str, float],
) -> list[mix.Share]:
    after = int((copies * characters).sum())
    shares = []
    for name, times in epochs.items():
        here = sources == name
        documents = int(here.sum()), int(copies[here].sum())
        sizes = int(characters[here].sum()), int((copies * characters)[here].sum())
        shares.append(mix.Share(name, documents, sizes, times, sizes[1] / max(after, 1), wanted[name]))
    return shares


def _write(plan: Plan, copies: Sequence[NDArray[np.int64]]) -> int:
    """The shards of the corpus; how many there are."""
    rounds = range(max((int(part.max()) for part in copies if len(part)), default=0))
    wanted = [(n, part > turn) for turn in rounds for n, part in enumerate(copies) if (part > turn).any()]
    paths = [plan.out / f"shard-{number:05d}.jsonl" for number in range(len(wanted))]
    jobs = [
        (stages.write_shard, (plan.work, n, path, chosen))
        for path, (n, chosen) in zip(paths, wanted, strict=True)
        if not path.is_file()
    ]
    _run(plan, "write", jobs)
    return len(paths)
