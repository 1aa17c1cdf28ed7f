"""A fine-tuning that was stopped goes on, one that is finished is not done again: what its folder remembers."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from malmoi.model import Network
from malmoi.objectives.distil import Teaching
from malmoi.run_folder import FINISHED, RunFolder
from malmoi.tasks import Example
from malmoi.train.pace import WorkClock
from malmoi.train.parallel import Group
from malmoi.train.state import (
    Position,
    latest,
    load_state,
    other_tensors,
    position_of,
    prune,
    save_state,
    tensors_of,
)
from malmoi.untrusted import JsonObject

if TYPE_CHECKING:
    from malmoi.tune.tuner import Tuner

BEST = "best."  # before the names of the best weights so far


# ------------------------------------------------------------------ finetune.json: which run this is


def fingerprint(network: Network, examples: Sequence[Example]) -> str:
    """Of the weights that a run begins with and of the examples, wherever their files lie."""
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().data)
    for e in examples:
        found.update(repr((e.text, e.pair, e.label, e.id, e.choices, e.words)).encode())
    return found.hexdigest()[:32]


def memory(teaching: Teaching) -> dict[str, Any]:
    """What decides the teacher's part of a loss."""
    numbers = {"soft": teaching.soft, "temperature": teaching.temperature, "cosine": teaching.cosine}
    return {"teacher": fingerprint(teaching.teacher, []), **numbers}


def run_folder(out: Path) -> RunFolder:
    others = {"of": "of another model or other examples", "teacher": "of another teacher"}
    return RunFolder(out, "finetune.json", "fine-tuning", can_restart=True, unreadable=others)


def begin(out: Path, record: Mapping[str, Any], *, again: bool) -> bool:
    """Makes the folder ready; whether the very same run is finished there. Another run's folder is refused."""
    if again:
        run_folder(out).restart()
        forget(out)
    return FINISHED in run_folder(out).begin(record)


def finish(out: Path, record: Mapping[str, Any], metrics: Mapping[str, float], steps: int) -> None:
    """From now on the run is finished, and its state no longer needed."""
    run_folder(out).finish(record, {"steps": steps, **metrics})
    forget(out)


def finished(out: Path) -> tuple[int, dict[str, float]]:
    """How many updates a finished run made, and its measures."""
    found = JsonObject(run_folder(out).read(), str(run_folder(out).path)).object(FINISHED)
    metrics = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return int(metrics.pop("steps")), metrics


def forget(out: Path) -> None:
    shutil.rmtree(out / "train_state", ignore_errors=True)


# ------------------------------------------------------------------ train_state: where it stands


def keep(tuner: "Tuner") -> None:
    """Saves everything that decides how the run goes on: weights, optimizer, the best so far, where it stands."""
    root, best = tuner.out / "train_state", tuner.best
    position = Position(step=tuner.step, tokens=tuner.tokens, seconds=tuner.clock.seconds)
    position.threads = torch.get_num_threads()
    tensors = tensors_of(tuner.network, tuner.optimizers)
    tensors |= {f"{BEST}{name}": tensor for name, tensor in best.state.items()}
    tensors["judged"] = torch.tensor([best.step, best.since])
    tensors["pending"] = torch.tensor([float(loss) for loss in tuner.pending])
    group = Group(device=tuner.device)
    save_state(root, position, tensors, group)
    prune(root, 1)


def recorded_threads(tuner: "Tuner") -> int:
    """The threads that the run was begun with; 0 where it begins now."""
    folder = latest(tuner.out / "train_state", tuner.log.say, Group(device=tuner.device))
    return position_of(folder).threads if folder else 0


def restore(tuner: "Tuner") -> None:
    """Goes on from the state in the folder, if there is one; the best so far is judged again."""
    folder = latest(tuner.out / "train_state", tuner.log.say, Group(device=tuner.device))
    if folder is None:
        return
    found, best = other_tensors(folder), tuner.best
    best.step, best.since = found["judged"].tolist()
    best.state = {name.removeprefix(BEST): t for name, t in found.items() if name.startswith(BEST)}
    if best.state:
        tuner.network.load_state_dict(best.state)
        best.outcome = tuner.outcome()
    position = load_state(folder, tuner.network, tuner.optimizers)
    tuner.step, tuner.tokens = position.step, position.tokens
    tuner.clock = WorkClock(position.seconds)
    tuner.pending = list(found["pending"].to(tuner.device))
    tuner.log.say(f"Going on from step {tuner.step:,}.")
