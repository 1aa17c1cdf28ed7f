"""`plan`: estimates a run on given GPUs without training or allocating weights.

Its strategies are those of training/parallel.py: single, replicated (DDP) or sharded (FSDP2), over
all GPUs or those of a machine (hybrid); `train.tensor` cuts the products of the layers, too.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from malmoi.errors import require_that
from malmoi.messages import msg
from malmoi.model import Network, count_parameters
from malmoi.planning.flops import Flops, Optimal, flops, optimal
from malmoi.planning.gpus import GPU, PlanSettings
from malmoi.training.budget import (
    activation_bytes,
    budget_of,
    meta_network,
    optimizer_bytes,
    resolve_for_estimate,
)
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import SIZED

PARAMETER_PARTS = ("embedding", "blocks", "head")
PLAIN_FACTS = (
    "steps", "tokens", "seconds", "fits", "gpu_hours", "kwh", "cost", "state", "storage", "help",
    "notes",
)  # fmt: skip
GPUS_OF_A_MACHINE = 8
GATHERED_BLOCKS = 2  # blocks that FSDP2 holds unsharded: the current, and the next or previous
USABLE_MEMORY_SHARE = 0.95  # of a GPU's memory: the rest goes to CUDA, NCCL and fragmentation


# ------------------------------------------------------------------ memory of one GPU


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one GPU, with `micro` sequences per pass and `passes` passes per step."""

    way: str  # one, ddp, fsdp, hybrid
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
        return max(1, self.recipe.train.batch * self.recipe.train.tensor // self.fixed.gpus)

    def memory(self, micro: int) -> MemoryUse:
        """Memory use with this many sequences per pass."""
        activations = activation_bytes(self.recipe, micro, half=self.half, device="cuda")
        return replace(
            self.fixed, micro=micro, passes=-(-self.share // micro), activations=activations
        )

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
    tensor = recipe.train.tensor
    pieces = {"fsdp": gpus, "hybrid": min(gpus, GPUS_OF_A_MACHINE)}.get(way, tensor) // tensor
    products = {id(p) for p in network.trunk.blocks.parameters() if p.dim() == 2}

    def here(p: Tensor) -> int:
        """Weights of a parameter on one GPU; FSDP2 shards rows."""
        held = -(-p.shape[0] // pieces) * (p.numel() // p.shape[0])
        return held // tensor if id(p) in products else held

    whole = count_parameters(network)
    block = count_parameters(network.trunk.blocks[0]) // tensor
    gathered = 8 * (whole - count_parameters(network.trunk.blocks) + GATHERED_BLOCKS * block)
    held = 4 * sum(map(here, network.parameters()))
    fixed = MemoryUse(
        way=way,
        gpus=gpus,
        gradient_checkpointing=recipe.train.gradient_checkpointing,
        weights=held,
        gradients=held,
        optimizer=optimizer_bytes(network, recipe, here),
        copies=_copies(network, recipe) if half else 0,
        exchange={"one": 0, "ddp": 4 * whole, "fsdp": gathered, "hybrid": gathered}[way],
    )
    return DeviceLayout(recipe, half, fixed)


def activations(recipe: Recipe, limit: int, *, half: bool) -> dict[int, tuple[int, int]]:
    """Bytes by sequences per pass, 1, 2, 4… up to `limit`: plain, and with checkpointing."""
    kept, again = (_checkpointed(recipe, again=again) for again in (False, True))
    sizes = [1 << n for n in range(limit.bit_length())]
    how: Any = dict(half=half, device="cuda")
    return {n: (activation_bytes(kept, n, **how), activation_bytes(again, n, **how)) for n in sizes}


def _checkpointed(recipe: Recipe, *, again: bool) -> Recipe:
    return recipe.override({"train.gradient_checkpointing": again})


def _copies(network: Network, recipe: Recipe) -> int:
    """Bytes of autocast's bf16 weights until the backward pass; of one block if checkpointed."""
    matrices = sum(p.numel() for p in network.trunk.blocks[0].parameters() if p.dim() == 2)
    return 2 * matrices * (1 if recipe.train.gradient_checkpointing else network.config.depth)


def device_layouts(
    network: Network, recipe: Recipe, gpus: int, *, half: bool
) -> Iterator[DeviceLayout]:
    """Every strategy, without and with gradient checkpointing."""
    several = ("ddp", "fsdp") if gpus <= GPUS_OF_A_MACHINE else ("ddp", "fsdp", "hybrid")
    for way in ("one", *several) if gpus > 1 else ("one",):
        for again in (False, True):
            chosen = _checkpointed(recipe, again=again)
            yield device_layout(network, chosen, way, 1 if way == "one" else gpus, half=half)


# ------------------------------------------------------------------ a run


@dataclass(frozen=True)
class Fleet:
    """The GPUs of a run, their utilisation and their price."""

    gpu: GPU
    gpus: int = 1
    utilisation: float = PlanSettings.utilisation
    pue: float = PlanSettings.pue
    price: float | None = None  # of one GPU per hour

    def __post_init__(self) -> None:
        require_that(self.gpus >= 1, "A run needs at least one GPU, not {gpus}.", gpus=self.gpus)
        PlanSettings(utilisation=self.utilisation, pue=self.pue, price=self.price)  # checks them

    @property
    def room(self) -> float:
        """Bytes of one GPU that a run may use."""
        return USABLE_MEMORY_SHARE * self.gpu.memory * 1e9

    def half(self, recipe: Recipe) -> bool:
        """Whether the run computes in bf16."""
        return self.gpu.bf16 > 0 and recipe.train.precision != "fp32"

    def peak(self, recipe: Recipe) -> float:
        """FLOP/s of one GPU in the run's precision."""
        return 1e12 * (self.gpu.bf16 if self.half(recipe) else self.gpu.fp32)


@dataclass(frozen=True)
class RunPlan:
    """The cost of a run. Bytes of memory and seconds are estimates, the counts are exact."""

    recipe: Recipe
    fleet: Fleet
    embedding: int  # parameters, as are the next two
    blocks: int
    head: int
    steps: int  # 0: as many as the minutes allow
    tokens: int
    flops: Flops
    seconds: float
    memory: MemoryUse  # with the recipe's strategy
    ways: tuple[MemoryUse, ...]  # with every strategy, without and with gradient checkpointing
    activations: dict[int, tuple[int, int]]  # bytes by micro-batch: plain, and checkpointed
    state: int  # bytes of one saved state
    storage: int  # bytes of the run's folder at its fullest, without the text
    optimal: Optimal | None  # for a language model only
    help: str  # what would make it fit; empty if it does
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks + self.head

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.fleet.room

    @property
    def gpu_hours(self) -> float:
        return self.fleet.gpus * self.seconds / 3600

    @property
    def kwh(self) -> float | None:
        """Energy at the GPUs' maximum power, including the data centre's overhead."""
        watts = self.fleet.gpu.watts
        return self.gpu_hours * watts / 1000 * self.fleet.pue if watts else None

    @property
    def cost(self) -> float | None:
        return None if self.fleet.price is None else self.gpu_hours * self.fleet.price

    def to_dict(self) -> dict[str, object]:
        room = self.fleet.room
        parts = {part: getattr(self, part) for part in PARAMETER_PARTS}
        each = {"6nd": self.flops.rule, "exact": self.flops.exact, "again": self.flops.again}
        by_micro = self.activations.items()
        return {
            "recipe": self.recipe.to_dict(),
            **asdict(self.fleet),
            "parameters": parts | {"all": self.parameters},
            "flops": {name: count * self.tokens for name, count in each.items()},
            "days": self.seconds / 86_400,
            "tokens_per_second": self.tokens / self.seconds,
            **{name: getattr(self, name) for name in PLAIN_FACTS},
            "memory": self.memory.to_dict(room),
            "ways": [one.to_dict(room) for one in self.ways],
            "activations": {n: {"kept": a, "rematerialised": b} for n, (a, b) in by_micro},
            "optimal": None if self.optimal is None else asdict(self.optimal),
        }


def plan_run(recipe: Recipe, fleet: Fleet) -> RunPlan:
    """Estimates what this recipe would take on these GPUs."""
    recipe = resolve_for_estimate(recipe)
    network = meta_network(recipe)
    c = recipe.train
    require_that(
        fleet.gpus <= c.batch * c.tensor,
        "{gpus:,} GPUs cannot share a step of {batch:,} sequences: use fewer, or set a larger "
        "train.batch.",
        gpus=fleet.gpus,
        batch=c.batch,
    )
    each = flops(network, recipe)
    half = fleet.half(recipe)
    steps, tokens, seconds = budget_of(
        recipe, each.done, fleet.gpus * fleet.utilisation * fleet.peak(recipe)
    )
    embedding = count_parameters(network.trunk.embed)
    blocks = count_parameters(network.trunk.blocks) + count_parameters(network.trunk.norm)
    count = count_parameters(network)
    memory = device_layout(network, recipe, c.parallel, fleet.gpus, half=half).best(fleet.room)
    state = 4 * count + optimizer_bytes(network, recipe)
    return RunPlan(
        recipe=recipe,
        fleet=fleet,
        embedding=embedding,
        blocks=blocks,
        head=count - embedding - blocks,
        steps=steps,
        tokens=tokens,
        flops=each,
        seconds=seconds,
        memory=memory,
        ways=tuple(
            one.best(fleet.room) for one in device_layouts(network, recipe, fleet.gpus, half=half)
        ),
        activations=activations(recipe, max(1, c.batch // fleet.gpus), half=half),
        state=state,
        # the last few states, the best, the one being written; then the model
        storage=(c.keep + 2) * state + 4 * count,
        optimal=optimal(blocks, count, each.rule * tokens) if recipe.objective == "lm" else None,
        help="" if memory.total <= fleet.room else _help(network, recipe, fleet),
        notes=tuple(_notes(recipe, fleet)),
    )


def _help(network: Network, recipe: Recipe, fleet: Fleet) -> str:
    """The smallest change that makes it fit, as options; or that no number of GPUs is enough."""
    half = fleet.half(recipe)
    c = recipe.train
    for way, again, micro, gpus in _changes(recipe, fleet.gpus):
        tried = recipe.override(
            {"train.parallel": way, "train.gradient_checkpointing": again, "train.micro": micro}
        )
        if device_layout(network, tried, way, gpus, half=half).best(fleet.room).total <= fleet.room:
            return msg(
                "It fits with {words}.", words=" ".join(_words(recipe, tried, fleet.gpus, gpus))
            )
    small = recipe.override({"train.gradient_checkpointing": True, "train.micro": 1})
    return msg(
        "No number of these GPUs is enough: on {batch:,}, sharded and with gradient "
        "checkpointing, one sequence still takes {total:,.0f} GB on each. Use GPUs with "
        "more memory, a smaller model.width or model.vocab, or shorter data.lengths.",
        batch=c.batch,
        total=device_layout(network, small, "fsdp", c.batch, half=half).memory(1).total / 1e9,
    )


def _changes(recipe: Recipe, gpus: int) -> Iterator[tuple[str, bool, int, int]]:
    """Yields ways to save memory, cheapest first: parallel, checkpointing, micro, gpus."""
    c = recipe.train
    for micro in dict.fromkeys((c.micro, 0)):
        for again in dict.fromkeys((c.gradient_checkpointing, True)):
            for way in dict.fromkeys((c.parallel, "fsdp")):
                yield way, again, micro, gpus
    for doublings in range(1, math.floor(math.log2(c.batch / gpus)) + 1):
        yield "fsdp", True, 0, gpus * 2**doublings
    yield "fsdp", True, 0, c.batch


def _words(recipe: Recipe, tried: Recipe, before: int, gpus: int) -> Iterator[str]:
    c = recipe.train
    t = tried.train
    if gpus != before:
        yield f"--gpus {gpus}"
    if t.parallel != c.parallel and gpus > 1:
        yield f"--set train.parallel={t.parallel}"
    if t.gradient_checkpointing != c.gradient_checkpointing:
        yield "--gradient-checkpointing"
    if t.micro != c.micro:
        yield "--set train.micro=0"


def _notes(recipe: Recipe, fleet: Fleet) -> Iterator[str]:
    if recipe.name in SIZED:
        yield msg(
            "{name} is sized for its text, minutes and machine, and here only as large as its "
            "settings say: malmoi pretrain {name} TEXT --dry-run shows what it would be.",
            name=recipe.name,
        )
    batch = recipe.train.batch
    gpus = fleet.gpus
    if batch % gpus:
        yield msg(
            "train.batch={batch} is not a multiple of {gpus} GPUs: a step would take "
            "{batch2} sequences and the run fewer tokens; set train.batch={batch3}.",
            batch=batch,
            gpus=gpus,
            batch2=batch // gpus * gpus,
            batch3=round(batch / gpus) * gpus,
        )
    if gpus > 1:
        yield (
            "Communication between GPUs is not modelled: for many GPUs, give a measured "
            "--utilisation."
        )
    if not fleet.half(recipe):
        yield msg("The run computes in fp32.") + (
            "" if fleet.gpu.bf16 else msg(" A {gpu} has no units for bf16.", gpu=fleet.gpu.name)
        )
