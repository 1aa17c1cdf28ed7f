"""Weights on disk: safetensors (one file or shards), or torch's format through its safe loader.

Before a network is built of them: do they match the config, and do they fit in memory?
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, ensure, first_line, is_out_of_memory
from malmoi.system.files import replace_file, write_json
from malmoi.system.machine import free_memory
from malmoi.system.untrusted import format_size, read_object, shown

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Quantized:
    """A weight [O, I] as integers with a scale per group of inputs: int8 [O, I] and [O, G]."""

    numbers: Tensor
    scale: Tensor
    bits: int

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dense(self) -> Tensor:
        """number · scale, in fp32, which holds it exactly."""
        grouped = self.numbers.reshape(len(self.numbers), self.scale.size(1), -1).float()
        return (grouped * self.scale.float()[..., None]).flatten(1)

    def cpu(self) -> "Quantized":
        return Quantized(self.numbers.cpu(), self.scale.cpu(), self.bits)


Weight = Tensor | Quantized


def dense(weight: Weight) -> Tensor:
    """A quantised weight in fp32; any other unchanged."""
    return weight.dense() if isinstance(weight, Quantized) else weight


def by_rows(change: Callable[..., Any], *weights: Weight) -> Any:
    """Applies a change of whole rows (join, split, reorder) to plain or quantized weights alike."""
    some = [weight for weight in weights if isinstance(weight, Quantized)]
    if len(some) < len(weights):
        return change(*map(dense, weights))
    numbers = change(*(one.numbers for one in some))
    scales = change(*(one.scale for one in some))
    if isinstance(numbers, Tensor):
        return Quantized(numbers, scales, some[0].bits)
    return tuple(Quantized(*pair, some[0].bits) for pair in zip(numbers, scales, strict=True))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by their stored names; safetensors are memory-mapped, not copied."""
    for name, index in ((WEIGHTS_FILE, WEIGHTS_INDEX), (TORCH_FILE, TORCH_INDEX)):
        if (folder / name).is_file():
            return read_file(folder / name)
        if (folder / index).is_file():
            return _read_shards(folder / index)
    names = ", ".join((WEIGHTS_FILE, WEIGHTS_INDEX, TORCH_FILE))
    raise MalmoiError("{folder} holds no weights, none of {names}.", folder=folder, names=names)


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = read_object(index).map_of("weight_map", str)
    names = sorted(set(places.values()))
    present = {path.name for path in index.parent.iterdir() if path.is_file()}
    for name in names:
        ensure(
            name in present,
            "{index} names {missing}, which is not in the folder: copy it again.",
            index=index,
            missing=shown(name),
        )
    tensors: dict[str, Tensor] = {}
    for name in names:
        for key, tensor in read_file(index.parent / name).items():
            first = tensors.setdefault(key, tensor)
            ensure(
                first is tensor or torch.equal(first, tensor),
                "{parent}: two of its files hold a different {key}.",
                parent=index.parent,
                key=key,
            )
    lost = next((key for key in places if key not in tensors), None)
    ensure(
        lost is None,
        "{index} names the tensor {lost}, which is in none of its files: copy it again.",
        index=index,
        lost=shown(lost),
    )
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one file."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch refuses unsafe pickles with UnpicklingError, in a hierarchy of its own
    except Exception as error:
        reason = first_line(error)[:200].rstrip(".")
        known = isinstance(error, SafetensorError | RuntimeError | ValueError | OSError | EOFError)
        raise MalmoiError(
            "{path} is truncated or damaged: {reason}. Copy or download it again."
            if known
            else "{path} is not a plain file of tensors and is not opened: {reason}.",
            path=path,
            reason=reason,
        ) from error
    named = isinstance(found, dict) and all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in found.items()
    )
    ensure(named, "{path} holds no named tensors: it is not a weights file.", path=path)
    return dict(found)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically."""
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, partial(save_file, contents, metadata=metadata))


def write_weights(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Writes one safetensors file, or shards of `shard_bytes` at most and an index, atomically."""
    shards = list(_shards(tensors, shard_bytes))
    count = len(shards)
    several = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    names = several if count > 1 else [WEIGHTS_FILE]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, {"format": "pt"})
    keep = {folder / name for name in names}
    if count > 1:
        total = sum(t.nbytes for t in tensors.values())
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        keep.add(folder / WEIGHTS_INDEX)
    others = (folder / name for name in (WEIGHTS_INDEX, TORCH_FILE, TORCH_INDEX))
    for old in {*folder.glob("model*.safetensors"), *others} - keep:
        old.unlink(missing_ok=True)


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for key, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard = {}
            size = 0
        shard[key] = tensor
        size += tensor.nbytes
    yield shard


# ------------------------------------------------------------------ sizes

# Smaller mismatches are left to a later error, which can name the tensor that does not fit.
FEW_LAYERS = 64
FEW_NUMBERS = 1 << 24
WORD_NUMBERS = 8  # 4-bit numbers that one int32 of packed weights may hold


def check_sizes(config: ModelConfig, weights: Mapping[str, Weight], where: str) -> None:
    """Refuses a config whose sizes the weights contradict, before any layer is built."""
    ensure(
        config.distinct <= len(weights) + FEW_LAYERS,
        "{where} says that the model has {distinct:,} layers, but there are {weights:,} tensors: "
        "they belong to different models, or are damaged.",
        where=where,
        distinct=config.distinct,
        weights=len(weights),
    )
    needed = least_numbers(config)
    stored = sum(weight.shape.numel() for weight in weights.values())
    ensure(
        needed <= stored + FEW_NUMBERS,
        "{where} describes a model of at least {needed:,} numbers, but there are {stored:,}: they "
        "belong to different models, or are damaged.",
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
    ensure(
        needed <= free,
        "The model in {where} needs {needed} of memory, but {free} is free: close other programs, "
        "or use a smaller model or one with fewer bits.",
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
            "The model in {where} does not fit into {memory} of memory: close other programs, or "
            "use a smaller model or one with fewer bits.",
            where=where,
            memory=format_size(free_memory()),
        ) from error
