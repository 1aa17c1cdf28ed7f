"""Search within a time budget: the run of the defaults, or a student of it and of others.

The first candidate is the run of the same command without `best`. What is left of the budget trains
others with other settings, new layers and orders of the rows, and all of them teach a new network
of the same size. It is the result only if it is better than the first by more than the standard
error of the difference on the rows that the defaults hold out. Finished runs are not repeated.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.checkpoint import write_checkpoint
from malmoi.errors import require_that
from malmoi.evaluation.features import Outcome
from malmoi.evaluation.kinds import head_kind
from malmoi.finetuning import results
from malmoi.finetuning.candidates import Comparison
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.results import FinishedRun
from malmoi.finetuning.run import run_once, run_trial
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.unlabelled import taught
from malmoi.messages import logger, msg, plural

FIRST_TIME = 0.9  # share of the budget for the first run, whose evaluation takes an unknown time
TRAINING_TIME = 0.9  # share of the time left that is trained for, the rest is for evaluations
READ_PER_TRAINED = 1 / 3  # time of a row that is read by a teacher, of one that is trained on
TRIALS = "trials"
DEFAULTS = "defaults"  # the first candidate's name


def other_settings(settings: FinetuneConfig) -> list[Mapping[str, Any]]:
    """Changes of the default settings, the most promising first."""
    faster: dict[str, Any] = {"lr": 2 * settings.lr}
    return [
        {"layer_decay": 0.8, **faster},
        {"lr": settings.lr / 2},
        faster,
        {},  # another order of the rows
        {"layer_decay": 0.8},
    ]


def search_settings(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool
) -> FinishedRun:
    """Spends the time budget, and completes the better of the defaults' run and the student."""
    kind = head_kind(work.task)
    require_that(
        kind.sentence_objective is None,
        "best needs scores that a student can learn: {kind} has none.",
        kind=kind.name,
    )
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        shutil.rmtree(out / TRIALS, ignore_errors=True)
    if results.begin_run(out, work.record(settings), overwrite=overwrite):
        return results.load_finished(work, settings, out)
    plain = replace(settings, best=False, minutes=0.0)
    search = Search(plain, Comparison(work, out), 60 * settings.minutes)
    run = results.complete_run(work, replace(search.run(), settings=settings), out)
    shutil.rmtree(out / TRIALS)
    return run


@dataclass(frozen=True)
class Search:
    """The candidates of one fine-tuning: the defaults, others, and the student of all."""

    settings: FinetuneConfig  # of the defaults
    comparison: Comparison
    budget: float  # in seconds

    @property
    def work(self) -> FinetuneData:
        return self.comparison.work

    def run(self) -> FinishedRun:
        """The run of the defaults, or the student if it is clearly better."""
        tried = self.comparison.known.values()
        spent = sum(one.seconds for one in tried if one.changes is not None)
        deadline = self.work.began + self.budget - spent  # by time.monotonic()
        first, outcome = self._try(DEFAULTS, partial(run_once, self.work.labelled, self.settings))
        # usable, should the rest be stopped
        write_checkpoint(first.checkpoint, self.comparison.out)
        others = self._others(self.comparison.known[DEFAULTS].seconds)
        if others < 0:
            return first
        student, found = self._student(others, outcome, deadline)
        gain = self.comparison.gain(outcome, found)
        logger.info(
            "On the held-out rows the student is {gain} beside the defaults: {won}.",
            gain=gain,
            won=msg("the student is the result" if gain.clear else "these are the result"),
        )
        if not gain.clear:
            return first
        return results.judged_run(self.work, self.settings, student.checkpoint, student.steps)

    def _others(self, first: float) -> int:
        """How many others the budget holds beside the student, −1 if not even that one.

        It follows from the seconds of the first, so that it is the same if the search goes on.
        """
        runs = (self.budget / first - 1) / (1 + READ_PER_TRAINED)  # a student has many teachers
        if not self.work.held:
            logger.warning(
                "No rows are held out to compare models: the run of the defaults is the result. "
                "--set holdout=0.1 holds some out."
            )
            return -1
        if runs < 1:
            logger.warning(
                "{minutes} hold the run of the defaults alone, which is the result; --minutes "
                "{ceil} would hold a student of it, too.",
                minutes=plural(self.budget / 60, "minute"),
                ceil=math.ceil((2 + READ_PER_TRAINED) * first / 60),
            )
        return min(len(other_settings(self.settings)), int(runs) - 1)

    def _student(self, others: int, first: Outcome, deadline: float) -> tuple[FinishedRun, Outcome]:
        """A network taught by the defaults' run and by so many others, if not clearly worse."""
        plain = replace(self.settings, frozen_first=False)
        names = [f"other-{i}" for i in range(1, others + 1)]
        costs = (others + 1) * (1 + READ_PER_TRAINED)  # as many runs would take as long
        for i, (name, changes) in enumerate(zip(names, other_settings(plain), strict=False)):
            settings = replace(plain, seed=plain.seed + i + 1, **changes)
            seconds = TRAINING_TIME * (deadline - time.monotonic()) / (costs - i)
            train = partial(run_trial, self.work.labelled, settings, seconds=seconds)
            self._try(name, train, first, changes=changes, seed=settings.seed)
        gains = {name: self.comparison.known[name].gain for name in (DEFAULTS, *names)}
        worse = {name for name, gain in gains.items() if gain is not None and gain.clear_loss}
        folders = [self.comparison.out / TRIALS / name for name in gains if name not in worse]
        lesson = taught(self.work, plain, folders)
        seconds = TRAINING_TIME * (deadline - time.monotonic())
        return self._try("student", partial(run_trial, lesson, plain, seconds=seconds), first)

    def _try(
        self,
        name: str,
        train: Callable[..., FinishedRun],
        first: Outcome | None = None,
        **facts: Any,
    ) -> tuple[FinishedRun, Outcome]:
        """Trains a candidate in its folder, and compares it with the first on the held-out rows."""
        began = time.monotonic()
        run = train(out=self.comparison.out / TRIALS / name)
        with self.work.computing(self.settings):
            outcome = results.judge_held_out(self.work, self.work.predictor(run.checkpoint))
        if name not in self.comparison.known:
            facts = {"changes": {}, "seed": self.settings.seed, "share": run.completed, **facts}
            self.comparison.add(name, outcome, began, first, **facts)
        return run, outcome
