"""Runs a study in a folder: models are trained, then measured, and nothing is done twice.

A model and a number are kept under the hash of all that they depend on (recipe, text, measure and
the files that it reads), so that an interrupted study resumes and rows share their models.
"""

import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from multiprocessing import active_children, get_context
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from malmoi import __version__
from malmoi.errors import MalmoiError, ensure, require_that
from malmoi.messages import logger, msg, plural, quiet_logs
from malmoi.model import count_parameters
from malmoi.settings import Config
from malmoi.studies.data import StudyData
from malmoi.studies.report import write_pages
from malmoi.studies.study import Cell, JudgedModel, Study, StudyPlan, named_scale, speed
from malmoi.system.files import folder_lock, write_json
from malmoi.system.machine import pick_device, this_machine
from malmoi.system.progress import Progress, listening, report_progress
from malmoi.system.result import PlainValue, Result
from malmoi.system.run_folder import read_metrics
from malmoi.system.untrusted import read_object
from malmoi.text.documents import read_documents
from malmoi.text.sentences import sentence_splitter
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.data.encode import build_stores
from malmoi.training.prepare import SPECIAL
from malmoi.training.pretrain import LONG_MINUTES, run_pretraining
from malmoi.training.recipe import Recipe
from malmoi.training.signals import Stopped, StopSignals

ONLY_FOR_TRAINING = ("train_state", "data")  # folders of a run that no measure reads
MAX_WORKERS = 8  # each takes half a GB


@dataclass(frozen=True, repr=False)
class StudyResult(Result):
    """A finished study: its folder, which holds report.md, and its numbers."""

    name: str
    out: Path
    facts: dict[str, PlainValue] = field(repr=False)

    @property
    def report(self) -> Path:
        return self.out / "report.md"


@dataclass(frozen=True, kw_only=True)
class StudyRunConfig:
    """How a study is run; only `scale` and `seeds` change the results."""

    scale: str = "cpu"
    data: Sequence[str] = ()
    seeds: int = 0  # 0: default of the scale
    workers: int = 1  # cells to run in parallel, each in its own process; 0: see `free_workers`
    device: str | None = None


def free_workers(device: str | None) -> int:
    """One per core, because two threads gain little in such small models; one on a GPU."""
    return min(this_machine().cores, MAX_WORKERS) if pick_device(device).type == "cpu" else 1


def run_study(study: Study, out: Path, options: StudyRunConfig) -> StudyResult:
    """Runs the missing cells, and writes the table, the figure and the pages."""
    scale = named_scale(options.scale)
    kept = out / "cache"
    plan = StudyPlan(scale, StudyData.prepare(kept / "data", options.data, scale.characters))
    seeds = range(options.seeds or scale.seeds)
    cells = study.cells(plan, seeds)
    require_that(
        cells, "The data has no task for the study {name}: give it with --data.", name=study.name
    )
    workers = options.workers or free_workers(options.device)
    with folder_lock(kept):
        failed = run_cells(cells, kept, workers, options.device)
    records = finished_cells(cells, kept)
    logger.info(
        "{study}: {done} of {cells} cells are done.",
        study=study.name,
        done=len(records),
        cells=len(cells),
    )
    facts = write_pages(study, scale.name, seeds, records, out) if records else {}
    ensure(
        not failed,
        "{n} cells failed, the first with: {first}. The same command retries them.",
        n=len(failed),
        first="".join(failed[:1]).rstrip("."),
    )
    return StudyResult(study.name, out, facts)


# ------------------------------------------------------------------ keys


def model_key(cell: Cell) -> str:
    if cell.recipe is None:
        return ""
    return _digest([{**cell.recipe.to_dict(), "about": ""}, *_sources(cell)])


def cell_key(cell: Cell) -> str:
    return _digest([model_key(cell), cell.seed, cell.measure])


def _sources(cell: Cell) -> list[str | Path]:
    """The text sources; files are identified by their content."""
    return [Path(one) if Path(one).exists() else one for one in cell.text]


