"""Distributed training by `torchrun`; on one device every method here is a no-op.

DDP replicates the network, FSDP2 shards its weights, gradients and optimizer state over all
processes, or over a machine's (hybrid); `train.tensor` shares each layer's products.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, require_that
from malmoi.model import Network
from malmoi.model.patterns import parse_pattern
from malmoi.model.positions import POSITIONS
from malmoi.system.machine import pick_device
from malmoi.training.signals import Stopped

PREPARATION = timedelta(days=2)  # that processes wait for one another before the first step
STEP_SECONDS = 600  # … after it, …
SAVING = timedelta(hours=1)  # … and beside it, for a slow disk
RUNS = count()  # of this process
ENDED = (
    "Process {rank} stopped because another process of this run ended; see its message, or "
    "torchrun's."
)
HUNG = (
    "Process {rank} stopped because another process of this run does not answer (MALMOI_TIMEOUT "
    "has the seconds to wait); torchrun --max-restarts 3 would go on from the last save."
)
T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run: this one's rank, how many there are, and its device."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    owned: bool = False  # whether this run initialised the process group
    channel: Any = None  # over which it waits; None: that of the collectives
    tensor: int = 1  # processes that compute each layer together

    @property
    def first(self) -> bool:
        """Whether this process writes logs and folders."""
        return self.rank == 0

    @property
    def part(self) -> int:
        """Which part of a step's sequences is read here; processes of one layer read the same."""
        return self.rank // self.tensor

    @property
    def parts(self) -> int:
        return self.world // self.tensor

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes (all-reduce)."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over all processes (all-reduce)."""
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def min(self, value: int) -> int:
        """Minimum over all processes (all-reduce)."""
        return -int(self.max(torch.tensor(-value, device=self.device)))

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(self.channel)

    def apart(self) -> Self:
        """The same processes for another thread, whose barriers do not mix with these."""
        if self.world == 1:
            return self
        return replace(self, channel=dist.new_group(backend="gloo", timeout=SAVING))

    def broadcast(self, value: T) -> T:
        """The first process's value, on all processes."""
        held = [value]
        if self.world > 1:
            dist.broadcast_object_list(held, 0, device=self.device)
        return held[0]

    def expect_steps(self) -> None:
        """From now on a process that is silent for long is taken for hung; before, one may encode
        the text for hours.
        """
        if self.owned:
            seconds = float(os.environ.get("MALMOI_TIMEOUT", STEP_SECONDS))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)

    def close(self) -> None:
        """Destroys the process group, unless the caller had initialised it."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def join_process_group(device: torch.device | str | None = None) -> ProcessGroup:
    """The group this process was started in: a single process, or one of `torchrun`'s."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = pick_device(device)
    cuda = where.type == "cuda"
    if cuda:
        where = torch.device("cuda", local if where.index is None or world > 1 else where.index)
        torch.cuda.set_device(where)
    if world == 1:
        return ProcessGroup(device=where)
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=_store_of_this_start(world),
            rank=int(os.environ["RANK"]),
            world_size=world,
            timeout=PREPARATION,
            device_id=where if cuda else None,
        )
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), where, owned)


def _store_of_this_start(world: int) -> Any:
    """torchrun's store; it still has the addresses of processes that are gone, and of the runs that
    these processes made before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    stores: Any = dist  # torch has no types for them
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = stores.TCPStore(*place, world_size=world, is_master=False)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return stores.PrefixStore(f"start {restart} run {next(RUNS)}", store)


@contextmanager
def process_group(device: torch.device | str | None = None) -> Iterator[ProcessGroup]:
    """The run's process group, destroyed at the end; a failing process exits at once."""
    group = ProcessGroup()
    try:
        group = join_process_group(device)
        yield group
    except Stopped:
        group.close()
        raise
    except RuntimeError as error:
        # Gloo reports only in the message that processes could not reach one another
        alone = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if os.environ.get("WORLD_SIZE", "1") == "1" or not alone:
            raise
        hung = "timed out waiting" in str(error).lower()
        raise MalmoiError(HUNG if hung else ENDED, rank=os.environ["RANK"]) from error
    group.close()


