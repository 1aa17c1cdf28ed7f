"""`malmoi pretrain`: train a model from raw text."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.cli.options import DeviceOption, JsonOption, changes_of
from malmoi.cli.output import format_size, format_span, print_json, print_table
from malmoi.errors import UsageError

SIZED = ("gpt", "bert", "both")  # their size follows from the text, the minutes and the machine


def register(app: typer.Typer) -> None:
    # what a shell makes of --data books/*.txt
    app.command("pretrain", context_settings={"allow_extra_args": True})(pretrain_command)


def pretrain_command(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A name (see malmoi recipes) or a recipe.json.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            help="Text: files, folders, globs, builtin:sotu, or - for stdin.", metavar="SRC…"
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Run folder; an unfinished run resumes.", metavar="DIR")
    ],
    minutes: Annotated[
        str | None, typer.Option(help="Training time in minutes …", metavar="M")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="… or number of tokens …", metavar="N")] = None,
    steps: Annotated[str | None, typer.Option(help="… or number of steps.", metavar="N")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting of the recipe, e.g. train.lr=3e-4.", metavar="K=V"
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="An existing tokenizer; otherwise one is trained.", metavar="DIR"),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="A model to continue from instead of new weights.", metavar="DIR"),
    ] = None,
    device: DeviceOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate the cost of the run.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a model from raw text: a tokenizer, then the weights, in a folder that transformers
    opens.

    RECIPE is gpt, bert or both, whose size follows from the text, the minutes and this machine
    (--dry-run says why), or the name of a paper's model. The schedule fits the budget. Ctrl-C saves
    and stops; the same command goes on from there.

    Example: malmoi pretrain gpt-char --data book.txt --out runs/book --minutes 3
    """
    changes = changes_of(settings) | _given(minutes=minutes, tokens=tokens, steps=steps)
    if dry_run and recipe in SIZED:
        _explain(recipe, [*data, *ctx.args], changes, tokenizer, device, json)
        return
    if dry_run:
        _foresee(recipe, changes, tokenizer, start, device, json)
        return
    from malmoi.training.pretrain import pretrain as train
    from malmoi.training.signals import Stopped

    sources = _sources([*data, *ctx.args])
    try:
        train(
            recipe,
            data=sources,
            out=out,
            tokenizer=tokenizer,
            start=start,
            device=device,
            **changes,
        )
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from stopped
    if os.environ.get("RANK", "0") == "0":
        _tell(out, json)


def _given(**options: str | None) -> dict[str, Any]:
    return {f"train.{name}": value for name, value in options.items() if value is not None}


def _sources(data: list[str]) -> list[str]:
    """The sources; standard input is one of them only once."""
    if data.count("-") > 1:
        raise UsageError("--data - was given twice; standard input can be read only once.")
    return data


def _explain(
    kind: str,
    data: list[str],
    changes: dict[str, Any],
    tokenizer: Path | None,
    device: str | None,
    json: bool,
) -> None:
    """The size that would be chosen, and why."""
    from malmoi.training.pretrain import explain_size

    sized = explain_size(kind, _sources(data), tokenizer=tokenizer, device=device, **changes)
    if json:
        print_json({"recipe": sized.recipe.to_dict(), "reasons": sized.reasons})
        return
    for sentence in sized.reasons:
        print(sentence)


def _foresee(
    name: str,
    changes: dict[str, Any],
    tokenizer: Path | None,
    start: str | None,
    device: str | None,
    json: bool,
) -> None:
    from malmoi.training.estimate import EXPECTED_UTILISATION, estimate_run
    from malmoi.training.pretrain import resolve_recipe

    recipe, made = estimate_run(
        resolve_recipe(name, changes), tokenizer=tokenizer, start=start, device=device
    )
    if json:
        print_json({"recipe": recipe.to_dict(), **made.to_dict()})
        return
    print(recipe.to_json())
    rows = [
        ("parameters", f"{made.parameters:,}"),
        ("tokens", f"about {made.tokens:,}"),
        ("steps", f"{made.steps:,}" if made.steps else "as many as the time allows"),
        *(
            (part, format_size(getattr(made, part)))
            for part in ("weights", "gradients", "optimizer", "activations")
        ),
        ("memory in all", f"about {format_size(made.memory)}"),
        (
            "time",
            f"about {format_span(made.seconds)} at {EXPECTED_UTILISATION:.0%} of "
            f"{made.ceiling / 1e12:.2f} TFLOP/s measured",
        ),
    ]
    print_table(("what", "expected"), rows)


def _tell(out: Path, json: bool) -> None:
    """The result on stdout: the folder and its last measures, of training where there was
    nothing to validate on.
    """
    from malmoi.training.log import read_metrics

    rows = read_metrics(out / "metrics.jsonl")
    measured = [row for row in rows if "valid_loss" in row] or rows
    row: dict[str, Any] = dict(measured[-1]) if measured else {}
    row.pop("sample", None)
    if json:
        print_json({"folder": str(out), **row})
        return
    row = {
        "training_loss" if name == "loss" else name: value
        for name, value in row.items()
        if name != "seconds"
    }
    words = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in row.items())
    print(f"{out}: {words}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
