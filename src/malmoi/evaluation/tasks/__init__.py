"""Tasks by name. Listing them needs no torch: what computes is imported on first use."""

from malmoi.errors import require_known
from malmoi.evaluation.task import KIND_ALIASES, KIND_METRICS, Example, Task, columns, metric_names
from malmoi.evaluation.tasks import choice, glue, language_modelling, spans
from malmoi.system.plugins import Registry, load_installed_plugins
from malmoi.text.rows import table_rows

_EVERY = (*glue.TASKS, *spans.TASKS, *choice.TASKS, *language_modelling.TASKS)
TASKS: Registry[Task] = Registry("task", {task.name: task for task in _EVERY})

__all__ = ["KIND_ALIASES", "KIND_METRICS", "TASKS", "Example", "Task", "columns", "metric_names"]
__all__ += ["named_task", "table_rows"]


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
