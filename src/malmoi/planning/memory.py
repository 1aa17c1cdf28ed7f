"""Memory of each GPU: single, replicated (DDP) or sharded (FSDP2); see training/parallel.py."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from malmoi.model import Network, count_parameters
from malmoi.training.budget import activation_bytes, optimizer_bytes
from malmoi.training.recipe import Recipe

GATHERED_BLOCKS = 2  # blocks that FSDP2 holds unsharded: the current, and the next or previous


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one GPU, with `micro` sequences per pass and `passes` passes per step."""

    way: str  # one, ddp, fsdp
    gpus: int
    gradient_checkpointing: bool
    micro: int = 0
    passes: int = 0
    weights: int
    gradients: int
    optimizer: int
    copies: int  # bf16 copies of the weights, needed by the backward pass
    # communication buffers: DDP's buckets, FSDP's temporarily unsharded weights and gradients
    exchange: int
    activations: int = 0

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer
        return state + self.copies + self.exchange + self.activations

    def to_dict(self, room: float) -> dict[str, Any]:
        return asdict(self) | {"total": self.total, "fits": self.total <= room}


@dataclass(frozen=True)
class DeviceLayout:
    """A network placed on some GPUs: everything that does not depend on the micro-batch."""

    recipe: Recipe
    half: bool
    fixed: MemoryUse  # without a pass

    @property
    def share(self) -> int:
        """Sequences of a step that one GPU processes."""
        return max(1, self.recipe.train.batch // self.fixed.gpus)

    def memory(self, micro: int) -> MemoryUse:
        """Memory use with this many sequences per pass."""
        activations = activation_bytes(self.recipe, micro, half=self.half, device="cuda")
        passes = -(-self.share // micro)
        return replace(self.fixed, micro=micro, passes=passes, activations=activations)

    def best(self, room: float) -> MemoryUse:
        """With the recipe's micro-batch, or the largest that fits; if none does, the least use."""
        whole = self.memory(min(self.recipe.train.micro or self.share, self.share))
        if self.recipe.train.micro or whole.total <= room:
            return whole
        fits = bisect_right(range(1, self.share), room, key=lambda micro: self.memory(micro).total)
        return self.memory(fits) if fits else min(self.memory(1), whole, key=lambda one: one.total)


def device_layout(
    network: Network, recipe: Recipe, way: str, gpus: int, *, half: bool
) -> DeviceLayout:
    """The network on each of `gpus` GPUs. On one, all strategies are the same."""
    way = way if gpus > 1 else "one"
    pieces = gpus if way == "fsdp" else 1

    def here(p: Tensor) -> int:
        return -(-p.shape[0] // pieces) * (p.numel() // p.shape[0])  # FSDP2 shards rows

    whole = count_parameters(network)
    block = count_parameters(network.trunk.blocks[0])
    around = whole - count_parameters(network.trunk.blocks)
    moment = {"one": 0, "ddp": 4 * whole, "fsdp": 8 * (around + GATHERED_BLOCKS * block)}
    held = 4 * sum(map(here, network.parameters()))
    fixed = MemoryUse(
        way=way,
        gpus=gpus,
        gradient_checkpointing=recipe.train.gradient_checkpointing,
        weights=held,
        gradients=held,
        optimizer=optimizer_bytes(network, recipe, here),
        copies=_copies(network, recipe) if half else 0,
        exchange=moment[way],
    )
    return DeviceLayout(recipe, half, fixed)


def activations(recipe: Recipe, limit: int, *, half: bool) -> dict[int, tuple[int, int]]:
    """Bytes by sequences per pass, 1, 2, 4… up to `limit`: plain, and with checkpointing."""
    kept, again = (
        replace(recipe, train=replace(recipe.train, gradient_checkpointing=r))
        for r in (False, True)
    )
    sizes = [1 << n for n in range(limit.bit_length())]
    how: Any = dict(half=half, device="cuda")
    return {n: (activation_bytes(kept, n, **how), activation_bytes(again, n, **how)) for n in sizes}


def _copies(network: Network, recipe: Recipe) -> int:
    """Bytes of autocast's bf16 weights until the backward pass; of one block if checkpointed."""
    matrices = sum(p.numel() for p in network.trunk.blocks[0].parameters() if p.dim() == 2)
    return 2 * matrices * (1 if recipe.train.gradient_checkpointing else network.config.depth)


def device_layouts(
    network: Network, recipe: Recipe, gpus: int, *, half: bool
) -> Iterator[DeviceLayout]:
    """Every strategy, without and with gradient checkpointing."""
    for way in ("one", "ddp", "fsdp") if gpus > 1 else ("one",):
        for again in (False, True):
            chosen = replace(recipe, train=replace(recipe.train, gradient_checkpointing=again))
            yield device_layout(network, chosen, way, 1 if way == "one" else gpus, half=half)
