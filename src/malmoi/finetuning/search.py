"""Search within a time budget: short trials of settings, full runs of the best, and their mean.

The first trial has a tenth of the budget. If a quarter of the epochs fits into it, other settings
are tried for as long, and the better third is trained for all epochs, with new seeds while time is
left (successive halving, Jamieson & Talwalkar 2016); else the rest of the budget is one run of the
default settings. A run that reaches its time limit has decayed its rate by then. The weights of the
full runs are averaged one by one, best first, as long as the held-out rows agree (greedy soup,
Wortsman et al. 2022). A finished trial is recorded in search.json and not repeated.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.evaluate import judge_held_out
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.results import FinishedRun, evaluate_and_complete, load_finished
from malmoi.finetuning.run import run_trial
from malmoi.finetuning.run_state import begin_run
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.trials import (
    RECORD,
    Trial,
    TrialLimit,
    TrialRun,
    describe_changes,
    read_trials,
    write_trials,
)
from malmoi.metrics import goodness
from malmoi.system.language import plural, translate
from malmoi.system.progress import Progress, listening, report_progress

logger = logging.getLogger(__name__)

SHORT_SHARE = 0.25  # of the epochs
FIRST_TIME = 0.1  # share of the budget for the first trial
TRIAL_TIME = 0.3  # for all short trials
PROMOTED = 3  # one of this many short trials becomes a full run
MAX_FULL_RUNS = 12
MIN_RUN_TIME = 0.6  # of the longest full run: with less time left, no other is started
MAX_JUDGING = 0.5  # of the budget; if the final evaluation takes longer, it is not part of it


Train = Callable[[FinetuneConfig, Path, TrialLimit], TrialRun]


def candidates(settings: FinetuneConfig, depth: int) -> list[dict[str, Any]]:
    """Changes of the default settings, the most promising first."""
    faster: dict[str, Any] = {"lr": 2 * settings.lr}
    agreeing: dict[str, Any] = {"rdrop": 0.0 if settings.rdrop else 1.0}
    top: int | None = depth - 1 if settings.layers_transferred is None else None
    found: list[dict[str, Any]] = [
        {},
        agreeing,
        faster,
        {"lr": settings.lr / 2},
        {**faster, **agreeing},
        {"layer_decay": 0.8, **faster},
        {"batch": 2 * settings.batch, **faster},
    ]
    return found + ([{"layers_transferred": top}] if depth > 1 else [])


@dataclass
class Search:
    """The trials of one fine-tuning in its folder; `train` does one run."""

    settings: FinetuneConfig
    depth: int
    measure: str
    out: Path
    train: Train
    judged: float = 0.0  # evaluation rows per held-out row
    setup: float = 0.0  # seconds of the budget that are over when the search starts
    trials: list[Trial] = field(default_factory=list)

    @property
    def budget(self) -> float:
        return 60 * self.settings.minutes

    @property
    def spent(self) -> float:
        return self.setup + sum(trial.seconds for trial in self.trials)

    def run(self) -> list[TrialRun]:
        """Does the trials; returns the full runs, the best first."""
        found = read_trials(self.out)
        best = self._try_settings(found)
        done: list[tuple[Trial, TrialRun]] = []
        longest = 0.0
        while len(done) < MAX_FULL_RUNS:
            left = self._left(len(done) + 1)
            if done and left < MIN_RUN_TIME * longest:
                break
            again, which = divmod(len(done), len(best))
            done.append(self._full(best[which].changes, self.settings.seed + again, left, found))
            longest = max(longest, done[-1][0].seconds)
        if done[0][0].share < SHORT_SHARE:
            self._explain_cut(done[0][0])
        done.sort(key=lambda pair: self._goodness(pair[0]), reverse=True)
        return [run for _, run in done]

    def _try_settings(self, found: Mapping[str, Trial]) -> list[Trial]:
        """Short trials, as many as fit; returns the better third."""
        options = candidates(self.settings, self.depth)
        limit = TrialLimit(FIRST_TIME * self.budget, judged_if_cut=False)
        first = self._short(options[0], limit, found)
        tried = [first]
        for changes in options[1:] if first.value is not None else []:
            left = TRIAL_TIME * self.budget - self.spent
            if left < first.seconds:
                break
            tried.append(self._short(changes, TrialLimit(left), found))
        ranked = sorted(tried, key=self._goodness, reverse=True)
        return ranked[: -(-len(ranked) // PROMOTED)]

    def _goodness(self, trial: Trial) -> float:
        return -math.inf if trial.value is None else goodness(self.measure, trial.value)

    def _left(self, runs: int) -> float:
        """Seconds left for training before this many runs' means and the result are evaluated."""
        judging = self.trials[0].after * (runs + self.judged)
        return self.budget - self.spent - (judging if judging < MAX_JUDGING * self.budget else 0.0)

    def _explain_cut(self, full: Trial) -> None:
        trained = full.seconds - full.after
        seconds = self.budget - self._left(1) + trained / max(full.share, 1e-6) - trained
        logger.warning(
            f"{plural(self.settings.minutes, 'minute')} ended after {full.share:.0%} of the epochs "
            f"of a single run; --minutes {math.ceil(seconds / 60)} would hold a whole one."
        )

    def _short(
        self, changes: Mapping[str, Any], limit: TrialLimit, found: Mapping[str, Trial]
    ) -> Trial:
        name = f"short-{len(self.trials) + 1}"
        if name in found:
            self.trials.append(found[name])
            return found[name]
        trial = Trial(name, dict(changes), self.settings.seed, SHORT_SHARE, 0.0, 0.0)
        trial, _ = self._trial(trial, limit)
        shutil.rmtree(self.out / "trials" / name)
        return trial

    def _full(
        self, changes: Mapping[str, Any], seed: int, left: float, found: Mapping[str, Trial]
    ) -> tuple[Trial, TrialRun]:
        name = f"full-{len(self.trials) + 1}"
        trial = Trial(name, dict(changes), seed, 1.0, 0.0, 0.0)
        if name not in found:
            return self._trial(trial, TrialLimit(left))
        self.trials.append(found[name])  # its folder is read, not trained again
        done = self.train(self._settings(trial), self.out / "trials" / name, TrialLimit(left))
        return found[name], done

    def _trial(self, trial: Trial, limit: TrialLimit) -> tuple[Trial, TrialRun]:
        began = time.monotonic()
        with self._overall_progress():
            run = self.train(self._settings(trial), self.out / "trials" / trial.name, limit)
        trial = replace(
            trial,
            share=trial.share * run.completed,
            value=run.value,
            seconds=time.monotonic() - began,
            after=run.after,
        )
        self.trials.append(trial)
        write_trials(self.out, self.trials)
        described = translate(f"{trial.name}: {describe_changes(trial.changes)}, seed {trial.seed}")
        if trial.value is None:
            logger.info(
                f"{described}: a quarter of the epochs takes more than a tenth of the time, so "
                "that no other settings are tried."
            )
        else:
            logger.info(
                f"{described}: held-out {self.measure} {trial.value:.4f} in {trial.seconds:.1f} s."
            )
        return trial, run

    def _settings(self, trial: Trial) -> FinetuneConfig:
        s = replace(
            self.settings,
            best=False,
            minutes=0.0,
            seed=trial.seed,
            init_seed=self.settings.seed,  # means of networks with different new layers are useless
            epochs=self.settings.epochs * trial.share,
        )
        return replace(s, **trial.changes)

    @contextmanager
    def _overall_progress(self) -> Iterator[None]:
        """Reports progress over the whole budget instead of each trial's steps."""
        outside = copy_context()
        began = time.monotonic()
        before = self.spent

        def tell(event: Progress) -> None:
            spent = min(self.budget, before + time.monotonic() - began)
            left = self.budget - spent
            metrics = {"trial": len(self.trials) + 1, **event.metrics}
            event = Progress("finetune", spent, self.budget, "seconds", metrics, left)
            outside.run(report_progress, event)

        with listening(tell):
            yield


