"""`malmoi study`: a paper's table or figure."""

from pathlib import Path
from typing import Any

import typer

from malmoi.api.records import StudySettings
from malmoi.api.runs import study
from malmoi.cli import shared as cli
from malmoi.errors import UsageError
from malmoi.messages import language

CONTEXT_SETTINGS = {"allow_extra_args": True}  # a shell expands --data books/*.txt to several words


def study_command(
    ctx: typer.Context,
    name: str | None = cli.argument(None, "A study; omit to list them.", metavar="[NAME]"),
    data: list[str] | None = cli.option(
        None, "Text: files, globs or builtin:sotu; and folders with data sets.", metavar="SRC…"
    ),
    out: Path | None = cli.option(None, "Study folder.", "--out", "-o", metavar="DIR"),
    options: dict[str, Any] = cli.options_of(StudySettings, workers=0),
    json: cli.Json = False,
) -> None:
    """Reproduce a published table or figure and compare the numbers.

    Finished cells are kept; the same command resumes an interrupted study.

    Example: malmoi study bert-masking --out runs/bert-masking
    """
    if name is None:
        _list(json)
        return
    if out is None:
        raise UsageError("The study {name} needs a folder: --out runs/{name}", name=name)
    cli.load_torch()
    result = study(name, out=out, data=[*(data or ()), *ctx.args], **options)
    cli.print_one(json, result.facts, result.report.read_text("utf-8").rstrip("\n"))


def _list(json: bool) -> None:
    from malmoi.studies.study import MODULES, named_study

    rows = [
        {"study": one.name, "about": getattr(one.about, language()), "paper": one.paper}
        for one in map(named_study, MODULES)
    ]
    if json:
        for row in rows:
            cli.print_json(row)
    else:
        shown = [(row["study"], f"{row['about']} ({row['paper']})") for row in rows]
        cli.print_table(("study", "about"), shown)
