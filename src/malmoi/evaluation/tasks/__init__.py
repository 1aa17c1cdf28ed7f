"""Tasks: GLUE, SQuAD, NER, multiple choice, Korean tasks, GPT-3's, and custom tables."""

from importlib import import_module

from malmoi.errors import UsageError, nearest
from malmoi.evaluation.examples import (
    Examples,
    files_in,
    generate_examples,
    label_names,
    load_examples,
    require_labels,
)
from malmoi.evaluation.kinds import KIND_ALIASES, KINDS, custom_task, metric_names, task_prompt
from malmoi.evaluation.prompts import TaskPrompt
from malmoi.evaluation.task import Example, Task, columns
from malmoi.system.plugins import Registry, load_installed_plugins
from malmoi.text.rows import table_rows

_FAMILIES = (
    "glue", "korean", "ner", "squad", "choice", "commonsense", "language_modelling",
    "minimal_pairs", "generated",
)  # fmt: skip
_MODULES = (import_module(f"malmoi.evaluation.tasks.{name}") for name in _FAMILIES)
TASKS: Registry[Task] = Registry(
    "task", {task.name: task for module in _MODULES for task in module.TASKS}
)

__all__ = [
    "KINDS",
    "KIND_ALIASES",
    "TASKS",
    "Example",
    "Examples",
    "Task",
    "TaskPrompt",
    "columns",
    "custom_task",
    "files_in",
    "generate_examples",
    "label_names",
    "load_examples",
    "metric_names",
    "named_task",
    "require_labels",
    "table_rows",
    "task_prompt",
]


def named_task(name: str) -> Task:
    """Looks up a task by name; the name of a kind is a custom task on columns text, label…"""
    if name in KINDS or name in KIND_ALIASES:
        return custom_task(name)
    if name not in TASKS:
        load_installed_plugins()
    if name not in TASKS:
        raise UsageError(
            f"There is no task {name!r}.{nearest(name, {**KINDS, **TASKS})} `malmoi tasks` "
            "lists them."
        )
    return TASKS[name]
