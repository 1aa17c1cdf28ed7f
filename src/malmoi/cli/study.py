"""`malmoi study`: a paper's table or figure."""

from pathlib import Path
from typing import Any

import typer

from malmoi.cli import options as opt
from malmoi.cli.inputs import changes_of, given, load_torch
from malmoi.cli.options import argument, option
from malmoi.cli.output import print_json, print_table
from malmoi.errors import UsageError
from malmoi.system.language import language, translate

CONTEXT_SETTINGS = {"allow_extra_args": True}  # a shell expands --data books/*.txt to several words


def study_command(
    ctx: typer.Context,
    name: str | None = argument(None, "A study; omit to list them.", metavar="[NAME]"),
    data: list[str] | None = option(
        None, "Text: files, globs or builtin:sotu; and folders with data sets.", metavar="SRC…"
    ),
    out: Path | None = option(None, "Study folder.", "--out", "-o", metavar="DIR"),
    scale: str = option("cpu", "How large: cpu, gpu-minutes or paper.", metavar="NAME"),
    seeds: int | None = option(
        None, "Runs of each row, with different seeds.", metavar="N", shown="the scale's"
    ),
    workers: int = option(1, "Cells at a time, each in a process of its own.", metavar="N"),
    sizes: str | None = option(None, "Only these: small,medium,large.", metavar="A,B"),
    minutes: opt.Minutes = None,
    tokens: opt.Tokens = None,
    seed: opt.Seed = None,
    settings: opt.Set = None,
    device: opt.Device = None,
    json: opt.Json = False,
) -> None:
    """Reproduce a paper's table or figure, ours beside theirs.

    Finished cells are kept: the same command resumes a stopped study.

    Example: malmoi study bert-masking --out runs/bert-masking
    """
    if name is None:
        _list(json)
        return
    if out is None:
        raise UsageError(f"The study {name} needs a folder: --out runs/{name}")
    load_torch()
    from malmoi.studies.registry import IN_CONTEXT, named_study
    from malmoi.studies.run import StudyRunConfig, run_study

    sources = [*(data or ()), *ctx.args]
    if name == IN_CONTEXT:
        changes = changes_of(settings) | given(locals(), "sizes", "minutes", "tokens", "seed")
        required = {"data": sources or ["builtin:sotu"], "out": str(out), "device": device}
        _in_context(required, changes, json)
        return
    options = StudyRunConfig(
        scale=scale, data=sources, seeds=seeds or 0, workers=workers, device=device
    )
    result = run_study(named_study(name), out, options)
    print_json(result.facts) if json else print(result.report.read_text("utf-8"), end="")


def _in_context(required: dict[str, Any], changes: dict[str, Any], json: bool) -> None:
    from malmoi.evaluation.in_context.question import plural_examples
    from malmoi.studies.in_context.study import InContextStudyConfig, run_in_context_study

    facts = run_in_context_study(InContextStudyConfig.from_dict(required).override(changes))
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
    print(f"{required['out']}/report.md")


def _list(json: bool) -> None:
    from malmoi.studies.registry import IN_CONTEXT, MODULES, named_study

    rows = [
        {"study": one.name, "about": getattr(one.about, language()), "paper": one.paper}
        for one in map(named_study, MODULES)
    ]
    about = translate("accuracy by the number of examples, for three sizes")
    rows.append({"study": IN_CONTEXT, "about": about, "paper": "Brown et al. 2020, figure 1.2"})
    if json:
        for row in rows:
            print_json(row)
    else:
        print_table(
            ("study", "about"),
            [(row["study"], f"{row['about']} ({row['paper']})") for row in rows],
        )
