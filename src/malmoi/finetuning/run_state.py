"""Resuming a fine-tuning run: which run a folder holds, and its saved state."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.evaluation.task import Example
from malmoi.model import Network
from malmoi.settings import current_fields
from malmoi.system.files import LOCK_NAME, folder_lock
from malmoi.system.run_folder import FINISHED, RunFolder
from malmoi.system.untrusted import JsonObject
from malmoi.training.losses.distil import Distillation
from malmoi.training.parallel import ProcessGroup
from malmoi.training.state import (
    Position,
    latest_state,
    other_tensors,
    position_of,
    prune_states,
    save_state,
    tensors_of,
)

HELD_OUT = "held_out"  # name of the held-out rows' metrics in finetune.json

# ------------------------------------------------------------------ finetune.json: identity


def run_fingerprint(network: Network, examples: Sequence[Example]) -> str:
    """A hash of the initial weights and the examples, independent of file locations."""
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().data)
    for e in examples:
        found.update(repr((e.text, e.pair, e.label, e.id, e.choices, e.words, e.messages)).encode())
    return found.hexdigest()[:32]


def distillation_record(distillation: Distillation) -> dict[str, Any]:
    """The settings that determine the teacher's part of the loss."""
    numbers = {name: getattr(distillation, name) for name in ("soft", "temperature", "cosine")}
    return {"teacher": run_fingerprint(distillation.teacher, []), **numbers}


def finetuning_folder(out: Path) -> RunFolder:
    others = {"of": "of another model or other examples", "teacher": "of another teacher"}
    parse = partial(current_fields, "FinetuneConfig")
    return RunFolder(
        out, "finetune.json", "fine-tuning", can_restart=True, unreadable=others, parse=parse
    )


@contextmanager
def run_folder_lock(out: Path) -> Iterator[None]:
    """Locks a run's folder; a new one is removed again if the run is refused before it begins."""
    new = not out.exists()
    try:
        with folder_lock(out):
            yield
    except MalmoiError:
        files = {path.name for path in out.rglob("*") if path.is_file()}
        if new and files <= {LOCK_NAME, finetuning_folder(out).file}:
            shutil.rmtree(out, ignore_errors=True)
        raise


def begin_run(out: Path, record: Mapping[str, Any], *, overwrite: bool) -> bool:
    """Prepares the folder; returns whether this run is finished. Another run is an error."""
    if overwrite:
        finetuning_folder(out).restart()
        RunState.clear(out)
    return FINISHED in finetuning_folder(out).begin(record)


def finish_run(out: Path, record: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Marks the run as finished and deletes its state."""
    finetuning_folder(out).finish(record, results)
    RunState.clear(out)


def finished(out: Path) -> tuple[int, dict[str, float], dict[str, float]]:
    """A finished run's number of updates, its metrics, and those on the held-out rows."""
    found = JsonObject(finetuning_folder(out).read(), str(finetuning_folder(out).path)).object(
        FINISHED
    )
    metrics = {
        name: float(value) for name, value in found.items() if isinstance(value, int | float)
    }
    held = {name: float(value) for name, value in found.map_of(HELD_OUT, float, default={}).items()}
    return int(metrics.pop("steps")), metrics, held


# ------------------------------------------------------------------ train_state: progress

BEST_PREFIX = "best."  # prefix of the best weights' names
POSITION_FIELDS = ("step", "tokens", "seconds", "threads", "threads_used", "averaged")


@dataclass
class RunState:
    """A run's progress: with weights and optimizer, everything that determines how it continues."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training
    threads: int = 0  # at the start: summation order, and so the last bits, depend on it
    threads_used: int = 0  # now
    pending: list[Tensor] = field(default_factory=list)  # losses since the last log row
    best_step: int = 0
    evaluations_since: int = 0  # evaluations since the best one
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    averaged: int = 0  # steps in the mean of the last weights
    means: Mapping[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None  # of the weights and the optimizer, if saved

    @classmethod
    def load(cls, out: Path, note: Callable[[str], None], device: torch.device) -> "RunState":
        """Loads the newest complete state of a run, or starts a new one."""
        folder = latest_state(out / "train_state", note, ProcessGroup(device=device))
        if folder is None:
            return cls()
        position = position_of(folder)
        found = other_tensors(folder)
        best_step, since = found.pop("judged").tolist()
        pending = list(found.pop("pending").to(device))
        return cls(
            **{name: getattr(position, name) for name in POSITION_FIELDS},
            pending=pending,
            best_step=best_step,
            evaluations_since=since,
            best_weights={
                name.removeprefix(BEST_PREFIX): tensor
                for name, tensor in found.items()
                if name.startswith(BEST_PREFIX)
            },
            means={name: t for name, t in found.items() if name.startswith("average.")},
            folder=folder,
        )

    def save(
        self, out: Path, network: Network, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Writes the state atomically, and removes the previous one."""
        root = out / "train_state"
        position = Position(**{name: getattr(self, name) for name in POSITION_FIELDS})
        tensors = tensors_of(network, optimizers)
        tensors |= {f"{BEST_PREFIX}{name}": tensor for name, tensor in self.best_weights.items()}
        tensors |= self.means
        tensors["judged"] = torch.tensor([self.best_step, self.evaluations_since])
        tensors["pending"] = torch.tensor([float(loss) for loss in self.pending])
        save_state(root, position, tensors, ProcessGroup(device=network.device))
        prune_states(root, 1)

    @staticmethod
    def clear(out: Path) -> None:
        shutil.rmtree(out / "train_state", ignore_errors=True)