def _digest(value: object) -> str:
    told = [__version__, value]
    text = json.dumps(told, sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _plain(value: object) -> object:
    """A value for JSON; a file is identified by its content, a function by its name."""
    if isinstance(value, partial):
        return [f"{value.func.__module__}.{value.func.__qualname__}", value.args, value.keywords]
    if isinstance(value, Path):
        files = sorted(p for p in value.rglob("*") if p.is_file()) if value.is_dir() else [value]
        return [_content(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if isinstance(value, Config):
        return value.to_dict()
    assert is_dataclass(value)
    return {f.name: getattr(value, f.name) for f in fields(value)}


@cache
def _content(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:20]


# ------------------------------------------------------------------ one job, in any process


def train_model(cell: Cell, kept: Path, device: str | None) -> None:
    """Pre-trains or resumes a cell's model, and keeps only the files that measures need."""
    assert cell.recipe is not None
    folder = _model_folder(cell, kept)
    tokenizer, store = _shared_text(cell, cell.recipe, kept)
    if not (folder / "data").is_dir():
        shutil.copytree(store, folder / "data", copy_function=os.link)
    started = time.monotonic()
    model = run_pretraining(
        cell.recipe, data=cell.text, out=folder, tokenizer=tokenizer, device=device
    )
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [row for row in rows if "valid_loss" in row][-1:]
    facts = {
        "parameters": count_parameters(model.network),
        "tokens": rows[-1]["tokens"],
        "steps": rows[-1]["step"],
        "seconds": time.monotonic() - started,
        **{name: row[name] for row in losses for name in row if name.endswith("_loss")},
    }
    for name in ONLY_FOR_TRAINING:
        shutil.rmtree(folder / name, ignore_errors=True)
    write_json(folder / "facts.json", facts)


def _model_folder(cell: Cell, kept: Path) -> Path:
    return kept / "models" / model_key(cell)


def _is_trained(cell: Cell, kept: Path) -> bool:
    return cell.recipe is None or (_model_folder(cell, kept) / "facts.json").is_file()


def _shared_text(cell: Cell, recipe: Recipe, kept: Path) -> tuple[Path, Path]:
    """The tokenizer and the encoded text that several models share, created once."""
    wanted = recipe.tokenizer
    special = SPECIAL.get(recipe.samples, "none")
    made_of = [wanted, special, *_sources(cell)]
    folder = kept / "tokenizers" / _digest(made_of)
    with folder_lock(folder, wait=True):
        if not (folder / "tokenizer.json").is_file():
            texts = (document.text for document in read_documents(cell.text))
            train_tokenizer(
                texts,
                lowercase=wanted.lowercase,
                morphemes=wanted.morphemes,
                kind=wanted.kind,
                vocab=wanted.vocab,
                special=special,
            ).save(folder)
    words = Tokenizer.load(folder)
    windows = recipe.causal
    store = kept / "stores" / _digest([made_of, windows, recipe.data.valid])
    build_stores(
        read_documents(cell.text, documents=recipe.data.documents),
        words,
        store,
        sentences=None if windows else sentence_splitter(recipe.data.sentences),
        valid=recipe.data.valid,
        end=words.specials.eos if windows else None,
    )
    return folder, store


def measure_cell(cell: Cell, kept: Path, device: str | None) -> None:
    """Computes the numbers of a cell and saves them."""
    scratch = kept / "scratch" / cell_key(cell)
    scratch.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    folder = scratch if cell.recipe is None else _model_folder(cell, kept)
    judged = JudgedModel(folder, scratch, cell.seed, device)
    values = {name: float(value) for name, value in cell.measure(judged).items()}
    facts = {} if cell.recipe is None else judged.facts()
    facts["judge_seconds"] = time.monotonic() - started
    write_json(
        _result_path(cell, kept),
        {"row": cell.row, "seed": cell.seed, "values": values, "facts": facts},
    )
    shutil.rmtree(scratch)


def _result_path(cell: Cell, kept: Path) -> Path:
    return kept / "cells" / f"{cell_key(cell)}.json"


def finished_cells(cells: Sequence[Cell], kept: Path) -> list[dict[str, Any]]:
    """Records of the finished cells."""
    paths = ((cell.row, _result_path(cell, kept)) for cell in cells)
    return [{**read_object(path), "row": row} for row, path in paths if path.is_file()]


# ------------------------------------------------------------------ all of them

GRACE = 5.0  # seconds


class _Ending(StopSignals):
    """Gives cells that run a few seconds, in which training saves; ends them then, or on a second
    signal, and after as long again the process, which may hang where Python sees no signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timers = (
            threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGTERM)),
            threading.Timer(2 * GRACE, os._exit, (128 + signal.SIGTERM,)),
        )

    def __exit__(self, *exception: object) -> None:
        for timer in self.timers:
            timer.cancel()
        super().__exit__(*exception)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        for worker in active_children():
            worker.kill() if self.number else worker.terminate()
        if self.number:
            raise Stopped(self.number)
        self.number = number
        for timer in self.timers:
            timer.start()
        logger.info("Cells that run have {seconds:g} s to end or to save.", seconds=GRACE)


Job = Callable[[Cell, Path, str | None], None]
Outcome = tuple[Cell, int | BaseException]  # a signal's number (0: none), or an error


def run_cells(
    cells: Sequence[Cell], kept: Path, workers: int = 1, device: str | None = None
) -> list[str]:
    """Trains all missing models, then measures: timed training shares the machine with nothing."""
    for name in ("models", "cells"):
        (kept / name).mkdir(parents=True, exist_ok=True)
    found = {cell_key(cell): cell for cell in cells if not _result_path(cell, kept).is_file()}
    missing = list(found.values())
    models = list({model_key(c): c for c in missing if not _is_trained(c, kept)}.values())
    failed: list[str] = []
    began = time.monotonic()
    try:
        with _Ending() as stop:
            outcomes = _all_outcomes(models, missing, kept, workers, device)
            for ready, (cell, outcome) in enumerate(outcomes, start=1):
                if isinstance(outcome, BaseException):
                    failed.append(f"{cell.row}, seed {cell.seed}: {outcome}")
                    logging.getLogger(__name__).warning(
                        failed[-1], exc_info=None if isinstance(outcome, MalmoiError) else outcome
                    )
                _report(ready, len(models) + len(missing), began)
                if number := stop.number or (outcome if isinstance(outcome, int) else 0):
                    raise Stopped(number)  # after running cells have saved their state
    except BrokenExecutor as error:
        failed.append(msg("a worker process died: {error}", error=error))
    return failed


def _all_outcomes(
    models: Sequence[Cell], cells: Sequence[Cell], kept: Path, workers: int, device: str | None
) -> Iterator[Outcome]:
    """First of the models, then of the cells whose model is there; speeds last and one by one."""
    with closing(_outcomes(train_model, models, kept, workers, device)) as trained:
        yield from trained
    ready = [cell for cell in cells if _is_trained(cell, kept)]
    for timed, at_once in ((False, workers), (True, 1)):
        some = [cell for cell in ready if (cell.measure.func is speed) == timed]
        with closing(_outcomes(measure_cell, some, kept, at_once, device)) as measured:
            yield from measured


def _report(ready: int, total: int, began: float) -> None:
    """Reports progress, and after the first how long the rest will take."""
    report_progress(Progress("study", ready, total, "cells"))
    minutes = (total - ready) * (time.monotonic() - began) / 60
    if ready == 1 and minutes > LONG_MINUTES:
        left, long = plural(total - ready, "cell"), plural(round(minutes), "minute")
        logger.info("The other {left} will take about {long}.", left=left, long=long)


def _outcomes(
    job: Job, cells: Sequence[Cell], kept: Path, workers: int, device: str | None
) -> Generator[Outcome]:
    """Each cell as it ends, with the signal that stopped it or its error."""
    if workers <= 1:
        for cell in cells:
            try:
                with quiet_logs(), listening(lambda event: None):  # a study has many runs
                    outcome: int | BaseException = _do(job, cell, kept, device)
            except Exception as error:
                outcome = error
            yield cell, outcome
        return
    threads = max(1, this_machine().cores // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _worker_ready, (threads,))
    try:
        running = {pool.submit(_do_apart, job, cell, kept, device): cell for cell in cells}
        for future in as_completed(running):
            failure = future.exception()
            if isinstance(failure, BrokenExecutor):
                raise failure
            yield running[future], failure or future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _do(job: Job, cell: Cell, kept: Path, device: str | None) -> int:
    """Returns the number of the signal that stopped it, or 0; `Stopped` itself does not pickle."""
    try:
        job(cell, kept, device)
    except Stopped as stopped:
        return stopped.code - 128
    finally:
        gc.collect()
        if torch.cuda.is_initialized():  # other workers share the GPU
            torch.cuda.empty_cache()
    return 0


def _do_apart(job: Job, cell: Cell, kept: Path, device: str | None) -> int:
    """`_do` in another process, to which an error of torch's compiler cannot travel as it is."""
    try:
        return _do(job, cell, kept, device)
    except MalmoiError:
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _worker_ready(threads: int) -> None:
    # signals are handled by the main process; training in a worker also saves and stops on its own
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
