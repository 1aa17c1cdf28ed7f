"""Prompt templates as data, from templates.toml or a user's file."""

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.evaluation.task import Task

TEMPLATE_FIELDS = {
    "prompt": str,
    "answers": dict,
    "intro": str,
    "suffix": str,
    "separator": str,
    "max_answer_tokens": int,
}


@cache
def templates() -> dict[str, dict[str, dict[str, Any]]]:
    """All templates by task and name."""
    return tomllib.loads(
        files("malmoi.evaluation.in_context").joinpath("templates.toml").read_text("utf-8")
    )


def templated(task: Task, name: str | None) -> Task:
    """The task with another template: by name, or from a .toml file."""
    if name is None:
        return task
    known = templates().get(task.name, {})
    if name.endswith(".toml"):
        return _changed(task, _own(Path(name)), name)
    if name not in known:
        hint = (
            nearest(name, known)
            if known
            else " It has none of its own: write one in a .toml file and give that file."
        )
        raise UsageError(
            "The task {task} has no template {name!r}.{hint}", task=task.name, name=name, hint=hint
        )
    return _changed(task, known[name], name)


def _own(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MalmoiError(
            "The template {path} cannot be read: {error}.", path=path, error=error
        ) from error


def _changed(task: Task, given: dict[str, Any], name: str) -> Task:
    for field, value in given.items():
        if field not in TEMPLATE_FIELDS:
            raise UsageError(
                "The template {name} has an unknown field {field!r}.{hint}",
                name=name,
                field=field,
                hint=nearest(field, TEMPLATE_FIELDS),
            )
        if not isinstance(value, TEMPLATE_FIELDS[field]):
            raise UsageError(
                "The template {name}: {field} must be of type {type}.",
                name=name,
                field=field,
                type=TEMPLATE_FIELDS[field].__name__,
            )
    answers = given.get("answers", task.answers)
    missing = [label for label in task.labels if label not in answers]
    if missing:
        raise UsageError(
            "The template {name} has no answer for the label {missing!r}.",
            name=name,
            missing=missing[0],
        )
    return replace(task, **given)
