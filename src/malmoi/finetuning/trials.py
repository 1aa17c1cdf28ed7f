"""The trials of a search of settings: what one gives, and their record."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.comparison import Gain
from malmoi.messages import msg
from malmoi.system.files import write_text
from malmoi.system.untrusted import JsonObject, read_object

RECORD = "search.json"


@dataclass(frozen=True)
class Trial:
    """One run of the search; its value is the metric on the held-out rows."""

    name: str
    changes: Mapping[str, Any]
    seed: int
    share: float  # of the epochs
    value: float | None  # None: no rows are held out
    seconds: float
    per_row: float = 0.0  # seconds to evaluate a row, estimated from its steps
    gain: Gain | None = None  # over the default settings, trained as long

    @property
    def clear_gain(self) -> float:
        """Its gain over the default settings if that is more than its error, else 0."""
        return self.gain.value if self.gain is not None and self.gain.clear else 0.0

    @property
    def table_row(self) -> tuple[str, ...]:
        """Its cells under the columns of the report."""
        share, seconds = f"{self.share:.0%}", f"{self.seconds:.1f}"
        changes = describe_changes(self.changes)
        value = "–" if self.value is None else f"{self.value:.4f}"
        return (self.name, changes, str(self.seed), share, value, str(self.gain or "–"), seconds)


@dataclass(frozen=True)
class TrialRun:
    """The result of a run: its model, and its predictions of the held-out rows."""

    checkpoint: Checkpoint
    outcome: Outcome
    steps: int
    completed: float = 1.0  # share of its steps; less if the time limit came first
    per_row: float = 0.0  # seconds to evaluate a row, estimated from its steps


def describe_changes(changes: Mapping[str, Any]) -> str:
    names = [f"{name} {value:g}" for name, value in changes.items()]
    return ", ".join(names) or msg("the default settings")


def read_trials(out: Path) -> dict[str, Trial]:
    """The finished trials of a folder by name."""
    path = out / RECORD
    if not path.is_file():
        return {}
    found = JsonObject(read_object(path), str(path)).list_of("trials", dict)
    trials = [Trial(**{**one, "gain": one["gain"] and Gain(**one["gain"])}) for one in found]
    return {trial.name: trial for trial in trials}


def write_trials(out: Path, trials: Sequence[Trial]) -> None:
    rows = [asdict(trial) for trial in trials]
    write_text(out / RECORD, json.dumps({"trials": rows}, indent=1) + "\n")
