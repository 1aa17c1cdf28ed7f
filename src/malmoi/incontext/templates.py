"""Prompt templates are data: other ways to ask a task, from templates.toml or a file of the user's."""

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.tasks import Task

FIELDS = {"prompt": str, "answers": dict, "intro": str, "after": str, "between": str, "most": int}


@cache
def templates() -> dict[str, dict[str, dict[str, Any]]]:
    """Every template by its task and its name."""
    return tomllib.loads(files("malmoi.incontext").joinpath("templates.toml").read_text("utf-8"))


def templated(task: Task, name: str | None) -> Task:
    """The task asked another way: by a template's name, or by a .toml file that holds one."""
    if name is None:
        return task
    known = templates().get(task.name, {})
    if name.endswith(".toml"):
        return _changed(task, _own(Path(name)), name)
    if name not in known:
        hint = nearest(name, known) if known else " It has none of its own: write one into a .toml file and name that."
        raise UsageError(f"The task {task.name} has no template {name!r}.{hint}")
    return _changed(task, known[name], name)


def _own(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MalmoiError(f"The template {path} cannot be read: {error}.") from error


def _changed(task: Task, given: dict[str, Any], name: str) -> Task:
    for field, value in given.items():
        if field not in FIELDS:
            raise UsageError(f"The template {name} has an unknown field {field!r}.{nearest(field, FIELDS)}")
        if not isinstance(value, FIELDS[field]):
            raise UsageError(f"The template {name}: {field} must be of the kind {FIELDS[field].__name__}.")
    answers = given.get("answers", task.answers)
    missing = [label for label in task.labels if label not in answers]
    if missing:
        raise UsageError(f"The template {name} does not say how the label {missing[0]!r} is answered.")
    return replace(task, **given)
