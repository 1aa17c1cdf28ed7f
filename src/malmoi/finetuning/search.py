"""Search within a time budget: short trials of settings, full runs of the best, and their mean.

Every setting is tried for a quarter of the epochs, the better third for all of them, with new seeds
while time is left (successive halving, Jamieson & Talwalkar 2016). The weights of the full runs are
averaged one by one, best first, as long as the held-out rows agree (greedy soup, Wortsman et al.
2022). A finished trial is recorded in search.json and not repeated.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.config import FinetuneConfig
from malmoi.metrics import goodness
from malmoi.system.files import write_text
from malmoi.system.progress import Progress, listening, report_progress
from malmoi.system.untrusted import JsonObject, read_object

logger = logging.getLogger(__name__)

RECORD = "search.json"
SHORT_SHARE = 0.25  # of the epochs
TRIAL_TIME = 0.3  # share of the budget for short trials
FEWEST_SHORT_RUNS = 10  # if fewer fit into the budget, settings are not searched
PROMOTED = 3  # one of this many short trials becomes a full run
MAX_FULL_RUNS = 12


@dataclass(frozen=True)
class Trial:
    """One run of the search; its value is the metric on the held-out rows."""

    name: str
    changes: Mapping[str, Any]
    seed: int
    share: float  # of the epochs
    value: float
    seconds: float

    @property
    def table_row(self) -> tuple[str, ...]:
        """Its cells under the columns of the report."""
        share, seconds = f"{self.share:.0%}", f"{self.seconds:.1f}"
        changes = describe_changes(self.changes)
        return (self.name, changes, str(self.seed), share, f"{self.value:.4f}", seconds)


@dataclass(frozen=True)
class TrialRun:
    """The result of a run: its model, and its metric on the held-out rows."""

    checkpoint: Checkpoint
    value: float


Train = Callable[[FinetuneConfig, Path], TrialRun]


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
    trials: list[Trial] = field(default_factory=list)

    @property
    def budget(self) -> float:
        return 60 * self.settings.minutes

    @property
    def spent(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    def run(self) -> list[TrialRun]:
        """Does the trials; returns the full runs, the best first."""
        found = read_trials(self.out)
        options = candidates(self.settings, self.depth)
        done: list[tuple[Trial, TrialRun]] = []
        first = self._short(options[0], found)
        tried = [first]
        if self.budget >= FEWEST_SHORT_RUNS * first.seconds:
            room = int(self.budget * TRIAL_TIME / first.seconds)
            tried += [self._short(changes, found) for changes in options[1:room]]
        ranked = sorted(tried, key=self._goodness, reverse=True)
        best = ranked[: -(-len(ranked) // PROMOTED)]
        share = self._affordable(first.seconds / SHORT_SHARE)
        while not done or self._fits([trial for trial, _ in done]):
            again, which = divmod(len(done), len(best))
            seed = self.settings.seed + again
            done.append(self._full(best[which].changes, seed, share, found))
        done.sort(key=lambda pair: self._goodness(pair[0]), reverse=True)
        return [run for _, run in done]

    def _goodness(self, trial: Trial) -> float:
        return goodness(self.measure, trial.value)

    def _affordable(self, seconds: float) -> float:
        """The share of the epochs that fits into what is left, if a full run takes `seconds`."""
        return max(SHORT_SHARE, min(1.0, (self.budget - self.spent) / seconds))

    def _fits(self, full: Sequence[Trial]) -> bool:
        """Whether another full run fits into the budget."""
        longest = max(trial.seconds for trial in full)
        return len(full) < MAX_FULL_RUNS and self.spent + longest <= self.budget

    def _short(self, changes: Mapping[str, Any], found: Mapping[str, Trial]) -> Trial:
        name = f"short-{len(self.trials) + 1}"
        if name in found:
            self.trials.append(found[name])
            return found[name]
        trial, _ = self._trial(name, changes, self.settings.seed, SHORT_SHARE)
        shutil.rmtree(self.out / "trials" / name)
        return trial

    def _full(
        self, changes: Mapping[str, Any], seed: int, share: float, found: Mapping[str, Trial]
    ) -> tuple[Trial, TrialRun]:
        name = f"full-{len(self.trials) + 1}"
        if name not in found:
            return self._trial(name, changes, seed, share)
        self.trials.append(found[name])  # its folder is read, not trained again
        return found[name], self.train(self._settings(found[name]), self.out / "trials" / name)

    def _trial(
        self, name: str, changes: Mapping[str, Any], seed: int, share: float
    ) -> tuple[Trial, TrialRun]:
        trial = Trial(name, dict(changes), seed, share, 0.0, 0.0)
        began = time.monotonic()
        with self._overall_progress():
            run = self.train(self._settings(trial), self.out / "trials" / name)
        trial = replace(trial, value=run.value, seconds=time.monotonic() - began)
        self.trials.append(trial)
        write_trials(self.out, self.trials)
        logger.info(
            f"{name}: {describe_changes(changes)}, seed {seed}: held-out {self.measure} "
            f"{run.value:.4f} in {trial.seconds:.1f} s."
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


def describe_changes(changes: Mapping[str, Any]) -> str:
    names = [f"{name} {value:g}" for name, value in changes.items()]
    return ", ".join(names) or "the default settings"


def read_trials(out: Path) -> dict[str, Trial]:
    """The finished trials of a folder by name."""
    path = out / RECORD
    if not path.is_file():
        return {}
    found = JsonObject(read_object(path), str(path)).list_of("trials", dict)
    trials = [Trial(**{str(name): value for name, value in one.items()}) for one in found]
    return {trial.name: trial for trial in trials}


def write_trials(out: Path, trials: Sequence[Trial]) -> None:
    rows = [asdict(trial) for trial in trials]
    write_text(out / RECORD, json.dumps({"trials": rows}, indent=1) + "\n")


def greedy_soup(
    runs: Sequence[TrialRun], measure: str, evaluate: Callable[[Checkpoint], Outcome]
) -> tuple[Checkpoint, int]:
    """The mean of the runs' weights, each added only if the held-out metric does not get worse.

    `runs` has the best first. Returns the model and how many runs it is the mean of.
    """
    soup = runs[0].checkpoint
    best = goodness(measure, runs[0].value)
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
