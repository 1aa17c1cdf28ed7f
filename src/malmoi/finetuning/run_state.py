"""Resuming a fine-tuning: which run a folder holds, and its saved state."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmoi.config import current_fields
from malmoi.evaluation.task import Example
from malmoi.model import Network
from malmoi.system.run_folder import FINISHED, RunFolder
from malmoi.system.untrusted import JsonObject
from malmoi.training.losses.distil import Distillation
from malmoi.training.parallel import ProcessGroup
from malmoi.training.state import (
    latest_state,
    position_of,
)

if TYPE_CHECKING:
    from malmoi.finetuning.trainer import FinetuneTrainer


# ------------------------------------------------------------------ finetune.json: which run this
# is


def run_fingerprint(network: Network, examples: Sequence[Example]) -> str:
    """Of the weights that a run begins with and of the examples, wherever their files lie."""
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().data)
    for e in examples:
        found.update(repr((e.text, e.pair, e.label, e.id, e.choices, e.words)).encode())
    return found.hexdigest()[:32]


def distillation_record(distillation: Distillation) -> dict[str, Any]:
    """What decides the teacher's part of a loss."""
    numbers = {
        "soft": distillation.soft,
        "temperature": distillation.temperature,
        "cosine": distillation.cosine,
    }
    return {"teacher": run_fingerprint(distillation.teacher, []), **numbers}


def _current_record(found: JsonObject) -> dict[str, Any]:
    return current_fields("FinetuneConfig", found)


def run_folder(out: Path) -> RunFolder:
    others = {"of": "of another model or other examples", "teacher": "of another teacher"}
    return RunFolder(
        out,
        "finetune.json",
        "fine-tuning",
        can_restart=True,
        unreadable=others,
        parse=_current_record,
    )


def begin_run(out: Path, record: Mapping[str, Any], *, restart: bool) -> bool:
    """Makes the folder ready; whether the very same run is finished there. Another run's folder
    is refused.
    """
    if restart:
        run_folder(out).restart()
        clear_state(out)
    return FINISHED in run_folder(out).begin(record)


def finish_run(
    out: Path, record: Mapping[str, Any], metrics: Mapping[str, float], steps: int
) -> None:
    """From now on the run is finished, and its state no longer needed."""
    run_folder(out).finish(record, {"steps": steps, **metrics})
    clear_state(out)


def finished(out: Path) -> tuple[int, dict[str, float]]:
    """How many updates a finished run made, and its measures."""
    found = JsonObject(run_folder(out).read(), str(run_folder(out).path)).object(FINISHED)
    metrics = {
        name: float(value) for name, value in found.items() if isinstance(value, int | float)
    }
    return int(metrics.pop("steps")), metrics


def clear_state(out: Path) -> None:
    shutil.rmtree(out / "train_state", ignore_errors=True)


# ------------------------------------------------------------------ train_state: where it stands


def recorded_threads(trainer: "FinetuneTrainer") -> int:
    """The threads that the run was begun with; 0 where it begins now."""
    folder = latest_state(
        trainer.out / "train_state", trainer.log.line, ProcessGroup(device=trainer.device)
    )
    return position_of(folder).threads if folder else 0
