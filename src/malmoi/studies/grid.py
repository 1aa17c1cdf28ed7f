"""Runs the cells of a study: a cell is a recipe, a seed and a judge, and is run once.

A result is cached under the hash of the recipe, the text, the judge and the files that the judge
reads, so that an interrupted study resumes and studies with one cache share their models.
"""

import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from malmoi import __version__
from malmoi.errors import MalmoiError
from malmoi.model import count_parameters
from malmoi.settings import Config
from malmoi.studies.data import StudyData, StudyTask
from malmoi.studies.scale import Scale
from malmoi.studies.table import Claim, StudyResults, Values, Words, dot_figure
from malmoi.system.files import folder_lock, write_json
from malmoi.system.language import plural
from malmoi.system.machine import this_machine
from malmoi.system.progress import Progress, listening, report_progress
from malmoi.system.run_folder import read_metrics
from malmoi.system.untrusted import read_object
from malmoi.text.documents import read_documents
from malmoi.text.sentences import sentence_splitter
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.data.encode import build_stores
from malmoi.training.pretrain import LONG_MINUTES, run_pretraining
from malmoi.training.recipe import Recipe
from malmoi.training.run_tokenizer import SPECIAL
from malmoi.training.signals import Stopped, StopSignals

logger = logging.getLogger(__name__)

ONLY_FOR_TRAINING = ("train_state", "data")  # folders of a run that no judge reads


@dataclass(frozen=True)
class JudgedModel:
    """Input of a judge: the folder of the pre-trained model, and a scratch folder."""

    folder: Path
    scratch: Path
    seed: int
    device: str | None = None

    def facts(self) -> dict[str, Any]:
        """Parameters, tokens, steps, seconds and valid_loss of the pre-training."""
        return dict(read_object(self.folder / "facts.json"))


@dataclass(frozen=True)
class Cell:
    """One row of the table with one seed: a recipe, its training text, and a judge.

    The judge is `partial(function, **options)` of a function at the top of a module, called with a
    `JudgedModel`; it returns a number for each of its columns. Without a recipe nothing is
    pre-trained, and the judge's `folder` is its scratch folder.
    """

    row: str
    seed: int
    judge: "partial[dict[str, float]]"
    recipe: Recipe | None = None
    text: tuple[str, ...] = ()

    @cached_property
    def model_key(self) -> str:
        if self.recipe is None:
            return ""
        return _digest([{**self.recipe.to_dict(), "about": ""}, *self.sources])

    @property
    def sources(self) -> list[str | Path]:
        """The text sources; files are identified by their content."""
        return [Path(one) if Path(one).exists() else one for one in self.text]

    @cached_property
    def key(self) -> str:
        return _digest([self.model_key, self.seed, self.judge])


