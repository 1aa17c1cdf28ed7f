"""`malmoi tasks`: the built-in tasks."""

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
            about = one.about if json else translate(one.about)
            row = {"kind": one.kind, "metrics": ", ".join(metric_names(one)), "about": about}
            row["files"] = " ".join(one.files)
            if json:
                cli.print_json({"task": one.name, **row})
            else:
                cells = [(translate(key), value) for key, value in row.items()]
                cli.print_table(("task", one.name), cells)
        return
    rows: list[tuple[str, ...]] = []
    for kind in KIND_METRICS:
        rows += [(), *((t.name, kind, translate(t.about)) for t in shown if t.kind == kind)]
    cli.print_table(("task", "kind", "question"), rows)
    print()
    metrics = [(kind, ", ".join(names)) for kind, names in KIND_METRICS.items()]
    cli.print_table(("kind", "metrics"), metrics)
