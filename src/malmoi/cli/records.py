"""`malmoi records`: the best results reached within a number of minutes."""

from pathlib import Path
from typing import Any

from malmoi.api.run_options import DeviceOptions
from malmoi.cli import shared as cli
from malmoi.errors import UsageError
from malmoi.messages import translate


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
        _list(json)
        return
    if words[0] != "run" or len(words) < 3 or out is None:
        raise UsageError(
            "Run a track with: malmoi records run NAME SRC… --out DIR. `malmoi records` alone "
            "lists the tracks."
        )
    from malmoi.studies.records import entry_toml, run_record

    changes = {**cli.changes_of(settings), **where, "recipe": recipe, "judge_data": judge_data}
    entry = run_record(words[1], words[2:], out, **changes)
    cli.print_json(entry.to_dict()) if json else print(entry_toml(entry), end="")


def _list(json: bool) -> None:
    from malmoi.studies.records import read_ladder

    tracks, entries = read_ladder()
    if json:
        for entry in entries:
            cli.print_json(entry.to_dict())
        return
    for name, track in tracks.items():
        print(f"{name}: {translate(track.about)}")
    print()
    cli.print_table(
        ("track", "figure", "recipe", "machine", "date", "commit"),
        ((e.track, f"{e.figure:g}", e.recipe, e.machine, e.date, e.commit) for e in entries),
    )
