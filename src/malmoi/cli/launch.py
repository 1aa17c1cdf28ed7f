"""`malmoi launch`: the same command on several GPUs or machines."""

from typing import Any

import typer

from malmoi.api.tools import plan
from malmoi.cli import shared as cli
from malmoi.cli.plan import plan_rows
from malmoi.cli.pretrain import is_recipe
from malmoi.errors import require_that
from malmoi.messages import msg
from malmoi.planning.gpus import PlanSettings
from malmoi.planning.launch import Engine, Launch
from malmoi.system.machine import this_machine
from malmoi.training.recipe import BUDGETS


def launch_command(
    command: list[str] = cli.argument(
        ..., "The command, as on one machine, after --.", metavar="-- pretrain …"
    ),
    gpus: int | None = cli.option(
        None, "GPUs of each machine, or processes without any.", shown="those of this machine"
    ),
    engine: Engine = cli.option(
        "torchrun", "What starts the processes: torchrun, slurm, kubernetes or ray.", "--on"
    ),
    options: dict[str, Any] = cli.options_of(Launch),
    gpu: str = cli.option("", "GPU model: what the run will take on it.", metavar="NAME"),
    assumed: dict[str, Any] = cli.options_of(PlanSettings, names="price utilisation pue"),
    dry_run: bool = cli.option(False, "Only print the script and the estimate.", "--dry-run"),
) -> None:
    """Start a run on several GPUs or machines.

    Every process is told its part; a lost one costs what was not yet saved.

    Example: malmoi launch --gpus 8 -- pretrain gpt2-small texts/ -o runs/gpt2

    Example: malmoi launch --on slurm --nodes 4 --gpus 8 --dry-run -- pretrain bert-base texts/
    """
    require_that(
        command[0] == "pretrain",
        "launch starts pretrain: corpus build, predict and embed take --part instead.",
    )
    processes = max(1, this_machine().count("cuda")) if gpus is None else gpus
    made = Launch(command=command, engine=engine, processes=processes, **options)
    _estimate(command[1:], made, gpu, assumed)
    if dry_run:
        print(made.script(), end="")
        return
    if made.engine == "torchrun" and made.nodes > 1:
        cli.say("Type the same on the other {machines}.", machines=made.nodes - 1)
    raise typer.Exit(made.run())


def _estimate(words: list[str], made: Launch, gpu: str, assumed: dict[str, Any]) -> None:
    """Says what the plan of a named recipe is; a wrong option of pretrain is an error here."""
    from typer.main import get_command

    from malmoi.cli.app import build_app
    from malmoi.training.recipes import SIZED

    group: Any = get_command(build_app("pretrain"))
    given = group.commands["pretrain"].make_context("pretrain", words).params
    recipe = next((word for word in given["words"] if is_recipe(word)), "gpt")
    if recipe in SIZED or not gpu:
        return
    budget = {f"train.{name}": given[name] for name in BUDGETS if given[name]}
    changes = cli.changes_of(given["settings"]) | budget
    planned = plan(recipe, gpus=made.nodes * made.processes, gpu=gpu, settings=changes, **assumed)
    for name, value in plan_rows(planned):
        if name in ("memory", "time", "energy", "cost"):
            cli.say("{name}: {value}", name=msg(name), value=value)
