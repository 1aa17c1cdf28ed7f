"""Tasks by name. Listing them needs no torch: what computes is imported on first use."""

import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from malmoi.errors import require_known
from malmoi.evaluation.task import KIND_ALIASES, KIND_METRICS, Example, Task, columns, metric_names
from malmoi.evaluation.tasks import choice, glue, language_modelling, spans  # noqa: F401  # their functions are named in tasks.toml
from malmoi.system.packages import read_toml
from malmoi.system.plugins import Registry, load_installed_plugins
from malmoi.text.rows import any_rows, table_rows  # noqa: F401

__all__ = [
    "KIND_ALIASES", "KIND_METRICS", "TASKS", "Example", "Task", "columns", "metric_names",
    "named_task", "table_rows",
]  # fmt: skip


def _tasks() -> Iterator[Task]:
    """The tasks of tasks.toml, in its order, and those that are generated."""
    seen_here = sys.modules[__name__]
    records = read_toml(__name__, "tasks.toml")
    for name, own in records.items():
        given = records[name] = records.get(own.pop("like", ""), {}) | own
        task: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        task["rows"] = attrgetter(task.get("rows", "table_rows"))(seen_here)
        by = task.pop("columns", None)
        task["example"] = columns(**by) if by else attrgetter(task["example"])(seen_here)
        if "kind" not in task:
            usual = {"metrics": ("accuracy",), "labels": tuple(task["answers"])}
            task = {"kind": "classification"} | usual | task
        yield Task(name, **task)
    yield from (*language_modelling.ARITHMETIC, *language_modelling.SCRAMBLED)


TASKS: Registry[Task] = Registry("task", {task.name: task for task in _tasks()})


def named_task(name: str) -> Task:
    """Looks up a task by name; the name of a kind is a custom task on columns text, label…"""
    if name in KIND_METRICS or name in KIND_ALIASES:
        from malmoi.evaluation.kinds import custom_task

        return custom_task(name)
    if name not in TASKS:
        load_installed_plugins()
    require_known(
        name, (*KIND_METRICS, *TASKS), "There is no task {name!r}.{hint} `malmoi tasks` lists them."
    )
    return TASKS[name]
