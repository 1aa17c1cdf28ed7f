"""Write a model for ONNX Runtime or llama.cpp."""

from pathlib import Path
from typing import Annotated, Literal

from malmoi.api.tools import export
from malmoi.cli import shared as cli
from malmoi.messages import joined, msg

OutFileOption = Annotated[Path, cli.described("Output file.", "--out", "-o")]


def onnx_command(
    model: cli.Model,
    out: OutFileOption,
    dtype: str = cli.option(
        "fp32", "fp32, or int8: a quarter of the size, slightly different scores."
    ),
    overwrite: cli.Overwrite = False,
) -> None:
    """Write an ONNX file, with its tokenizer next to it.

    ONNX Runtime's scores are compared with ours before the file is written.

    Example: malmoi export onnx --model runs/sst2 --out sst2/model.onnx
    """
    _export(model, out, "onnx", dtype, overwrite=overwrite)


def gguf_command(
    model: cli.Model,
    out: OutFileOption,
    dtype: str = cli.option("f32", "f32, f16, bf16 or q8_0."),
    overwrite: cli.Overwrite = False,
) -> None:
    """Write a GPT-2 or a LLaMA as a GGUF file for llama.cpp.

    Example: malmoi export gguf --model runs/gpt --out gpt.gguf --dtype q8_0
    """
    _export(model, out, "gguf", dtype, overwrite=overwrite)


def _export(
    model: str, out: Path, format: Literal["onnx", "gguf"], dtype: str, *, overwrite: bool
) -> None:
    cli.load_torch()
    done = export(model, out, format=format, dtype=dtype, overwrite=overwrite)
    far = done.max_difference
    compared = "" if far is None else msg(", scores within {far:.1g} of ours", far=far)
    cli.print_result(joined("", (f"{out}: {done.bytes / 1e6:.3g} MB", compared)))
