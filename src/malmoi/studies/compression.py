"""Compression methods compared by score, size and speed on one task."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from malmoi.compression.distil import distil_model
from malmoi.compression.prune import prune_model
from malmoi.compression.quantize import quantize_model
from malmoi.compression.result import cost_of, folder_size
from malmoi.compression.share import share_layers
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import metric_names
from malmoi.finetuning.finetune import run_finetuning
from malmoi.inference import load
from malmoi.studies.data import StudyTask
from malmoi.studies.study import Cell, JudgedModel, StudyPlan
from malmoi.system.files import folder_lock

WHOLE = "whole"
STUDENT = "distilled student, half of the layers"
GPTQ = "4 bits, GPTQ"
SIZE = "MB"
RATE = "rows per second"
GROUP = 16  # inputs per scale: widths of small models are not multiples of 32


def _half_layers(source: Path, out: Path) -> None:
    prune_model(source, out, layers=list(range(load(source, device="cpu").config.depth))[::2])


def _half_heads(source: Path, out: Path) -> None:
    heads = load(source, device="cpu").config.heads
    prune_model(source, out, heads=max(1, heads // 2) / heads)


Change = Callable[[Path, Path], object]
# applied to the pre-trained model, which recovers during fine-tuning
BEFORE_TUNING: dict[str, Change] = {
    "half of the layers": _half_layers,
    "half of the heads": _half_heads,
    "shared layers": share_layers,
}
# options, given the held-out text
AFTER_TUNING: dict[str, Callable[[Path], dict[str, Any]]] = {
    "8 bits": lambda text: {"bits": 8},
    "4 bits, rounded": lambda text: {"bits": 4},
    GPTQ: lambda text: {"bits": 4, "calibration": text},
}
ROWS = (WHOLE, *AFTER_TUNING, *BEFORE_TUNING, STUDENT)


def compressed(
    judged: JudgedModel, way: str, task: StudyTask, options: dict[str, Any], text: Path
) -> dict[str, float]:
    """Score, bytes and speed of a model compressed with one method."""
    found = task.load()
    assert task.train is not None
    tuned = judged.folder / "tuned"  # shared by the rows that start from it
    source = judged.folder
    if way in BEFORE_TUNING:
        tuned = judged.scratch / "tuned"
        source = judged.scratch / "before"
        BEFORE_TUNING[way](judged.folder, source)
    with folder_lock(tuned.with_name("tuned.lock"), wait=True):
        if not (tuned / "report.json").is_file():
            rows = (task.train, tuned, task.dev)
            run_finetuning(source, found, *rows, device=judged.device, **options)
    final = tuned
    if way in AFTER_TUNING:
        final = judged.scratch / "after"
        quantize_model(tuned, final, group=GROUP, device=judged.device, **AFTER_TUNING[way](text))
    if way == STUDENT:
        final = judged.scratch / "student"
        learning = {**options, "task": found, "dev": task.dev, "device": judged.device}
        distil_model(tuned, final, task.train, **learning)
    model = load(final, device=judged.device)
    score = evaluate_model(model, found, task.dev)[metric_names(found)[0]]
    return {task.name: 100 * score, SIZE: folder_size(final) / 1e6, RATE: cost_of(model).rate}


def compression_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    depth = max(4, plan.scale.recipe("bert", seed).model.depth)  # half of it is two layers
    recipe = plan.scale.recipe("bert", seed, **{"model.depth": depth})
    options = dict(options=plan.scale.tuning(seed), text=plan.data.held_out)
    for task in plan.tasks("sentence")[:1]:
        for row in ROWS:
            yield plan.cell(row, recipe, compressed, way=row, task=task, **options)
