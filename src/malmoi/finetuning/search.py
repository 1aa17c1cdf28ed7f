"""Search within a time budget: the mean of several runs on all rows.

The first run is that of the default settings. What is left of the budget trains again, with other
settings, the same new layers and other orders of the rows; the result is the mean of all weights,
which is worth more than the choice of one setting, and than rows held out to choose it
(docs/lab.md). Where rows are held out anyway, a run that is clearly worse than the first, by more
than the standard error of the difference, is left out. A run that reaches its time limit has
decayed its rate by then. Finished runs are recorded in search.json and not repeated.
"""

import logging
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.evaluate import predict_and_score
from malmoi.evaluation.features import Outcome
from malmoi.finetuning.candidates import Comparison, Tried, compare_held_out
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.results import (
    FinishedRun,
    begin_run,
    complete_run,
    judged_run,
    load_finished,
)
from malmoi.finetuning.run import run_trial
from malmoi.finetuning.task_data import FinetuneData
from malmoi.messages import msg, plural
from malmoi.metrics import goodness
from malmoi.system.progress import Progress, listening, report_progress

logger = logging.getLogger(__name__)

FIRST_TIME = 0.9  # share of the budget for the first run, whose evaluation takes an unknown time
MIN_RUN_TIME = 0.6  # of the first run: with less time left, no other is started
UNCUT = 0.95  # share of the epochs of a run that is as good as whole
MAX_JUDGING = 0.5  # of the budget; if the final evaluation takes longer, it is not part of it

Changes = Mapping[str, Any]  # of the default settings
Train = Callable[[FinetuneConfig, Path, float], FinishedRun]  # for at most so many seconds


def other_settings(settings: FinetuneConfig) -> list[Changes]:
    """Changes of the default settings, the most promising first."""
    faster: dict[str, Any] = {"lr": 2 * settings.lr}
    return [
        {"layer_decay": 0.8, **faster},
        {"lr": settings.lr / 2},
        faster,
        {},  # another order of the rows
        {"layer_decay": 0.8},
    ]


@dataclass
class Search:
    """The runs of one fine-tuning in its folder."""

    settings: FinetuneConfig
    comparison: Comparison
    train: Train
    judged: int = 0  # rows of the final evaluation
    setup: float = 0.0  # seconds of the budget that are over when the search starts

    @property
    def budget(self) -> float:
        return 60 * self.settings.minutes

    @property
    def spent(self) -> float:
        return self.setup + sum(one.seconds for one in self.comparison.tried)

    @property
    def left(self) -> float:
        """Seconds left for training before the result is evaluated."""
        judging = self.judged * max((one.per_row for one in self.comparison.tried), default=0.0)
        return self.budget - self.spent - (judging if judging < MAX_JUDGING * self.budget else 0.0)

    def run(self) -> list[FinishedRun]:
        """The runs whose mean is the result; the first is that of the defaults."""
        first, run = self._run(0, {}, FIRST_TIME * self.left)
        if first.share < UNCUT:
            self._explain_cut(first)
            return [run]
        members = [run]
        for i, changes in enumerate(other_settings(self.settings), start=1):
            if self.left > MIN_RUN_TIME * first.seconds:
                tried, other = self._run(i, changes, self.left, run.outcome)
                members += [] if tried.gain is not None and tried.gain.clear_loss else [other]
        return members

    def _explain_cut(self, first: Tried) -> None:
        seconds = self.budget + first.seconds * (1 / max(first.share, 1e-6) - 1)
        logger.warning(
            msg(
                "{minutes} ended after {share:.0%} of the epochs of a single run; --minutes "
                "{ceil} would hold a whole one.",
                minutes=plural(self.settings.minutes, "minute"),
                share=first.share,
                ceil=math.ceil(seconds / 60),
            )
        )

    def _run(
        self, number: int, changes: Changes, seconds: float, first: Outcome | None = None
    ) -> tuple[Tried, FinishedRun]:
        """Trains with other settings, and compares the result with the first."""
        settings = replace(
            self.settings,
            best=False,
            minutes=0.0,
            seed=self.settings.seed + number,
            init_seed=self.settings.seed,  # means of networks with different new layers are useless
            **changes,
        )
        name = f"last-{number}"
        known = self.comparison.known.get(name)
        began = time.monotonic()
        with self._overall_progress():
            fitted = self.train(settings, self.comparison.out / "trials" / name, seconds)
        if known is not None:
            self.comparison.tried.append(known)
            return known, fitted
        facts: dict[str, Any] = {"changes": changes, "seed": settings.seed}
        facts |= {"share": fitted.completed, "per_row": fitted.per_row}
        return self.comparison.add(name, fitted.outcome, began, first, **facts), fitted

    @contextmanager
    def _overall_progress(self) -> Iterator[None]:
        """Reports progress over the whole budget instead of each trial's steps."""
        outside = copy_context()
        began = time.monotonic()
        before = self.spent

        def tell(event: Progress) -> None:
            spent = min(self.budget, before + time.monotonic() - began)
            left = self.budget - spent
            metrics = {"trial": len(self.comparison.tried) + 1, **event.metrics}
            event = Progress("finetune", spent, self.budget, "seconds", metrics, left)
            outside.run(report_progress, event)

        with listening(tell):
            yield