def _digest(value: object) -> str:
    text = json.dumps([__version__, _plain(value)], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _plain(value: object) -> object:
    """A value as JSON; a file is identified by its content, a function by its name."""
    if isinstance(value, partial):
        named = f"{value.func.__module__}.{value.func.__qualname__}"
        return [named, _plain(value.args), _plain(value.keywords)]
    if isinstance(value, Path):
        files = sorted(p for p in value.rglob("*") if p.is_file()) if value.is_dir() else [value]
        return [_content(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if isinstance(value, Config):
        return _plain(value.to_dict())
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


@cache
def _content(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:20]


@dataclass(frozen=True)
class StudyPlan:
    """Everything that the cells of a study depend on."""

    scale: Scale
    data: StudyData
    seeds: Sequence[int]

    def tasks(self, *roles: str) -> list[StudyTask]:
        """The first available task of each role, cut to the rows that the scale uses."""
        return self.data.of(*roles, train_rows=self.scale.train_rows, dev_rows=self.scale.dev_rows)


@dataclass(frozen=True)
class Study:
    """A paper's table or figure: its cells at a scale, and how their results are shown."""

    name: str
    about: Words
    paper: str  # "Devlin et al. 2019, table 8"
    cells: Callable[[StudyPlan], Iterable[Cell]]
    claims: Callable[[StudyResults], Sequence[Claim]]  # what the paper found
    caption: Words  # of the figure
    theirs: Mapping[str, Values] = field(default_factory=dict)  # row → the paper's numbers
    figure: Callable[[StudyResults], str] = dot_figure
    notes: Callable[[StudyResults], Sequence[Words]] = lambda results: ()  # further sentences


# ------------------------------------------------------------------ one job, in any process


def train_model(cell: Cell, cache: Path, device: str | None) -> None:
    """Pre-trains or resumes a cell's model, and keeps only the files that judges need."""
    if cell.recipe is None:
        return
    folder = cache / "models" / cell.model_key
    with folder_lock(cache / "models" / f"{cell.model_key}.lock", wait=True):
        if (folder / "facts.json").is_file():
            return
        tokenizer, store = _shared_text(cell, cell.recipe, cache)
        if not (folder / "data").is_dir():
            shutil.copytree(store, folder / "data", copy_function=os.link)
        started = time.monotonic()
        model = run_pretraining(
            cell.recipe, data=cell.text, out=folder, tokenizer=tokenizer, device=device
        )
        rows = read_metrics(folder / "metrics.jsonl")
        rows_of_loss = [_losses(row) for row in rows if "valid_loss" in row]
        facts = {
            "parameters": count_parameters(model.network),
            "tokens": rows[-1]["tokens"],
            "steps": rows[-1]["step"],
            "seconds": time.monotonic() - started,
            **(rows_of_loss[-1] if rows_of_loss else {}),
        }
        for name in ONLY_FOR_TRAINING:
            shutil.rmtree(folder / name, ignore_errors=True)
        write_json(folder / "facts.json", facts)


def _losses(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.endswith("_loss")}


def _shared_text(cell: Cell, recipe: Recipe, cache: Path) -> tuple[Path, Path]:
    """The tokenizer and the encoded text that several models share, created once."""
    wanted = recipe.tokenizer
    special = SPECIAL.get(recipe.samples, "none")
    made_of = [wanted, special, *cell.sources]
    folder = cache / "tokenizers" / _digest(made_of)
    with folder_lock(folder, wait=True):
        if not (folder / "tokenizer.json").is_file():
            texts = (document.text for document in read_documents(cell.text))
            trained = train_tokenizer(
                texts,
                kind=wanted.kind,
                vocab=wanted.vocab,
                lowercase=wanted.lowercase,
                special=special,
                morphemes=wanted.morphemes,
            )
            trained.save(folder)
    words = Tokenizer.load(folder)
    windows = recipe.in_windows
    store = cache / "stores" / _digest([made_of, windows, recipe.data.valid])
    build_stores(
        read_documents(cell.text, documents=recipe.data.documents),
        words,
        store,
        sentences=None if windows else sentence_splitter(recipe.data.sentences),
        valid=recipe.data.valid,
        end=words.specials.eos if windows else None,
    )
    return folder, store


def judge_cell(cell: Cell, cache: Path, device: str | None) -> None:
    """Runs the judge of a cell and saves its results."""
    scratch = cache / "scratch" / cell.key
    scratch.mkdir(parents=True, exist_ok=True)
    folder = cache / "models" / cell.model_key if cell.model_key else scratch
    started = time.monotonic()
    judged = JudgedModel(folder, scratch, cell.seed, device)
    values = {name: float(value) for name, value in cell.judge(judged).items()}
    facts = {**(judged.facts() if cell.model_key else {})}
    facts["judge_seconds"] = time.monotonic() - started
    record = {"row": cell.row, "seed": cell.seed, "values": values, "facts": facts}
    write_json(result_path(cell, cache), record)
    shutil.rmtree(scratch)


def result_path(cell: Cell, cache: Path) -> Path:
    return cache / "cells" / f"{cell.key}.json"


# ------------------------------------------------------------------ all of them


class _Here(Executor):
    """Executor that runs a job immediately in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            with quietly(), listening(lambda event: None):
                done.set_result(fn(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


@contextmanager
def quietly() -> Iterator[None]:
    """Silences the logs of single runs, of which a study has many."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _worker_ready(threads: int) -> None:
    import torch

    # signals are handled by the main process; training in a worker also saves and stops on its own
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)


def _executor(workers: int) -> Executor:
    if workers <= 1:
        return _Here()
    threads = max(1, this_machine().cores // workers)
    return ProcessPoolExecutor(workers, get_context("spawn"), _worker_ready, (threads,))


@dataclass(frozen=True)
class Job:
    """Work for a worker process: train a model, or run the judge of a cell."""

    cell: Cell
    judges: bool


def do_job(job: Job, cache: Path, device: str | None) -> int:
    """Returns the number of the signal that stopped it, or 0; `Stopped` itself does not pickle."""
    try:
        (judge_cell if job.judges else train_model)(job.cell, cache, device)
    except Stopped as stopped:
        return stopped.code - 128
    finally:
        _free_gpu_memory()
    return 0


def _free_gpu_memory() -> None:
    """Releases the allocator's cached GPU memory, because other workers share the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass
class Grid:
    """Schedules the unfinished cells: models are trained before they are judged."""

    cells: Sequence[Cell]
    cache: Path
    workers: int = 1
    device: str | None = None
    deadline: float = float("inf")  # in time.monotonic(): nothing new starts after it
    waiting: list[Cell] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)  # keys of models
    begun: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        """Runs the missing cells and returns one message for each failed cell."""
        for name in ("models", "cells"):
            (self.cache / name).mkdir(parents=True, exist_ok=True)
        # studies may share cells
        missing = {c.key: c for c in self.cells if not result_path(c, self.cache).is_file()}
        self.waiting = list(missing.values())
        self.trained = {c.model_key for c in self.waiting if self._is_trained(c)}
        self.begun = set(self.trained)
        try:
            with StopSignals() as stop, _executor(self.workers) as pool:
                self._run(pool, stop)
        except BrokenExecutor as error:
            self.failed.append(f"a worker process died: {error}")
        return self.failed

    def _run(self, pool: Executor, stop: StopSignals) -> None:
        total = len(self.waiting)
        began = time.monotonic()
        running: dict[Future[Any], Job] = {}
        while self.waiting or running:
            while len(running) < self.workers and time.monotonic() < self.deadline:
                job = self._next()
                if job is None:
                    break
                running[pool.submit(do_job, job, self.cache, self.device)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self._note(running.pop(future), future.exception())
                if number := stop.number or (0 if future.exception() else future.result()):
                    raise Stopped(number)  # after running cells have saved their state
            left = len(self.waiting) + sum(job.judges for job in running.values())
            report_progress(Progress("study", total - left, total, "cells"))
            minutes = left * (time.monotonic() - began) / max(1, total - left) / 60
            if total - left == 1 and minutes > LONG_MINUTES:
                logger.info(
                    f"The other {plural(left, 'cell')} will take about "
                    f"{plural(round(minutes), 'minute')}; --seeds 1 runs fewer."
                )

    def _note(self, job: Job, error: BaseException | None) -> None:
        """Records a finished job; if a model failed to train, its cells fail too."""
        cell = job.cell
        if error is None:
            self.trained |= set() if job.judges else {cell.model_key}
            return
        self.failed.append(f"{cell.row}, seed {cell.seed}: {error}")
        logger.warning(self.failed[-1], exc_info=None if isinstance(error, MalmoiError) else error)
        if not job.judges:
            self.waiting = [c for c in self.waiting if c.model_key != cell.model_key]

    def _is_trained(self, cell: Cell) -> bool:
        if not cell.model_key:
            return True
        return (self.cache / "models" / cell.model_key / "facts.json").is_file()

    def _next(self) -> Job | None:
        """The next job: a cell whose model is trained, otherwise a model to train.

        Models with a time budget come first and share the machine only with each other: beside
        judges, some of them would get fewer steps from the same minutes.
        """
        timed = [cell for cell in self.waiting if _by_the_clock(cell)]
        if any(cell.model_key not in self.trained for cell in timed):
            return self._next_model(timed)
        for cell in self.waiting:
            if cell.model_key in self.trained:
                self.waiting.remove(cell)
                return Job(cell, judges=True)
        return self._next_model(self.waiting)

    def _next_model(self, cells: Sequence[Cell]) -> Job | None:
        for cell in cells:
            if cell.model_key not in self.begun:
                self.begun.add(cell.model_key)
                return Job(cell, judges=False)
        return None


def _by_the_clock(cell: Cell) -> bool:
    return cell.recipe is not None and cell.recipe.train.minutes > 0


def finished_cells(cells: Sequence[Cell], cache: Path) -> list[dict[str, Any]]:
    """Records of the finished cells."""
    paths = {cell: result_path(cell, cache) for cell in cells}
    return [
        {**read_object(path), "row": cell.row} for cell, path in paths.items() if path.is_file()
    ]
