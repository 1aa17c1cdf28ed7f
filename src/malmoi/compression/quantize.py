"""Quantization: linear maps as integers with scales, in a correspondingly smaller folder."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from malmoi.checkpoint import write_checkpoint
from malmoi.checkpoint.quantized import Packing
from malmoi.compression.cost import Cost, cost_of
from malmoi.compression.models import check_rows, measured, open_whole, paired
from malmoi.compression.options import JudgedOptions
from malmoi.compression.result import CompressionResult
from malmoi.errors import UsageError
from malmoi.inference import load

DEFAULT_GROUP_SIZE = 32  # inputs per scale at 4 bits
SUPPORTED_BITS = (8, 4)


def quantize_model(
    model: str | Path,
    out: str | Path,
    *,
    bits: int = 8,
    group: int = 0,
    **judged: Unpack[JudgedOptions],
) -> CompressionResult:
    """Writes a model whose linear maps have 8 or 4 bits per weight; reports savings and costs.

    At 8 bits each row has one scale, at 4 every 32 inputs of it; `group` sets another number of
    inputs. Embeddings, norms and heads are kept in bf16. Weights are rounded to the nearest value,
    so data is needed only to evaluate. When opened, the model stays quantized if the machine has a
    kernel for it (see `malmoi.model.int8`).
    """
    if bits not in SUPPORTED_BITS:
        raise UsageError(f"A weight can have 8 or 4 bits, not {bits}.")
    if group < 0:
        raise UsageError(
            f"A group is a number of inputs, or 0 for a whole row; it cannot be {group}."
        )
    check_rows(judged.get("task"), judged.get("data"))
    out = Path(out)
    checkpoint = open_whole(model, out)
    source = checkpoint.source or out
    before, cost = _judged(source, judged)
    write_checkpoint(
        checkpoint, out, packing=Packing(bits, group or (DEFAULT_GROUP_SIZE if bits == 4 else 0))
    )
    after, less = _judged(out, judged)
    found = CompressionResult.of(
        (checkpoint.network, source), (checkpoint.network, out), paired(before, after)
    )
    return replace(found, costs=(cost, less))


def _judged(folder: Path, judged: JudgedOptions) -> tuple[dict[str, float], Cost]:
    """A model's quality and cost, opened as `malmoi.load` opens it."""
    opened = load(folder, device=judged.get("device"))
    data = judged.get("data")
    found = {} if data is None else measured(opened, judged.get("task"), data)
    return found, cost_of(opened)
