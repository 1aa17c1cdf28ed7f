"""`malmoi study`: a paper's table or figure."""

from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.cli.options import (
    DeviceOption,
    JsonOption,
    MinutesOption,
    SeedOption,
    SetOption,
    TokensOption,
    changes_of,
    given,
    load_torch,
)
from malmoi.cli.output import print_json, print_table
from malmoi.errors import UsageError

CONTEXT_SETTINGS = {"allow_extra_args": True}  # a shell expands --data books/*.txt to several words


def study_command(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A study; omit to list them.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text: files, folders, globs or builtin:sotu.", metavar="SRC…"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Study folder.", metavar="DIR")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Only these: small,medium,large.", metavar="A,B")
    ] = None,
    minutes: MinutesOption = None,
    tokens: TokensOption = None,
    seed: SeedOption = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
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
    _do(chosen, chosen.plan.from_dict(required).override(changes), json)


def _do(chosen: Any, plan: Any, json: bool) -> None:
    from malmoi.evaluation.in_context.question import plural_examples
    from malmoi.training.signals import Stopped

    try:
        facts = chosen.run(plan)
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from stopped
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
    print(f"{plan.out}/report.md")


def _list(rows: list[dict[str, str]], json: bool) -> None:
    if json:
        for row in rows:
            print_json(row)
    else:
        print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
