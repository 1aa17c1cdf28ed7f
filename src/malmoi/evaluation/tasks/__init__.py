"""Tasks: GLUE, SQuAD, NER, multiple choice, Korean tasks, GPT-3's, and custom tables.

Listing them needs no torch: what computes is imported on first use.
"""

from importlib import import_module

from malmoi.errors import require_known
from malmoi.evaluation.task import KIND_ALIASES, KIND_METRICS, Example, Task, columns, metric_names
from malmoi.system.plugins import Registry, load_installed_plugins
from malmoi.text.rows import table_rows

_FAMILIES = (
    "glue", "spans", "choice", "language_modelling", "generated",
)  # fmt: skip
_MODULES = (import_module(f"malmoi.evaluation.tasks.{name}") for name in _FAMILIES)
TASKS: Registry[Task] = Registry(
    "task", {task.name: task for module in _MODULES for task in module.TASKS}
)

__all__ = ["KIND_ALIASES", "KIND_METRICS", "TASKS", "Example", "Task", "columns", "metric_names"]
__all__ += ["named_task", "table_rows"]


def named_task(name: str) -> Task:
    """Looks up a task by name; the name of a kind is a custom task on columns text, label…"""
    if name in KIND_METRICS or name in KIND_ALIASES:
        from malmoi.evaluation.kinds import custom_task

        return custom_task(name)
    if name not in TASKS:
        load_installed_plugins()
    known = (*KIND_METRICS, *TASKS)
    require_known(name, known, "There is no task {name!r}.{hint} `malmoi tasks` lists them.")
    return TASKS[name]
