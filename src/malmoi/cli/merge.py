"""`malmoi merge`: an adapter and its base as one model."""

from malmoi.cli import options as opt
from malmoi.cli.output import print_json
from malmoi.errors import UsageError
from malmoi.system.files import require_free


def merge_command(
    model: opt.Model, out: opt.Out, overwrite: opt.Overwrite = False, json: opt.Json = False
) -> None:
    """Merge a LoRA into its base model.

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
        raise UsageError(f"{out} holds an adapter; choose another folder for the merged model.")
    require_free(out, overwrite=overwrite)
    load(model, device="cpu").save(out)
    print_json({"model": str(out)}) if json else print(out)