def search_settings(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool
) -> FinishedRun:
    """Spends the time budget on runs of several settings, and evaluates their mean."""
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        shutil.rmtree(out / "trials", ignore_errors=True)
    if begin_run(out, work.record(settings), overwrite=overwrite):
        return load_finished(work, settings, out)
    logger.info(work.protocol.describe())
    search = Search(
        settings,
        compare_held_out(work, out),
        partial(run_trial, work),
        judged=len(work.dev) + len(work.held) + FIT_ROWS * (len(other_settings(settings)) + 2),
        setup=time.monotonic() - work.began,
    )
    runs = search.run()
    with work.computing(settings):
        checkpoint, members = mean_if_it_fits(work, [one.checkpoint for one in runs])
    steps = sum(one.steps for one in runs)
    run = complete_run(work, judged_run(work, settings, checkpoint, steps), out)
    compared = len(search.comparison.tried)
    logger.info(
        msg(
            "{runs} in {spent:.0f} s; the result is the mean of {runs2} on all training rows.",
            runs=plural(compared, "run"),
            spent=search.spent,
            runs2=plural(members, "run"),
        )
    )
    shutil.rmtree(out / "trials")
    return run


# ------------------------------------------------------------------ the mean of several runs

FIT_ROWS = 100  # training rows
WORST_FIT = 0.1  # of the first run's metric: if the mean loses more, the runs are apart


def mean_if_it_fits(work: FinetuneData, runs: Sequence[Checkpoint]) -> tuple[Checkpoint, int]:
    """The mean of the runs, or the first alone; returns also how many runs the result has.

    Runs that start from the same weights mostly end in one basin of the loss, where the mean is
    better than each (Wortsman et al. 2022). One that diverged, or ended in another basin, shows in
    the rows that all have learnt, and is left out.
    """
    first, *others = runs
    if not others:
        return first, 1
    fit = _fit(work, first)
    least = fit - WORST_FIT * abs(fit)
    members = [first, *(run for run in others if _fit(work, run) >= least)]
    if len(members) == 1:
        return first, 1
    alone = {name: tensor.clone() for name, tensor in first.network.state_dict().items()}
    if _fit(work, mean_weights(members)) >= least:
        return first, len(members)
    first.network.load_state_dict(alone)
    logger.warning(
        msg(
            "The mean of {members} runs does not fit the training rows, as each of them does: "
            "the first run is kept alone.",
            members=len(members),
        )
    )
    return first, 1


def mean_weights(runs: Sequence[Checkpoint]) -> Checkpoint:
    """The first model with the mean of the weights of all."""
    states = [run.network.state_dict() for run in runs]
    mean = {
        name: torch.stack([state[name].to(tensor) for state in states]).mean(0)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in states[0].items()
    }
    runs[0].network.load_state_dict(mean)
    return runs[0]


def _fit(work: FinetuneData, checkpoint: Checkpoint) -> float:
    rows = random.Random(0).sample(work.train, min(FIT_ROWS, len(work.train)))
    found = predict_and_score(work.task, rows, work.predictor(checkpoint)).metrics
    return goodness(work.primary_metric, found[work.primary_metric])
