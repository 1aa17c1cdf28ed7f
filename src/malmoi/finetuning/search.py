"""Search within a time budget: the mean of several runs on all rows.

The first run is that of the default settings. What is left of the budget trains on all rows again,
with other settings, the same new layers and other orders of the rows; the result is the mean of all
weights, which is worth more than the choice of one setting (docs/lab.md). If there is time for it,
short trials on a part of the rows leave out settings that are clearly worse, by more than the
standard error of the difference on the held-out rows, and one that is clearly better there and in a
full run replaces the defaults. A run that reaches its time limit has decayed its rate by then.
Finished runs are recorded in search.json and not repeated.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.averaging import FIT_ROWS, mean_if_it_fits
from malmoi.finetuning.candidates import (
    RECORD,
    Candidate,
    Comparison,
    Fitted,
    Tried,
    compare_held_out,
)
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.results import FinishedRun, complete_run, judged_run, load_finished
from malmoi.finetuning.run import run_trial
from malmoi.finetuning.run_state import begin_run
from malmoi.finetuning.task_data import FinetuneData
from malmoi.messages import msg, plural
from malmoi.system.progress import Progress, listening, report_progress

logger = logging.getLogger(__name__)

SHORT, FULL, LAST = "short", "full", "last"  # trials, and the runs on all rows
SHORT_SHARE = 0.25  # of the epochs
MIN_LAST_RUNS = 4  # if there is time: more settings, or orders of the rows, give a better mean
TRIALS_PAY = 6.0  # runs that must fit into the time left, else no settings are compared
TRIAL_TIME = 0.3  # share of that time for all short trials
FIRST_TIME = 0.9  # share of the budget for the first run, whose evaluation takes an unknown time
MIN_RUN_TIME = 0.6  # of the first run: with less time left, no other is started
UNCUT = 0.95  # share of the epochs of a run that is as good as whole
MAX_JUDGING = 0.5  # of the budget; if the final evaluation takes longer, it is not part of it

Changes = Mapping[str, Any]  # of the default settings
Choice = tuple[Changes, float]  # for a run on all rows; its time beside a run of the defaults
Train = Callable[[FinetuneConfig, Path, float], Fitted]  # for at most so many seconds


def other_settings(settings: FinetuneConfig, depth: int) -> list[Changes]:
    """Changes of the default settings, the most promising first."""
    faster: dict[str, Any] = {"lr": 2 * settings.lr}
    agreeing: dict[str, Any] = {"rdrop": 0.0 if settings.rdrop else 1.0}
    top: int | None = depth - 1 if settings.layers_transferred is None else None
    found: list[Changes] = [
        {"layer_decay": 0.8, **faster},
        {"lr": settings.lr / 2},
        faster,
        agreeing,
        {**faster, **agreeing},
    ]
    return found + ([{"layers_transferred": top}] if depth > 1 else [])


@dataclass
class Search:
    """The trials and the last runs of one fine-tuning in its folder."""

    settings: FinetuneConfig
    depth: int
    comparison: Comparison
    train: Train  # one run with rows held out
    train_on_all: Train
    judged: int = 0  # rows of the final evaluation
    compares: bool = True  # whether there are enough rows to hold some out for trials
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

    def run(self) -> list[Fitted]:
        """The runs on all rows whose mean is the result; the first is that of the defaults."""
        first, run = self._run(f"{LAST}-0", {}, FIRST_TIME * self.left)
        if first.share < UNCUT:
            self._explain_cut(first)
            return [run] if run is not None else []
        best, *others = self.choose(first)
        defaults_won = not best[0]
        done = [run] if defaults_won else []
        order = [*others, best] if defaults_won else [best, *others]
        for i in range(1, max(len(order), MIN_LAST_RUNS) - len(done) + 1):
            changes, cost = order[(i - 1) % len(order)]
            if self.left > MIN_RUN_TIME * cost * first.seconds:
                done.append(self._run(f"{LAST}-{i}", changes, self.left, again=i)[1])
        return [run for run in done if run is not None]

    def choose(self, first: Tried) -> list[Choice]:
        """Settings for the runs on all rows: the best, and others that are not clearly worse.

        The best are the defaults, or what beats them in a short trial and in a full run. Without
        time or rows to compare, the first candidates, which are no slower, are taken untried.
        """
        others = other_settings(self.settings, self.depth)
        if not self.compares or self.left < TRIALS_PAY * first.seconds:
            return [(changes, 1.0) for changes in ({}, *others[: MIN_LAST_RUNS - 1])]
        end = self.left * (1 - TRIAL_TIME)
        base, run = self._run(f"{SHORT}-0", {}, self.left - end)
        tried = [base]
        for i, changes in enumerate(others, start=1):
            if run is not None and self.left - end > base.seconds:
                found, _ = self._run(f"{SHORT}-{i}", changes, self.left - end, run.outcome)
                tried.append(found)
        best = max(tried, key=lambda one: one.clear_gain)
        if best.clear_gain and not self._wins_in_full(best, first.seconds):
            best = base
        kept = [best, *(one for one in tried if one is not best and _may_join(one, best))]
        return [(one.changes, one.seconds / base.seconds) for one in kept]

    def _wins_in_full(self, challenger: Tried, seconds: float) -> bool:
        """Whether other settings clearly beat the defaults in a full run, if there is time for it.

        The mean comes first: it gains more than most settings do.
        """
        if self.left < seconds * (2 + MIN_LAST_RUNS):
            return False
        _, run = self._run(f"{FULL}-0", {}, self.left)
        base = None if run is None else run.outcome
        done, _ = self._run(f"{FULL}-1", challenger.changes, self.left, base)
        return done.clear_gain > 0

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
        self,
        name: str,
        changes: Changes,
        seconds: float,
        base: Outcome | None = None,
        again: int = 0,
    ) -> tuple[Tried, Fitted | None]:
        """Trains with other settings, and compares the result with `base`, if given."""
        kind = name.partition("-")[0]
        share = SHORT_SHARE if kind == SHORT else 1.0
        settings = replace(
            self.settings,
            best=False,
            minutes=0.0,
            seed=self.settings.seed + again,
            init_seed=self.settings.seed,  # means of networks with different new layers are useless
            epochs=self.settings.epochs * share,
            **changes,
        )
        fit = partial(self.train_on_all if kind == LAST else self.train, settings)
        candidate = Candidate(name, seconds, fit, changes, settings.seed, share)
        with self._overall_progress():
            tried, fitted = self.comparison.run(candidate, base)
        if name not in self.comparison.known:
            self._log(tried)
        return tried, fitted

    def _log(self, tried: Tried) -> None:
        described = msg(
            "{trial}: {changes}, seed {seed}",
            trial=tried.name,
            changes=tried.described,
            seed=tried.seed,
        )
        shown = {
            "described": described,
            "measure": self.comparison.measure,
            "value": f"{tried.value or 0:.4f}",
            "seconds": tried.seconds,
            "gain": tried.gain,
        }
        if tried.value is None:
            logger.info(msg("{described}: all training rows, {seconds:.1f} s.", **shown))
        elif tried.gain is None:
            logger.info(msg("{described}: held-out {measure} {value} in {seconds:.1f} s.", **shown))
        else:
            logger.info(
                msg(
                    "{described}: held-out {measure} {value} in {seconds:.1f} s ({gain} "
                    "beside the default settings).",
                    **shown,
                )
            )

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


def _may_join(one: Tried, best: Tried) -> bool:
    """Whether runs may be averaged with the best: not clearly worse, from the same weights."""
    same_start = ("layers_transferred" in one.changes) == ("layers_transferred" in best.changes)
    return same_start and (one.gain is None or not one.gain.clear_loss)


def search_settings(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool
) -> FinishedRun:
    """Spends the time budget on trials and on runs of what they chose; evaluates their mean."""
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        shutil.rmtree(out / "trials", ignore_errors=True)
        (out / RECORD).unlink(missing_ok=True)
    if begin_run(out, work.record(settings), overwrite=overwrite):
        return load_finished(work, settings, out)
    logger.info(work.protocol.describe())
    tried = work.for_trials(settings)
    search = Search(
        settings,
        work.start.network.config.distinct,
        compare_held_out(tried, out),
        partial(run_trial, tried),
        partial(run_trial, work),
        judged=len(work.dev) + len(work.held) + FIT_ROWS * (MIN_LAST_RUNS + 1),
        compares=bool(tried.held),
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
