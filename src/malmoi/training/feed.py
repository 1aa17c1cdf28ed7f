"""What each step trains on: a pure function of the step and the samples used so far, prepared by
a thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from malmoi.model import Bounds
from malmoi.training.data.background import Background
from malmoi.training.data.loader import PACKED_MULTIPLE, ArrayBatch, RankShare
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import TrainConfig

Tensors = dict[str, Any]  # one pass's inputs and labels


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the network at once, and how many of its tokens are not padding."""

    tensors: Tensors
    tokens: int


class Samples(Protocol):
    """Batches by the number of their first sample."""

    def at(self, first: int) -> ArrayBatch: ...


@dataclass(frozen=True)
class PhaseFeed:
    """The samples of one phase. `make` builds the batches of a share; `length` is the tokens of
    a full sample.
    """

    make: Callable[[RankShare], Samples]
    length: int
    epoch: int  # samples in an epoch

    def micro(self, first: int, size: int, device: torch.device) -> MicroBatch:
        batch = self.make(RankShare(size)).at(first)
        return MicroBatch(_tensors(batch, self.length, device), _real_tokens(batch))

    def stream(
        self, position: int, sizes: Iterator[int], micro: int, group: ProcessGroup
    ) -> Background[list[MicroBatch]]:
        """The steps from sample `position` on, each as this process's micro-batches, a few steps
        ahead.
        """

        def steps() -> Iterator[list[MicroBatch]]:
            first = position
            for size in sizes:
                part = size // group.world
                starts = range(first + group.rank * part, first + (group.rank + 1) * part, micro)
                stop = first + (group.rank + 1) * part
                yield [self.micro(i, min(micro, stop - i), group.device) for i in starts]
                first += size

        return Background(steps(), ahead=4)


def _real_tokens(batch: ArrayBatch) -> int:
    if "keep" in batch:
        return int(batch["keep"].sum())
    if "bounds" in batch:
        return int(batch["bounds"][len(batch["firsts"])])
    rows, width = batch["tokens"].shape
    return int(rows * (width - 1))


def _tensors(batch: ArrayBatch, length: int, device: torch.device) -> Tensors:
    """Arrays as tensors on the device; a language model's labels are its tokens moved by one."""
    tensors: Tensors = {
        name: _send(torch.from_numpy(array), device) for name, array in batch.items()
    }
    if "mlm_labels" not in tensors:
        whole: Tensor = tensors["tokens"]
        tensors |= {"tokens": whole[:, :-1].contiguous(), "lm_labels": whole[:, 1:].contiguous()}
        if "documents" in tensors:
            tensors["documents"] = tensors["documents"][:, :-1].contiguous()
    if "bounds" in tensors:
        tensors["bounds"] = Bounds(tensors["bounds"], max(length, PACKED_MULTIPLE))
    return tensors


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def batch_sizes(c: TrainConfig, step: int, steps: int, world: int) -> Iterator[int]:
    """Sequences of each step from `step` on: GPT-3 grows its batch linearly over the first part
    of training.
    """
    start = c.batch_start or c.batch
    ramp = c.batch_ramp * steps
    while True:
        share = 1.0 if step >= ramp else step / ramp
        size = start + share * (c.batch - start)
        yield max(world, int(size) // world * world)
        step += 1
