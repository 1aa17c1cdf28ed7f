"""`malmoi merge`: an adapter and its base as one model."""

from malmoi.cli import shared as cli


def merge_command(
    model: cli.Model, out: cli.Out, overwrite: cli.Overwrite = False, json: cli.Json = False
) -> None:
    """Merge a LoRA into its base model.

    Example: malmoi merge --model runs/sst2-lora --out runs/sst2
    """
    from malmoi.inference.export import merge_adapter

    merge_adapter(model, out, overwrite=overwrite)
    cli.print_one(json, {"model": str(out)}, out)
