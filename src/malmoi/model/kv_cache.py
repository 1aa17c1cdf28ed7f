"""What layers keep of earlier tokens: keys and values, recurrent states, learnt prefixes.

B batch, T tokens, G key/value heads, E head width, N numbers of a recurrent state.
"""

from abc import ABC, abstractmethod
from typing import Union

import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.model.patterns import Layout

# what stores a layer's new keys and values and returns every one to attend to, and its index there
LayerCache = tuple[Union["KVCache", "PrefixKV", "KVRecorder"], int] | None


class FusedDecodeCache(ABC):
    """A KV store with a fused kernel: appends and attends in one call, without a mask."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class KVCache:
    """Preallocated keys and values of every layer; owned by the caller, so modules stay stateless.

    Each slot records the position of its token and whether it holds one, so left or right padding
    needs no special handling.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (config.depth, batch, config.key_heads, capacity, config.cache_width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        states = (config.depth, batch, config.state_size)
        self.states = torch.zeros(states, dtype=dtype, device=device)
        self.positions = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self.keep = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.used = 0  # slots filled so far, the same for every row
        self.padded = False  # whether any filled slot is padding

    @property
    def capacity(self) -> int:
        return self.keys.size(3)

    def grow(self, positions: Tensor, keep: Tensor | None) -> None:
        """Reserves slots for new tokens at these positions [B, T]; `keep` marks non-padding."""
        start = self.used
        self.used += positions.size(1)
        require_that(self.used <= self.capacity, "A cache of {n} tokens is full.", n=self.capacity)
        self.positions[:, start : self.used] = positions
        self.keep[:, start : self.used] = True if keep is None else keep
        self.padded = self.padded or keep is not None

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's newest keys and values and returns all of them so far."""
        start = self.used - k.size(2)
        self.keys[layer, :, :, start : self.used] = k
        self.values[layer, :, :, start : self.used] = v
        return self.keys[layer, :, :, : self.used], self.values[layer, :, :, : self.used]

    def layout(self, layer: int, whole: Layout) -> Layout:
        """The layout of the keys that `write` returns for a layer."""
        return whole

    def read_state(self, layer: int) -> Tensor:
        """The state of a recurrent layer, one vector [B, N]."""
        return self.states[layer]

    def write_state(self, layer: int, state: Tensor) -> None:
        self.states[layer] = state

    def reorder(self, rows: Tensor) -> None:
        """Keeps only these rows, in this order: the surviving beams, or the unfinished requests."""
        self.keys = self.keys[:, rows]
        self.values = self.values[:, rows]
        self.states = self.states[:, rows]
        self.positions = self.positions[rows]
        self.keep = self.keep[rows]

    def truncate(self, used: int) -> None:
        """Drops everything after the first `used` slots, e.g. all but a shared prompt."""
        self.used = used


class PrefixKV:
    """A layer's prefix keys and values, placed before all others, including cached ones."""

    def __init__(self, prefix: Tensor, cache: LayerCache) -> None:
        self.prefix = prefix  # [2, G, n, E]
        self.cache = cache

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is not None:
            store, layer = self.cache
            k, v = store.write(layer, k, v)
        first = self.prefix.to(k.dtype)[:, None].expand(-1, len(k), -1, -1, -1)
        return torch.cat((first[0], k), 2), torch.cat((first[1], v), 2)


class KVRecorder:
    """Records the keys and values of every layer of one row, with their gradients."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []  # [2, G, n, E] each

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.layers.append(torch.stack((k[0], v[0])))
        return k, v
