"""Device and dtype of a loaded model: as requested, or chosen for this machine."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from malmoi.checkpoint import Checkpoint, read_checkpoint
from malmoi.checkpoint.weights import check_room
from malmoi.messages import msg
from malmoi.model import Network, count_parameters
from malmoi.system.machine import hush_emulation, named_dtype, pick_device, this_machine
from malmoi.system.paths import is_adapter

INT8 = "int8"
PLACES = {"cpu": "processor", "cuda": "GPU", "mps": "Apple GPU"}


def open_for_use(
    path: str | Path, device: str | torch.device | None, dtype: str | torch.dtype | None
) -> Checkpoint:
    """Opens a folder, adapter or GGUF file as a network ready for use."""
    named = named_dtype(dtype) if isinstance(dtype, str) and dtype != INT8 else None
    named = dtype if isinstance(dtype, torch.dtype) else named
    where = pick_device(device or ("cpu" if dtype == INT8 else None))
    checkpoint = _read(path, packed=named is None and where.type == "cpu")
    if dtype == INT8:
        return _in_int8(checkpoint, where)
    if named is not None:
        checkpoint.network.to(where, named)
        return _noted(checkpoint, _cost(where.type, named))
    if checkpoint.bits:
        return _open_quantized(checkpoint, where)
    return _as_stored(checkpoint, where)


def _read(path: str | Path, *, packed: bool) -> Checkpoint:
    if not is_adapter(path):
        return read_checkpoint(path, packed=packed)
    from malmoi.adapters import read_with_adapter

    return read_with_adapter(path, packed=packed)


def _in_int8(checkpoint: Checkpoint, where: torch.device) -> Checkpoint:
    from malmoi.kernels.encode_texts import encode_texts
    from malmoi.kernels.int8 import quantize_int8

    network = quantize_int8(checkpoint.network.to(where, torch.float32))
    network.trunk.fused_blocks = encode_texts
    return checkpoint


def _as_stored(checkpoint: Checkpoint, where: torch.device) -> Checkpoint:
    """Moves the network to a device in its stored dtype, unless this machine would emulate it."""
    stored = checkpoint.network.dtype
    computed = this_machine().inference_dtype(where.type, stored)
    if computed == stored:
        checkpoint.network.to(where)
        return checkpoint
    if where.type == "cpu":
        check_room(
            count_parameters(checkpoint.network) * computed.itemsize, checkpoint.source or Path()
        )
    # converted tensor by tensor, so that memory never holds a second network
    checkpoint.network.to(where, computed)
    note = msg(
        "stored in {name}, computed in {name2}: this {msg} has no units for {name}",
        name=_name(stored),
        name2=_name(computed),
        msg=msg(PLACES[where.type]),
    )
    return replace(_noted(checkpoint, note), dtype=stored)


def _open_quantized(checkpoint: Checkpoint, where: torch.device) -> Checkpoint:
    """Keeps the weights quantized if there is a kernel, else dequantizes them with a note."""
    from malmoi.kernels.int8 import is_quantized
    from malmoi.kernels.int8_row import why_not

    bits = checkpoint.bits
    if is_quantized(checkpoint.network):
        return _in_int8(checkpoint, where)
    computed = this_machine().inference_dtype(where.type, named_dtype("bf16"))
    computed = computed if where.type == "cuda" else torch.float32
    checkpoint.network.to(where, computed)
    reason = (
        why_not()
        if where.type == "cpu"
        else msg("our kernel for {bits} bits runs on CPUs only", bits=bits)
    )
    return _noted(
        checkpoint,
        msg(
            "the weights of {bits} bits are computed in {name} and take its memory: {reason}",
            bits=bits,
            name=_name(computed),
            reason=reason,
        ),
    )


@torch.no_grad()
def column_major(network: Network) -> Network:
    """Stores linear weights by input, as GPT-2's files do, so small batches read memory in order.

    Only the memory layout changes: 1.2× faster at one row with MKL, with no second copy of the
    weights. Other libraries are slower with it (16 tokens a second instead of 20 with OpenBLAS on
    ARM).
    """
    if not this_machine().column_major_pays or network.device.type != "cpu":
        return network
    for module in network.trunk.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            module.weight.data = module.weight.data.t().contiguous().t()
    return network


def _cost(kind: str, dtype: torch.dtype) -> str | None:
    if this_machine().inference_dtype(kind, dtype) == dtype:
        return None
    hush_emulation()
    name = _name(dtype)
    return msg(
        "{name} is emulated on this {msg} and is many times slower than fp32; omit --dtype",
        name=name,
        msg=msg(PLACES[kind]),
    )


def _noted(checkpoint: Checkpoint, note: str | None) -> Checkpoint:
    return replace(checkpoint, notes=(*checkpoint.notes, note)) if note else checkpoint


def _name(dtype: torch.dtype) -> str:
    return next(
        (name for name in ("fp32", "bf16", "fp16") if named_dtype(name) == dtype), str(dtype)
    )
