"""The data of each step: a pure function of the step and the samples used, prefetched."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from malmoi.model import Bounds
from malmoi.training.data.background import prefetched
from malmoi.training.data.loader import IGNORE_LABEL, PACKED_MULTIPLE, ArrayBatch
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe, TrainConfig

Tensors = dict[str, Any]  # inputs and labels of one pass


class MicroBatch(NamedTuple):
    """The tensors of one pass, and how many of their tokens are not padding."""

    tensors: Tensors
    tokens: int


class Stretch(NamedTuple):
    """Where a batch of a contiguous text lies: its first row, and the number of its segment."""

    row: int
    segment: int


class Samples(Protocol):
    """Batches by the number of their first sample."""

    def at(self, first: int, size: int) -> ArrayBatch: ...


@dataclass(frozen=True)
class PhaseFeed:
    """The samples of one phase; `length` is the tokens of a full sample."""

    samples: Samples
    length: int
    epoch: int  # samples in an epoch
    # for steps that mix kinds of batches: the share of each
    kinds: tuple[tuple[float, Samples], ...] = ()
    rows: int = 0  # of contiguous batches, which have no other size

    def micro(self, first: int, size: int, device: torch.device) -> MicroBatch:
        return self._micro(self.samples, first, size, device)

    def of_each_kind(self, first: int, size: int, device: torch.device) -> list[MicroBatch]:
        """Returns the same samples as a batch of each kind."""
        kinds = [samples for _, samples in self.kinds] or [self.samples]
        return [self._micro(samples, first, size, device) for samples in kinds]

    def _micro(self, samples: Samples, first: int, size: int, device: torch.device) -> MicroBatch:
        batch = samples.at(first, size)
        return MicroBatch(_tensors(batch, self.length, device), _real_tokens(batch))

    def _step(self, first: int, size: int, micro: int, device: torch.device) -> list[MicroBatch]:
        """Splits `size` sequences from sample `first` on into passes of one kind, up to `micro`."""
        kinds = self.kinds or ((1.0, self.samples),)
        counts = kind_counts([share for share, _ in kinds], size)
        passes = []
        for count, (_, samples) in zip(counts, kinds, strict=True):
            end = first + count
            starts = range(first, end, micro)
            passes += [self._micro(samples, at, min(micro, end - at), device) for at in starts]
            first = end
        return passes

    def stream(
        self, position: int, sizes: Iterator[int], micro: int, group: ProcessGroup
    ) -> AbstractContextManager[Iterator[tuple[int, list[MicroBatch]]]]:
        """Yields each step from sample `position` on: its sequences, and the passes made here."""

        def steps() -> Iterator[tuple[int, list[MicroBatch]]]:
            first = position
            for size in sizes:
                part = size // group.world
                yield size, self._step(first + group.rank * part, part, micro, group.device)
                first += size

        return prefetched(steps(), ahead=4)


def kind_counts(shares: Sequence[float], size: int) -> list[int]:
    """Sequences of each kind in a step of `size`: by its share, and one at least if there is room.

    The last kind has the rest.
    """
    counts: list[int] = []
    for left, share in zip(reversed(range(len(shares))), shares, strict=True):
        room = size - sum(counts)
        counts.append(max(0, min(max(1, round(share * size)), room - left)) if left else room)
    return counts


def _real_tokens(batch: ArrayBatch) -> int:
    if "lm_labels" in batch:
        return int((batch["lm_labels"] != IGNORE_LABEL).sum())
    if "keep" in batch:
        return int(batch["keep"].sum())
    if "bounds" in batch:
        return int(batch["bounds"][len(batch["firsts"])])
    rows, width = batch["tokens"].shape
    return int(rows * (width - ("mlm_labels" not in batch)))


def _tensors(batch: ArrayBatch, length: int, device: torch.device) -> Tensors:
    """Moves arrays to the device; a language model's labels are its tokens shifted by one."""
    cuda = device.type == "cuda"
    sources = {name: torch.from_numpy(array) for name, array in batch.items()}
    tensors: Tensors = {
        name: (source.pin_memory() if cuda else source).to(device, non_blocking=cuda)
        for name, source in sources.items()
    }
    if "mlm_labels" not in tensors and "lm_labels" not in tensors:
        whole: Tensor = tensors["tokens"]
        tensors |= {"tokens": whole[:, :-1].contiguous(), "lm_labels": whole[:, 1:].contiguous()}
        if "documents" in tensors:
            tensors["documents"] = tensors["documents"][:, :-1].contiguous()
    if "stretch" in batch:
        tensors["stretch"] = Stretch(*batch["stretch"].tolist())
    if "bounds" in tensors:
        tensors["bounds"] = Bounds(tensors["bounds"], max(length, PACKED_MULTIPLE))
    return tensors


def samples_per_epoch(recipe: Recipe, feeds: Sequence[PhaseFeed]) -> float:
    """Samples of an epoch, by each phase's share of the budget."""
    return sum(share * feed.epoch for feed, (_, share) in zip(feeds, recipe.phases, strict=True))


def batch_sizes(c: TrainConfig, seen: int, samples: float, world: int) -> Iterator[int]:
    """Yields sequences per step of a run of `samples`, from sample `seen` on.

    GPT-3's batch grows linearly with the tokens seen (Brown et al. 2020 appendix B).
    """
    start = c.batch_start or c.batch
    ramp = c.batch_ramp * samples
    while True:
        share = 1.0 if seen >= ramp else seen / ramp
        size = max(world, int(start + share * (c.batch - start)) // world * world)
        yield size
        seen += size
