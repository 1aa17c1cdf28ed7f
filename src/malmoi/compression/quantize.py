"""Quantization: linear maps as integers with scales, in a correspondingly smaller folder."""

from pathlib import Path
from typing import Any

from malmoi.checkpoint import write_checkpoint
from malmoi.checkpoint.quantized import Packing
from malmoi.compression.cost import Cost, cost_of
from malmoi.compression.gptq import round_calibrated
from malmoi.compression.models import check_rows, measured, open_whole, paired
from malmoi.compression.options import JudgedOptions
from malmoi.compression.result import CompressionResult, folder_size
from malmoi.errors import UsageError
from malmoi.inference import load
from malmoi.model import count_parameters
from malmoi.system.machine import pick_device

DEFAULT_GROUP_SIZE = 32  # inputs per scale at 4 bits
SUPPORTED_BITS = (8, 4)


def quantize_model(
    model: str | Path,
    out: str | Path,
    *,
    bits: int = 8,
    group: int = 0,
    calibration: str | Path | None = None,
    **judged: Any,
) -> CompressionResult:
    """Quantizes the linear maps to 8 or 4 bits, saves the model, and reports size and metrics.

    At 8 bits each row has one scale, at 4 every 32 inputs of it; `group` sets another number of
    inputs. Embeddings, norms and heads are kept in bf16. Weights are rounded to the nearest value;
    with a `calibration` text, GPTQ (Frantar et al. 2023) keeps the outputs on such text near the
    original's instead. When opened, the model stays quantized if the machine has a kernel for it
    (see `malmoi.kernels.int8`).
    """
    if bits not in SUPPORTED_BITS:
        raise UsageError("bits must be 8 or 4, not {bits}.", bits=bits)
    if group < 0:
        raise UsageError(
            "A group is a number of inputs, or 0 for a whole row; it cannot be {group}.",
            group=group,
        )
    judge = JudgedOptions(**judged)
    check_rows(judge.task, judge.data)
    out = Path(out)
    checkpoint = open_whole(model, out)
    source = checkpoint.source or out
    before, cost = _judged(source, judge)
    count = count_parameters(checkpoint.network)
    packing = Packing(bits, group or (DEFAULT_GROUP_SIZE if bits == 4 else 0))
    if calibration is not None:
        device = pick_device(judge.device)
        round_calibrated(checkpoint, packing, Path(calibration), device)
    write_checkpoint(checkpoint, out, packing=packing)
    after, less = _judged(out, judge)
    sizes = folder_size(source), folder_size(out)
    return CompressionResult(out, (count, count), sizes, paired(before, after), (cost, less))


def _judged(folder: Path, judge: JudgedOptions) -> tuple[dict[str, float], Cost]:
    """Metrics and cost of a model, loaded as `malmoi.load` does."""
    opened = load(folder, device=judge.device)
    found = {} if judge.data is None else measured(opened, judge.task, judge.data)
    return found, cost_of(opened)
