"""Write a model for ONNX Runtime or llama.cpp."""

from pathlib import Path
from typing import Annotated

from malmoi.cli import options as opt
from malmoi.cli.options import described, option
from malmoi.report.console import waiting

OutFileOption = Annotated[Path, described("Output file.", "--out", "-o")]


def onnx_command(
    model: opt.Model,
    out: OutFileOption,
    dtype: str = option("fp32", "fp32, or int8: a quarter of the size, slightly different scores."),
    overwrite: opt.Overwrite = False,
) -> None:
    """Write an ONNX file, with its tokenizer next to it.

    ONNX Runtime's scores are compared with ours before the file is written.

    Example: malmoi export onnx --model runs/sst2 --out sst2/model.onnx
    """
    with waiting("Exporting"):
        from malmoi.inference.export import export_model

        done = export_model(model, out, format="onnx", dtype=dtype, overwrite=overwrite)
    print(f"{out}: {_megabytes(done.bytes)}, scores within {done.max_difference:.1g} of ours")


def gguf_command(
    model: opt.Model,
    out: OutFileOption,
    dtype: str = option("f32", "f32, f16, bf16 or q8_0."),
    overwrite: opt.Overwrite = False,
) -> None:
    """Write a GPT-2 or a LLaMA as a GGUF file for llama.cpp.

    Example: malmoi export gguf --model runs/gpt --out gpt.gguf --dtype q8_0
    """
    with waiting("Exporting"):
        from malmoi.inference.export import export_model

        done = export_model(model, out, format="gguf", dtype=dtype, overwrite=overwrite)
    print(f"{out}: {_megabytes(done.bytes)}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
