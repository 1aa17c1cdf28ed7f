"""The verb of adapters: merge."""

from pathlib import Path
from typing import Annotated

import typer

from malmoi.cli.options import ModelOption
from malmoi.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command("merge")(merge_command)


def merge_command(
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="The folder of the merged model.", metavar="DIR")],
) -> None:
    """Merge a LoRA into the weights of its base: a plain model that every tool opens.

    Example: malmoi merge --model runs/sst2-lora --out runs/sst2
    """
    from malmoi.adapters import is_adapter
    from malmoi.inference import load

    if not is_adapter(model):
        raise UsageError(
            f"{model} is not an adapter: it has no adapter_config.json, so there is nothing to "
            "merge."
        )
    if is_adapter(out):
        raise UsageError(f"{out} holds an adapter; name another folder for the merged model.")
    load(model, device="cpu").save(out)
    typer.echo(str(out))
