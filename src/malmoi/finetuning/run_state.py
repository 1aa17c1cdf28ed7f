"""finetune.json: which fine-tuning run a folder holds, and whether it is finished."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.evaluation.task import Example
from malmoi.finetuning.config import FinetuneConfig
from malmoi.model import Network
from malmoi.settings import current_fields
from malmoi.system.files import LOCK_NAME, folder_lock
from malmoi.system.run_folder import FINISHED, RunFolder
from malmoi.system.untrusted import JsonObject
from malmoi.training.losses.distil import Distillation
from malmoi.training.state import discard_states

HELD_OUT = "held_out"  # name of the held-out rows' metrics in finetune.json


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
    return RunFolder(
        out, "finetune.json", "fine-tuning", can_restart=True, unreadable=others, parse=_current
    )


def _current(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record under today's names; settings that are newer than it have their defaults."""
    return FinetuneConfig().to_dict() | current_fields("FinetuneConfig", record)


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
        discard_states(out)
    return FINISHED in finetuning_folder(out).begin(record)


def finish_run(out: Path, record: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Marks the run as finished and deletes its state."""
    finetuning_folder(out).finish(record, results)
    discard_states(out)


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