def wrap_model(
    loss_module: nn.Module, network: Network, group: ProcessGroup, mode: str
) -> nn.Module:
    """The module for a training step: itself, its DDP wrapper, or itself sharded (FSDP2)."""
    if group.world == 1:
        return loss_module
    if mode == "ddp":
        ids = [group.device.index] if group.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(loss_module, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    here = os.environ.get("LOCAL_WORLD_SIZE", group.world) if mode == "hybrid" else group.world
    copies, shards = group.world // int(here), int(here) // group.tensor
    sizes = {"copies": copies, "shards": shards, "tensor": group.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    names = tuple(sizes)
    mesh = init_device_mesh(group.device.type, tuple(sizes.values()), mesh_dim_names=names)
    data = mesh[tuple(name for name in names if name != "tensor")]
    for block in network.blocks:
        if group.tensor > 1:
            _share_products(block, network.config, mesh["tensor"])
        fully_shard(block, mesh=data)
    fully_shard(loss_module, mesh=data)
    register_fsdp_forward_method(loss_module, "measure")  # validation gathers the weights too
    return loss_module


def check_parallel(c: ModelConfig, group: ProcessGroup, mode: str) -> None:
    """Refuses what these processes cannot share."""
    if group.tensor == 1:
        return
    require_that(
        mode != "ddp" and group.world % group.tensor == 0,
        "train.tensor={tensor} needs train.parallel=fsdp or hybrid, and a multiple of {tensor} "
        "processes.",
        tensor=group.tensor,
    )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    require_that(
        mode != "hybrid" or here % group.tensor == 0,
        "train.tensor={tensor} does not divide the {here} processes of a machine, over which "
        "train.parallel=hybrid shards.",
        tensor=group.tensor,
        here=here,
    )
    plain = c.mixer == "attention" and POSITIONS[c.positions].attention is None
    alike = all(not parse_pattern(text, c.heads).varies_by_head for text in c.attention)
    require_that(
        plain and alike and not (c.encoder_depth or c.embedding_residual),
        "train.tensor is for layers whose heads are alike and read one text: not for LSTMs, "
        "encoder-decoders, embedding residuals, or positions and patterns of single heads.",
    )
    require_that(
        c.key_heads % group.tensor == 0 and c.mlp_width % group.tensor == 0,
        "train.tensor={n} does not divide the {heads} heads of keys, or the MLP's {width}.",
        n=group.tensor,
        heads=c.key_heads,
        width=c.mlp_width,
    )


def _share_products(block: Any, c: ModelConfig, mesh: Any) -> None:
    """Gives each process some heads and some of the MLP's units, by torch's plan (Megatron's)."""
    from torch.distributed.tensor import parallel as plans

    for name, p in block.named_parameters():
        if (order := row_order(f".{name}", c, mesh.size())) is not None:
            p.data = p.data[order]
    plan = {
        "attend.qkv": plans.ColwiseParallel(),
        "attend.out": plans.RowwiseParallel(),
        "mlp.up": plans.ColwiseParallel(),
        "mlp.down": plans.RowwiseParallel(),
    }
    plans.parallelize_module(block, mesh, plan)
    block.attend.heads //= mesh.size()
    block.attend.key_heads //= mesh.size()


def row_order(name: str, c: ModelConfig, pieces: int) -> Tensor | None:
    """The rows of a weight that is several (queries, keys, values; a gate) in each piece."""
    if ".attend.qkv." in name:
        sizes = [n * c.size_per_head for n in (c.heads, c.key_heads, c.key_heads)]
    elif c.gated and ".mlp.up." in name:
        sizes = [c.mlp_width] * 2
    else:
        return None
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.chunk(pieces)[i] for i in range(pieces) for part in parts])


def clip_shared_gradients(network: nn.Module, most: float, group: ProcessGroup) -> None:
    """Scales gradients on several meshes to a norm of `most` at most; each part counts once."""
    grads: list[Any] = [p.grad for p in network.parameters() if p.grad is not None]
    parts = [math.prod(pieces for _, pieces, _ in cuts(grad)) for grad in grads]
    squares = [
        local_part(grad).float().square().sum() * count / group.world
        for grad, count in zip(grads, parts, strict=True)
    ]
    norm = group.sum(torch.stack(squares).sum()).sqrt()
    for grad in grads:
        local_part(grad).mul_((most / (norm + 1e-6)).clamp(max=1))


def cuts(tensor: Any) -> list[tuple[int, int, int]]:
    """How a tensor was cut, first by a layer's processes: dimension, pieces, which is here."""
    if not hasattr(tensor, "device_mesh"):
        return []
    mesh = tensor.device_mesh
    places = [(i, place) for i, place in enumerate(tensor.placements) if hasattr(place, "dim")]
    return [(place.dim, mesh.size(i), mesh.get_local_rank(i)) for i, place in reversed(places)]


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, or its own if it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def gradient_sync(call: nn.Module, *, last: bool) -> Iterator[None]:
    """Delays DDP's all-reduce to a step's last pass; FSDP2 cannot keep full gradients."""
    if isinstance(call, nn.parallel.DistributedDataParallel) and not last:
        with call.no_sync():
            yield
    else:
        yield


def reshard(loss_module: nn.Module) -> None:
    """Frees the weights that FSDP2 gathered for a pass without a backward.

    Its class is not asked for: with one process it would cost as long to import as torch.
    """
    if hasattr(loss_module, "reshard"):
        cast(Any, loss_module).reshard()
