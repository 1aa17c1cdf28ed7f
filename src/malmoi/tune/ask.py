"""Asking a model in context for a person who waits: progress, notes, and the curve by the number of examples."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malmoi.disk import write_text
from malmoi.errors import UsageError, nearest
from malmoi.incontext import Asking, Result
from malmoi.incontext import evaluate as ask
from malmoi.incontext.harness import harnessed
from malmoi.infer import Model
from malmoi.metrics import Mean
from malmoi.tasks import Task
from malmoi.train.chart import Line, alone, chart
from malmoi.train.log import Voice

Files = str | Path | Sequence[str | Path]


def in_context(model: Model, task: Task | Path, data: Files | None, **asking: Any) -> Any:
    """The measures as a dictionary, or a list of them for several numbers of examples; a path is lm-eval's own YAML."""
    out, harness = asking.pop("out", None), asking.pop("harness", None)
    settings = wanted(asking)
    if harness is not None:
        return harnessed(model, task, data, settings, harness)
    if isinstance(task, Path):
        raise UsageError(f"{task} is a task of lm-evaluation-harness: add --harness lm-eval.")
    facts = [result.facts for result in results(model, task, data, settings, out)]
    return facts[0] if len(facts) == 1 else facts


def wanted(asking: dict[str, Any]) -> Asking:
    """Settings by name; a misspelt one offers the nearest."""
    for name in asking:
        if name not in Asking.__dataclass_fields__:
            raise UsageError(f"evaluate has no setting {name!r}.{nearest(name, Asking.__dataclass_fields__)}")
    return Asking(**{name: value for name, value in asking.items() if value is not None})


def results(
    model: Model, task: Task, data: Files | None, asking: Asking, out: str | Path | None = None
) -> list[Result]:
    """Asks, tells how far it is and what is worth knowing, and draws the curve where a folder is named."""
    voice, found, told = Voice(), [], set()
    for result in ask(model, task, data, asking, voice.progress):
        found.append(result)
        for note in result.notes:
            if note not in told:
                voice.say(f"note: {note}")
            told.add(note)
    voice.close()
    if out is not None:
        write_curve(Path(out), found)
    return found


def write_curve(out: Path, found: Sequence[Result]) -> None:
    """curve.json, and curve.svg where there are at least two points: the first measure ± its standard error."""
    out.mkdir(parents=True, exist_ok=True)
    name = next(iter(found[0].verdict.measures))
    write_text(out / "curve.json", json.dumps([{"task": one.task, **one.facts} for one in found], indent=1) + "\n")
    if len(found) > 1:
        write_text(out / "curve.svg", _drawn(f"{found[0].task}: {name}", [one.verdict.measures[name] for one in found],
                                             [one.facts["shots"] for one in found]))  # fmt: skip


def _drawn(title: str, values: Sequence[Mean], shots: Sequence[float]) -> str:
    """A picture that needs no page around it."""
    points = [(number, value.mean) for number, value in zip(shots, values, strict=True)]
    return alone(chart({"mean": Line(points, [value.error for value in values])}, "examples shown", title))