def greedy_soup(
    runs: Sequence[TrialRun], measure: str, evaluate: Callable[[Checkpoint], Outcome]
) -> tuple[Checkpoint, int]:
    """The mean of the runs' weights, each added only if the held-out metric does not get worse.

    `runs` has the best first. Returns the model and how many runs it is the mean of.
    """
    soup = runs[0].checkpoint
    best = goodness(measure, runs[0].value or 0.0)
    count = 1
    for run in runs[1:]:
        kept = {name: tensor.clone() for name, tensor in soup.network.state_dict().items()}
        soup.network.load_state_dict(mixed(kept, run.checkpoint.network.state_dict(), count))
        value = goodness(measure, evaluate(soup).metrics[measure])
        if value >= best:
            best = value
            count += 1
        else:
            soup.network.load_state_dict(kept)
    return soup, count


def mixed(mean: Mapping[str, Tensor], other: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The mean of `count` networks with another one added."""
    return {
        name: torch.lerp(tensor, other[name].to(tensor), 1 / (count + 1))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in mean.items()
    }


def search_settings(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool
) -> FinishedRun:
    """Spends the time budget on trials and averages the best; only the result is evaluated."""
    out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        shutil.rmtree(out / "trials", ignore_errors=True)
        (out / RECORD).unlink(missing_ok=True)
    if begin_run(out, work.record(settings), overwrite=overwrite):
        return load_finished(work, settings, out)
    logger.info(work.protocol.describe())
    measure = work.primary_metric
    search = Search(
        settings,
        work.start.network.config.distinct,
        measure,
        out,
        partial(run_trial, work),
        judged=len(work.dev) / len(work.held),
        setup=time.monotonic() - work.began,
    )
    runs = search.run()
    with work.computing(settings):
        checkpoint, members = greedy_soup(
            runs, measure, lambda one: judge_held_out(work.task, work, work.predictor(one))
        )
    steps = sum(one.steps for one in runs)
    run = evaluate_and_complete(work, settings, checkpoint, steps, out)
    logger.info(
        f"{len(search.trials)} trials in {search.spent:.0f} s: the mean of "
        f"{plural(members, 'run')} has {measure} "
        f"{run.held[measure]:.4f} on the held-out rows."
    )
    shutil.rmtree(out / "trials")
    return run
