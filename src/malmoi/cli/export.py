"""`malmoi export`: ONNX and GGUF files."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from malmoi.cli.app import add_group
from malmoi.cli.options import ModelOption
from malmoi.errors import UsageError
from malmoi.system.files import output_folder

if TYPE_CHECKING:
    from malmoi.checkpoint import Checkpoint

OutOption = Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")]


def register(app: typer.Typer) -> None:
    add_group(
        app, "export", "Write a model for ONNX Runtime or llama.cpp.", onnx_command, gguf_command
    )


def onnx_command(
    model: ModelOption,
    out: OutOption,
    dtype: Annotated[
        str, typer.Option(help="fp32, or int8: a quarter of the size, slightly different scores.")
    ] = "fp32",
    overwrite: OverwriteOption = False,
) -> None:
    """Write a model as an ONNX file, its tokenizer beside it; compared with ONNX Runtime's answers
    first.

    Example: malmoi export onnx --model runs/sst2 --out sst2/model.onnx
    """
    from malmoi.checkpoint.export_onnx import export_onnx

    checkpoint = _read(model, out, ".onnx", overwrite)
    tokenizer = out.parent / "tokenizer.json"
    if tokenizer.exists() and not overwrite and out.parent.resolve() != checkpoint.source:
        raise UsageError(f"{tokenizer} already exists; name another folder, or pass --overwrite.")
    if checkpoint.tokenizer is None:
        print(
            "note: the model has no tokenizer, so none is written beside the file.", file=sys.stderr
        )
    with output_folder(out.parent):
        far = export_onnx(checkpoint, out, dtype)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(out.parent)
    print(f"{out}: {_megabytes(out)}, scores at most {far:.1g} from ours")


def gguf_command(
    model: ModelOption,
    out: OutOption,
    dtype: Annotated[str, typer.Option(help="f32, f16, bf16 or q8_0.")] = "f32",
    overwrite: OverwriteOption = False,
) -> None:
    """Write a GPT-2 or a LLaMA with its tokenizer as a GGUF file for llama.cpp.

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
    if out.exists() and (out.is_dir() or not overwrite):
        raise UsageError(f"{out} already exists; name another file, or pass --overwrite.")
    if is_adapter(model):
        raise UsageError(
            f"{model} is an adapter; make it a whole model first: malmoi merge --model {model} "
            "--out DIR"
        )
    checkpoint = read_checkpoint(model, dtype=torch.float32)
    for note in checkpoint.notes:
        print(f"note: {note}", file=sys.stderr)
    return checkpoint


def _megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.3g} MB"
