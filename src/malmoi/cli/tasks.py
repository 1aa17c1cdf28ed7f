"""`malmoi tasks`: the built-in tasks."""

from typing import TYPE_CHECKING

import typer

from malmoi.cli.options import JsonOption
from malmoi.cli.output import print_json, print_table

if TYPE_CHECKING:
    pass


def register(app: typer.Typer) -> None:
    app.command("tasks")(tasks_command)


def tasks_command(json: JsonOption = False) -> None:
    """List the tasks that there are, how they are judged and what their folders hold.

    Example: malmoi tasks
    """
    from malmoi.evaluation.tasks import TASKS

    for one in TASKS.values() if json else ():
        print_json(
            {
                "task": one.name,
                "kind": one.kind,
                "metrics": one.metric_names,
                "about": one.about,
                "files": one.files,
            }
        )
    if not json:
        rows = [
            (one.name, one.kind, ", ".join(one.metric_names), one.about) for one in TASKS.values()
        ]
        print_table(("task", "kind", "judged by", "what is asked"), rows)
