"""Judges: functions of a `JudgedModel` and options that return a number for each column.

Shares (accuracy, F1, correlations) are in percent.
"""

from functools import partial
from typing import Any

from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import metric_names
from malmoi.finetuning.finetune import run_finetuning
from malmoi.inference import load
from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, StudyPlan
from malmoi.training.recipe import Recipe

BITS_CHARACTERS = 200_000  # of held-out text that bits per byte are measured on


def fine_tuned(
    judged: JudgedModel, task: StudyTask, options: dict[str, Any], column: str = ""
) -> dict[str, float]:
    """The task's first metric on its test rows after fine-tuning, in percent."""
    found = task.load()
    assert task.train is not None, f"{task.name} has no rows to learn from"
    result = run_finetuning(
        judged.folder, found, task.train, judged.scratch, task.dev, device=judged.device, **options
    )
    return {column or task.name: 100 * result.metrics[metric_names(found)[0]]}


def tuned_cell(
    plan: StudyPlan, row: str, recipe: Recipe, task: StudyTask, column: str = "", **options: Any
) -> Cell:
    """A cell whose model is fine-tuned for a task, by the scale's settings and these options."""
    seed = recipe.train.seed
    settings = plan.scale.tuning(seed) | options
    judge = partial(fine_tuned, task=task, options=settings, column=column)
    return Cell(row, seed, judge, recipe, plan.data.text)


def zero_shot(
    judged: JudgedModel, task: StudyTask, column: str = "", **asking: Any
) -> dict[str, float]:
    """The task's first metric without fine-tuning (minimal pairs, last words), in percent."""
    found = task.load()
    model = load(judged.folder, device=judged.device)
    facts = evaluate_model(model, found, task.dev, **asking)
    return {column or task.name: 100 * facts[metric_names(found)[0]]}


def bits_per_byte(
    judged: JudgedModel, text: Any, column: str = "bits per byte"
) -> dict[str, float]:
    """Bits per byte of held-out text, of which half of each window is context."""
    model = load(judged.folder, device=judged.device)
    return {column: model.bits_per_byte(text.read_text("utf-8")[:BITS_CHARACTERS])}
