"""Runs a study in a folder without repeating finished cells."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from malmoi.errors import MalmoiError, UsageError
from malmoi.messages import msg
from malmoi.studies.data import StudyData
from malmoi.studies.grid import Grid, Study, StudyPlan, finished_cells
from malmoi.studies.page import write_pages
from malmoi.studies.scale import named_scale
from malmoi.system.files import folder_lock
from malmoi.system.machine import pick_device, this_machine
from malmoi.system.result import PlainValue, Result

logger = logging.getLogger(__name__)

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
    cache: Path | None = None  # cache of models and cells; None: the study's folder
    seconds: float = float("inf")  # no cell starts after this time


def free_workers(device: str | None) -> int:
    """One per core, because two threads gain little in such small models; one on a GPU."""
    return min(this_machine().cores, MAX_WORKERS) if pick_device(device).type == "cpu" else 1


def run_study(study: Study, out: Path, options: StudyRunConfig) -> StudyResult:
    """Runs the missing cells, and writes the table, the figure and the pages."""
    return run_studies([study], {study.name: out}, options)[0]


def run_studies(
    studies: Sequence[Study], outs: dict[str, Path], options: StudyRunConfig
) -> list[StudyResult]:
    """Runs several studies together, so that they share workers and models."""
    deadline = time.monotonic() + options.seconds
    scale = named_scale(options.scale)
    cache = options.cache or outs[studies[0].name] / "cache"
    plan = StudyPlan(
        scale,
        StudyData.prepare(cache / "data", options.data, scale.characters),
        range(options.seeds or scale.seeds),
    )
    cells = {study.name: list(study.cells(plan)) for study in studies}
    for name, some in cells.items():
        if not some:
            raise UsageError(
                "The data has no task for the study {name}: give it with --data.", name=name
            )
    every = [cell for some in cells.values() for cell in some]
    every.sort(key=lambda cell: cell.seed)  # the first seed of all studies before the second
    cache.mkdir(parents=True, exist_ok=True)
    workers = options.workers or free_workers(options.device)
    with folder_lock(cache):
        failed = Grid(every, cache, workers, options.device, deadline).run()
    done = []
    for study in studies:
        outs[study.name].mkdir(parents=True, exist_ok=True)
        records = finished_cells(cells[study.name], cache)
        logger.info(
            msg(
                "{study}: {records} of {cells} cells are done.",
                study=study.name,
                records=len(records),
                cells=len(cells[study.name]),
            )
        )
        if records:
            facts = write_pages(study, plan, records, outs[study.name])
            done.append(StudyResult(study.name, outs[study.name], facts))
    if failed:
        first = failed[0].rstrip(".")
        raise MalmoiError(
            "{failed} cells failed, the first with: {first}. The report shows the others; the "
            "same command retries the failed ones.",
            failed=len(failed),
            first=first,
        )
    return done
