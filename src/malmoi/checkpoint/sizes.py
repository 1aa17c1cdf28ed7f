"""Checks before building a network: do the weights match the config, and do they fit in memory?"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from malmoi.checkpoint.weights import Weight
from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, is_out_of_memory
from malmoi.system.limits import format_size
from malmoi.system.machine import free_memory

# Smaller mismatches are left to a later error, which can name the tensor that does not fit.
FEW_LAYERS = 64
FEW_NUMBERS = 1 << 24
WORD_NUMBERS = 8  # 4-bit numbers that one int32 of packed weights may hold


def check_sizes(config: ModelConfig, weights: Mapping[str, Weight], where: str) -> None:
    """Refuses a config whose sizes the weights contradict, before any layer is built."""
    if config.distinct > len(weights) + FEW_LAYERS:
        raise MalmoiError(
            "{where} says that the model has {distinct:,} layers, but the weights have only "
            "{weights:,} tensors; they belong to different models, or are damaged.",
            where=where,
            distinct=config.distinct,
            weights=len(weights),
        )
    needed = least_numbers(config)
    stored = sum(weight.shape.numel() for weight in weights.values())
    if needed > stored + FEW_NUMBERS:
        raise MalmoiError(
            "{where} describes a model of at least {needed:,} numbers, but the weights hold "
            "{stored:,}; they belong to different models, or are damaged.",
            where=where,
            needed=needed,
            stored=stored,
        )


def least_numbers(c: ModelConfig) -> int:
    """Weights in the large matrices alone, a lower bound for any model with this config."""
    positions = c.context + c.position_offset if c.positions == "learned" else 0
    blocks = (c.distinct + c.encoder_depth) * c.block_weights
    if c.encoder_depth:  # the decoder's blocks have a second attention
        blocks += c.distinct * c.width * c.size_per_head * 2 * (c.heads + c.key_heads)
    return blocks + c.token_width * (c.vocab + positions + c.segments)


def check_memory(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None, where: Path, *, packed: bool = False
) -> None:
    """Refuses a model that does not fit into memory, before reading it. `packed`: quantized."""
    sizes = (tensor.nbytes if packed else _bytes(tensor, dtype) for tensor in weights.values())
    check_room(sum(sizes), where)


def check_room(needed: int, where: Path) -> None:
    """Refuses a model that does not fit into free memory."""
    free = free_memory()
    if needed > free:
        raise MalmoiError(
            "The model in {where} needs {needed} of memory, but {free} is free: close other "
            "programs, or use a smaller model or one with fewer bits.",
            where=where,
            needed=format_size(needed),
            free=format_size(free),
        )


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    if tensor.dtype == torch.int32:  # packed weights, unpacked to fp32
        return tensor.numel() * WORD_NUMBERS * 4
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.numel() * kept.itemsize


@contextmanager
def memory_explained(where: Path) -> Iterator[None]:
    """Explains an out-of-memory error that the checks did not foresee."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MalmoiError(
            "The model in {where} does not fit into memory, of which {memory} is free: close "
            "other programs, or use a smaller model or one with fewer bits.",
            where=where,
            memory=format_size(free_memory()),
        ) from error
