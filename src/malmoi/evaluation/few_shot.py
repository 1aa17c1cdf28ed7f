"""In-context evaluation with progress, notes, and a curve over the number of examples."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.evaluation.contamination import FindOverlaps, item_texts, refuse_contamination
from malmoi.evaluation.in_context.lm_eval_tasks import evaluate_with_harness
from malmoi.evaluation.in_context.run import InContextConfig, InContextResult, evaluate_in_context
from malmoi.evaluation.tasks import Task
from malmoi.inference import Model
from malmoi.report.chart import Line, chart, standalone_svg
from malmoi.system.files import write_text
from malmoi.text.rows import RowSource

logger = logging.getLogger(__name__)


def evaluate_few_shot(
    model: Model, task: Task | Path, data: RowSource | None, **asking: Any
) -> Any:
    """Metrics as a dictionary, or a list for several shot counts; a path is an lm-eval YAML."""
    out = asking.pop("out", None)
    find = asking.pop("contamination", None)
    harness = asking.pop("harness", None)
    settings = in_context_config(asking)
    if harness is not None:
        refuse_contamination(find, "lm-eval")
        return evaluate_with_harness(model, task, data, settings, harness)
    if isinstance(task, Path):
        raise UsageError(f"{task} is a task of lm-evaluation-harness: add --harness lm-eval.")
    facts = [result.facts for result in few_shot_results(model, task, data, settings, out, find)]
    return facts[0] if len(facts) == 1 else facts


def in_context_config(asking: dict[str, Any]) -> InContextConfig:
    """A config from options by name; a misspelt name gets a suggestion."""
    for name in asking:
        if name not in InContextConfig.__dataclass_fields__:
            raise UsageError(
                "evaluate has no setting "
                f"{name!r}.{nearest(name, InContextConfig.__dataclass_fields__)}"
            )
    return InContextConfig(**{name: value for name, value in asking.items() if value is not None})


def few_shot_results(
    model: Model,
    task: Task,
    data: RowSource | None,
    asking: InContextConfig,
    out: str | Path | None = None,
    find: FindOverlaps | None = None,
) -> list[InContextResult]:
    """Evaluates, reports progress and notes, and writes the curve if there is a folder.

    `find` looks for the items in the training text; clean and dirty ones are then scored too.
    """
    found: list[InContextResult] = []
    for result in evaluate_in_context(model, task, data, asking):
        told = {note for one in found for note in one.notes}
        for note in (note for note in result.notes if note not in told):
            logger.warning(note)
        found.append(result)
    if find is not None:
        overlaps = find([item_texts(question.example) for question in found[0].questions])
        found = [result.with_contamination(overlaps) for result in found]
    if out is not None:
        write_curve(Path(out), found)
    return found


def write_curve(out: Path, found: Sequence[InContextResult]) -> None:
    """Writes curve.json and, from two points on, curve.svg: the first metric ± standard error."""
    out.mkdir(parents=True, exist_ok=True)
    facts = [{"task": one.task, **one.facts} for one in found]
    write_text(out / "curve.json", json.dumps(facts, indent=1) + "\n")
    if len(found) > 1:
        name = next(iter(found[0].verdict.measures))
        values = [one.verdict.measures[name] for one in found]
        points = [(one["shots"], value.mean) for one, value in zip(facts, values, strict=True)]
        line = Line(points, [value.standard_error for value in values])
        svg = chart({"mean": line}, "examples shown", f"{found[0].task}: {name}")
        write_text(out / "curve.svg", standalone_svg(svg))
