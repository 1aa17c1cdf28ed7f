"""Tasks as records: GLUE, SQuAD, NER, multiple choice, Korean ones, what GPT-3 was asked, and
any table of your own.
"""

from pathlib import Path

from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.evaluation.tasks import (
    arithmetic,
    choice,
    commonsense,
    glue,
    korean,
    language_modelling,
    ner,
    scramble,
    squad,
)
from malmoi.evaluation.tasks.base import (
    KIND_METRICS,
    Example,
    Examples,
    Task,
    generate_examples,
    label_names,
    load_examples,
    require_labels,
)
from malmoi.evaluation.tasks.custom import custom_task
from malmoi.evaluation.tasks.prompts import TaskPrompt, task_prompt

_FAMILIES = (
    glue,
    korean,
    ner,
    squad,
    choice,
    commonsense,
    language_modelling,
    arithmetic,
    scramble,
)
TASKS: dict[str, Task] = {task.name: task for family in _FAMILIES for task in family.TASKS}

__all__ = [
    "KIND_METRICS",
    "TASKS",
    "Example",
    "Examples",
    "Task",
    "TaskPrompt",
    "custom_task",
    "files_in",
    "generate_examples",
    "label_names",
    "load_examples",
    "named_task",
    "require_labels",
    "task_prompt",
]


def named_task(name: str) -> Task:
    """A task by its name; the name of a kind stands for your own columns text, label…"""
    if name in KIND_METRICS and name != "choice":
        return custom_task(name)  # type: ignore[arg-type]
    if name not in TASKS:
        raise UsageError(
            f"There is no task {name!r}.{nearest(name, {**KIND_METRICS, **TASKS})} `malmoi tasks` "
            "lists them."
        )
    return TASKS[name]


def files_in(task: Task, source: str | Path) -> tuple[Path, Path | None]:
    """The training file and, of a folder, the development file that lies beside it."""
    path = Path(source)
    if not path.is_dir():
        return path, None
    train, dev = ([p for p in sorted(path.glob(pattern)) if p.is_file()] for pattern in task.files)
    if not train:
        raise MalmoiError(
            f"The folder {path} has no file {task.files[0]!r} for the task {task.name}."
        )
    return train[0], dev[0] if dev else None
