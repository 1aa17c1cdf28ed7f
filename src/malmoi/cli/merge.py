"""`malmoi merge`: an adapter and its base as one model."""

from malmoi.cli import options as opt
from malmoi.cli.output import print_json, print_result


def merge_command(
    model: opt.Model, out: opt.Out, overwrite: opt.Overwrite = False, json: opt.Json = False
) -> None:
    """Merge a LoRA into its base model.

    Example: malmoi merge --model runs/sst2-lora --out runs/sst2
    """
    from malmoi.inference.export import merge_adapter

    merge_adapter(model, out, overwrite=overwrite)
    print_json({"model": str(out)}) if json else print_result(out)
