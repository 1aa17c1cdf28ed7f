"""Saves beside the training: a thread writes what was copied, one save at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Self, TypeVar

from torch import Tensor, nn

from malmoi.system.machine import this_machine
from malmoi.training.parallel import ProcessGroup
from malmoi.training.state import StateParts

COPY_SHARE = 0.25  # of the memory that a copy may take; without one the training waits
N = TypeVar("N", bound=nn.Module)


class Saver:
    """Writes one save at a time; its error is raised by the next call."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group.apart()
        self._copied = True
        self._buffers: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(1, "save")
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *more: object) -> None:
        if error is None:
            self.wait()
        elif self._running is not None and self.group.world == 1:  # others may never answer
            self._running.exception()  # waits, too

    def copy(self, parts: StateParts) -> StateParts:
        """The parts as they are now, or themselves if a copy is too large: `start` waits then."""
        self.wait()
        self._copied = parts.size <= COPY_SHARE * this_machine().memory
        return parts.copied(self._buffers) if self._copied else parts

    def start(self, write: Callable[[], None]) -> None:
        """Writes in the thread what was copied."""
        self._running = self._pool.submit(write)
        if not self._copied:
            self.wait()

    def check(self) -> None:
        """Raises the error of a save that has failed."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()


def with_weights(network: N, parts: StateParts, kind: str) -> N:
    """The network with the weights of a state, or their average, of which no copy is made."""
    weights = {
        id(p): nn.Parameter(parts.local[f"{kind}.{name}"], requires_grad=False)
        for name, p in network.named_parameters()
    }
    return deepcopy(network, weights)
