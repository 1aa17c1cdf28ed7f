"""`malmoi tasks`: the built-in tasks."""

from itertools import groupby

from malmoi.cli import shared as cli
from malmoi.messages import translate


def tasks_command(
    name: str | None = cli.argument(
        None, "Show this task alone.", metavar="[NAME]", autocompletion=cli.complete_tasks
    ),
    json: cli.Json = False,
) -> None:
    """List the tasks, their kinds and the files they read.

    The kinds are for your own columns: malmoi finetune classification rows.csv --label stars

    Example: malmoi tasks sst2
    """
    from malmoi.evaluation.tasks import KIND_METRICS, TASKS, metric_names, named_task

    shown = TASKS.values() if name is None else (named_task(name),)
    if json or name is not None:
        for one in shown:
            row = {
                "kind": one.kind,
                "metrics": ", ".join(metric_names(one)),
                "about": one.about if json else translate(one.about),
            }
            row["files"] = " ".join(one.files)
            cli.print_json({"task": one.name, **row}) if json else cli.print_table(
                ("task", one.name), [(translate(key), value) for key, value in row.items()]
            )
        return
    order = list(KIND_METRICS)
    kinds = groupby(
        sorted(shown, key=lambda task: order.index(task.kind)), key=lambda task: task.kind
    )
    rows = [
        row
        for _, some in kinds
        for row in ((), *((t.name, t.kind, translate(t.about)) for t in some))
    ]
    cli.print_table(("task", "kind", "question"), rows)
    print()
    cli.print_table(
        ("kind", "metrics"), [(kind, ", ".join(names)) for kind, names in KIND_METRICS.items()]
    )
