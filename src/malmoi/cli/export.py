"""Write a model for ONNX Runtime or llama.cpp."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from malmoi.cli.options import ModelOption, OverwriteOption, require_free
from malmoi.cli.output import note, say
from malmoi.errors import UsageError
from malmoi.system.files import output_folder

if TYPE_CHECKING:
    from malmoi.checkpoint import Checkpoint

OutFileOption = Annotated[Path, typer.Option("--out", "-o", help="Output file.")]


def onnx_command(
    model: ModelOption,
    out: OutFileOption,
    dtype: Annotated[
        str, typer.Option(help="fp32, or int8: a quarter of the size, slightly different scores.")
    ] = "fp32",
    overwrite: OverwriteOption = False,
) -> None:
    """Write an ONNX file, its tokenizer beside it.

    ONNX Runtime's scores are compared with ours before the file is written.

    Example: malmoi export onnx --model runs/sst2 --out sst2/model.onnx
    """
    from malmoi.checkpoint.export_onnx import export_onnx

    checkpoint = _read(model, out, ".onnx", overwrite)
    tokenizer = out.parent / "tokenizer.json"
    if tokenizer.exists() and not overwrite and out.parent.resolve() != checkpoint.source:
        require_free(tokenizer, overwrite=overwrite)
    if checkpoint.tokenizer is None:
        note("The model has no tokenizer, so none is written beside the file.")
    say("Writing the ONNX file and comparing its scores with ours …")
    with output_folder(out.parent):
        far = export_onnx(checkpoint, out, dtype)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(out.parent)
    print(f"{out}: {_megabytes(out)}, scores at most {far:.1g} from ours")


def gguf_command(
    model: ModelOption,
    out: OutFileOption,
    dtype: Annotated[str, typer.Option(help="f32, f16, bf16 or q8_0.")] = "f32",
    overwrite: OverwriteOption = False,
) -> None:
    """Write a GPT-2 or a LLaMA as a GGUF file for llama.cpp.

    Example: malmoi export gguf --model runs/gpt --out gpt.gguf --dtype q8_0
    """
    from malmoi.checkpoint.export_gguf import export_gguf

    checkpoint = _read(model, out, ".gguf", overwrite)
    with output_folder(out.parent):
        export_gguf(checkpoint, out, dtype)
    print(f"{out}: {_megabytes(out)}")


def _read(model: str, out: Path, suffix: str, overwrite: bool) -> "Checkpoint":
    """The model in fp32, once it is clear that the file may be written."""
    import torch

    from malmoi.adapters import is_adapter
    from malmoi.checkpoint import read_checkpoint

    if out.suffix != suffix:
        raise UsageError(f"--out {out} should be a file whose name ends in {suffix}.")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; --out names a file here.")
    require_free(out, overwrite=overwrite)
    if is_adapter(model):
        raise UsageError(
            f"{model} is an adapter; make it a whole model first: malmoi merge --model {model} "
            "--out DIR"
        )
    checkpoint = read_checkpoint(model, dtype=torch.float32)
    for sentence in checkpoint.notes:
        note(sentence)
    return checkpoint


def _megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.3g} MB"
