"""Quantization: linear maps as integers with scales, in a correspondingly smaller folder.

GPTQ (Frantar et al. 2023) rounds a linear map [O, I] one column at a time. The error of a column,
weighted by the inputs of a calibration text, is subtracted from the remaining columns, so that Ŵx
is close to Wx rather than Ŵ to W. O outputs, I inputs, G groups, N rows of activations.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.checkpoint.quantized import Packing, clipped_scales, place_quantized
from malmoi.checkpoint.weights import Quantized
from malmoi.compression import result
from malmoi.compression.options import JudgedOptions
from malmoi.compression.result import CompressionResult, Cost
from malmoi.errors import require_that
from malmoi.inference import load
from malmoi.kernels.int8 import STRIDE
from malmoi.model import count_parameters
from malmoi.system.machine import float64_device, pick_device
from malmoi.text.documents import read_documents

DEFAULT_GROUP_SIZE = 32  # inputs per scale at 4 bits
SUPPORTED_BITS = (8, 4)
MAX_CALIBRATION_TOKENS = 16_384  # all of them pass through the network at once
MAX_ROW_TOKENS = 512
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it (Frantar et al. 2023 §3.3)
COLUMNS_AT_ONCE = 128  # columns whose errors are applied in one product ("lazy batch")


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

    Embeddings, norms and heads are kept in bf16. When opened, the model stays quantized if the
    machine has a kernel for it (see `malmoi.kernels.int8`).
    """
    require_that(bits in SUPPORTED_BITS, "bits must be 8 or 4, not {bits}.", bits=bits)
    require_that(
        group >= 0,
        "A group is a number of inputs, or 0 for a whole row; it cannot be {group}.",
        group=group,
    )
    judge = result.judged_options(judged)
    out = Path(out)
    checkpoint = result.open_whole(model, out)
    source = checkpoint.source or out
    before, cost = _judged(source, judge)
    count = count_parameters(checkpoint.network)
    packing = Packing(bits, group or (DEFAULT_GROUP_SIZE if bits == 4 else 0))
    if calibration is not None:
        round_calibrated(checkpoint, packing, Path(calibration), pick_device(judge.device))
    write_checkpoint(checkpoint, out, packing=packing)
    after, less = _judged(out, judge)
    sizes = result.folder_size(source), result.folder_size(out)
    return CompressionResult(out, (count, count), sizes, result.paired(before, after), (cost, less))


def _judged(folder: Path, judge: JudgedOptions) -> tuple[dict[str, float], Cost]:
    """Metrics and cost of a model, loaded as `malmoi.load` does."""
    opened = load(folder, device=judge.device)
    return result.measures(opened, judge), result.cost_of(opened)


# ------------------------------------------------------------------ GPTQ


@torch.no_grad()
def round_calibrated(
    checkpoint: Checkpoint, packing: Packing, calibration: Path, device: torch.device
) -> None:
    """Replaces the blocks' linear maps by 4- or 8-bit ones, fitted to the calibration text.

    Each map is rounded when its input arrives, which has the errors of earlier maps.
    """
    network = checkpoint.network
    require_that(
        network.config.distinct >= network.config.depth,
        "GPTQ does not support layers that share weights, as in this model: use --method round.",
    )
    require_that(
        packing.group % STRIDE == 0,
        "GPTQ needs groups of a multiple of {stride} inputs, not {group}; choose another --group.",
        stride=STRIDE,
        group=packing.group,
    )
    tokens = calibration_tokens(checkpoint, calibration)
    found: dict[nn.Linear, Quantized] = {}

    def round_on_arrival(part: nn.Linear, given: tuple[Tensor]) -> None:
        rows = given[0].reshape(-1, part.in_features).float()
        rounded = gptq(part.weight, rows.T @ rows, packing.bits, packing.group or part.in_features)
        part.weight.copy_(rounded.dense())
        found[part] = rounded.cpu()

    network.float().to(device).eval()
    maps = [part for part in network.trunk.blocks.modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_pre_hook(round_on_arrival) for part in maps]
    network.trunk(tokens.to(device))
    for hook in hooks:
        hook.remove()
    network.to("cpu")
    names = {part: name for name, part in network.named_modules()}
    for part, rounded in found.items():
        assert place_quantized(network, names[part], rounded, part.bias)


def calibration_tokens(checkpoint: Checkpoint, calibration: Path) -> Tensor:
    """The text as full rows [B, T], each with the special tokens that the model expects."""
    words = checkpoint.required_tokenizer
    frame = words.encode("").tokens
    body = min(checkpoint.network.config.context, MAX_ROW_TOKENS) - len(frame)
    ids: list[int] = []
    for document in read_documents(calibration):
        ids += words.ids([document.text])[0]
        if len(ids) >= MAX_CALIBRATION_TOKENS:
            break
    count = min(len(ids), MAX_CALIBRATION_TOKENS) // body
    require_that(
        count >= 1,
        "{calibration} has {ids:,} tokens, too few for a row of {body}; give more text.",
        calibration=calibration,
        ids=len(ids),
        body=body,
    )
    starts = range(0, count * body, body)
    return torch.tensor([[*frame[:1], *ids[i : i + body], *frame[1:]] for i in starts])


def gptq(weight: Tensor, hessian: Tensor, bits: int, group: int) -> Quantized:
    """Rounds a weight [O, I] for inputs x with the Hessian Σ x xᵀ [I, I].

    Scales of the original weights let the most important columns be rounded first.
    """
    importance = hessian.diagonal()
    groups = weight.float().unflatten(1, (-1, group))
    scale = clipped_scales(groups, bits, importance.view(-1, group))
    order = importance.argsort(descending=True)
    numbers = torch.empty_like(weight, dtype=torch.int8)
    steps = scale.float().repeat_interleave(group, 1)[:, order]
    numbers[:, order] = _rounded_in_order(
        weight.float()[:, order], steps, _error_weights(hessian[order][:, order]), bits
    )
    return Quantized(numbers, scale, bits)


def _error_weights(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped inverse Hessian: row i weights the error of column i."""
    damped = hessian.to(float64_device(hessian.device)).double()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean() + torch.finfo(torch.float32).tiny
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float().to(hessian.device)


def _rounded_in_order(weight: Tensor, steps: Tensor, factor: Tensor, bits: int) -> Tensor:
    """Integers for the columns from left to right (Frantar et al. 2023, algorithm 1)."""
    high = (1 << bits - 1) - 1
    left = weight.clone()
    numbers = torch.empty_like(weight, dtype=torch.int8)
    for start in range(0, weight.size(1), COLUMNS_AT_ONCE):
        end = min(start + COLUMNS_AT_ONCE, weight.size(1))
        errors = torch.empty_like(left[:, start:end])
        for i in range(start, end):
            column = left[:, i]
            number = (column / steps[:, i]).round().clamp(-high - 1, high)
            numbers[:, i] = number.to(torch.int8)
            error = (column - number * steps[:, i]) / factor[i, i]
            left[:, i:end] -= error[:, None] * factor[i, i:end]
            errors[:, i - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    return numbers
