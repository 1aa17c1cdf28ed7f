"""Weight averaging over the last part of a run (Izmailov et al. 2018)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from malmoi.training.state import local_part


class WeightAverage:
    """A running mean of a network's weights; the caller keeps the count of averaged steps."""

    def __init__(self, network: nn.Module) -> None:
        named = dict(network.named_parameters())
        self.tensors = {f"average.{n}": torch.zeros_like(p.data) for n, p in named.items()}
        self._weights = [local_part(p.data) for p in named.values()]
        self._means = [local_part(mean) for mean in self.tensors.values()]

    def add(self, count: int) -> None:
        """Adds the current weights to the mean as the `count`-th sample."""
        torch._foreach_lerp_(self._means, self._weights, 1 / count)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the averaged weights into the network within the context."""
        own = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._means)
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, own)

    def keep(self) -> None:
        """Copies the averaged weights into the network for good."""
        torch._foreach_copy_(self._weights, self._means)
