"""A static KV cache whose rows differ in length, so that requests need no padding.

A token's place in its row is its position, and decoding patterns are causal, so anything an earlier
request left beyond a row's newest token is masked and need not be cleared.

S rows, C places, B rows of a pass, T tokens, K keys, G key/value heads, E width of a head.
"""

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from operator import add

import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.model import FusedDecodeCache, KVCache, Layout, Network
from malmoi.system.machine import this_machine
from malmoi.tokenizer.padding import pad

UNREACHABLE_POSITION = 2**40  # a position that no query reaches


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose CPU memory is committed page by page as it is written.

    torch.zeros touches all of it: 6 GB for 16 rows of 8,192 tokens of a model of 135M parameters.
    NumPy's come in huge pages of 2 MB, of which a few tokens of every head touch as much.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVSlots:
    """Preallocated keys and values of S rows; a spare place at the end of each takes padding.

    With `pass_tokens`, the most tokens of a pass, a layer with a causal window keeps only what the
    next pass can see: its places are a ring, the token at position p has place p mod its size.
    """

    def __init__(self, network: Network, rows: int, capacity: int, *, pass_tokens: int = 0) -> None:
        check_causal(network)
        c: ModelConfig = network.config
        self.rings = _rings(network, capacity, pass_tokens)  # places by layer
        sizes = [self.rings.get(layer, capacity) + 1 for layer in range(c.depth)]
        # Keys and values of all layers with as many places: [2, layers, S, G, places, E]. A row
        # is copied by one kernel; one for each layer takes the host longer than a decoding step.
        self.held = {
            size: lazy_zeros(
                (2, layers, rows, c.key_heads, size, c.cache_width), network.dtype, network.device
            )
            for size, layers in Counter(sizes).items()
        }
        parts = {size: zip(*held, strict=True) for size, held in self.held.items()}
        self.keys, self.values = zip(*(next(parts[size]) for size in sizes), strict=True)
        states = (c.depth, rows, c.state_size)  # of recurrent layers, instead of keys and values
        self.states = torch.zeros(states, dtype=network.dtype, device=network.device)
        self.places = torch.arange(capacity + 1, device=network.device)
        self.numbers = torch.arange(rows, device=network.device)
        self.capacity = capacity

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def max_bytes(self) -> int:
        """The memory of all places; on a CPU they take it as they are written."""
        return sum(held.nbytes for held in (*self.held.values(), self.states))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first places of one row to another."""
        self.states[:, target] = self.states[:, source]
        for held in self.held.values():
            held[:, :, target, :, :length] = held[:, :, source, :, :length]


def _rings(network: Network, capacity: int, pass_tokens: int) -> dict[int, int]:
    if not pass_tokens or network.trunk.has_soft_tokens:
        return {}
    patterns = network.trunk.patterns
    windows = {i: patterns[i % len(patterns)].window for i in range(network.config.depth)}
    sizes = {i: window - 1 + pass_tokens for i, window in windows.items() if window}
    return {i: size for i, size in sizes.items() if size < capacity}


class SlotView(KVCache):
    """A view of some rows of the slots during one pass, up to `width` places."""

    def __init__(self, slots: KVSlots, rows: int | Tensor, width: int) -> None:
        # an int selects that many rows from the first, which needs no copy
        self.slots = slots
        self.rows = rows
        self.used = width
        self.padded = False
        self.index = slots.numbers[:rows] if isinstance(rows, int) else rows
        self.positions = slots.places.expand(len(self.index), -1)

    def grow(self, positions: Tensor, keep: Tensor | None) -> None:
        """Sets where this pass writes: tokens at their positions, padding at the spare place."""
        spare = self.slots.capacity
        at = positions.clamp(max=spare)
        self.at = at if keep is None else at.masked_fill(~keep, spare)
        self.newest = (positions if keep is None else positions.masked_fill(~keep, 0)).amax(1)
        self.begins = positions[:, :1] == 0
        self.active = None if keep is None else keep.any(1, keepdim=True)

    def read_state(self, layer: int) -> Tensor:
        """The rows' states; a row at its first token starts from zeros."""
        return self.slots.states[layer, self.index].masked_fill(self.begins, 0.0)

    def write_state(self, layer: int, state: Tensor) -> None:
        held = self.slots.states[layer]
        if self.active is not None:
            state = torch.where(self.active, state, held[self.index])
        held[self.index] = state

    def layout(self, layer: int, whole: Layout) -> Layout:
        """Of a ring: each place holds the newest position with its remainder."""
        size = self.slots.rings.get(layer)
        if size is None:
            return whole
        newest = self.newest[:, None]
        held = newest - (newest - self.slots.places[:size]) % size
        held = held.masked_fill(held < 0, UNREACHABLE_POSITION)
        return replace(whole, keys=size, key_positions=held)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        size = self.slots.rings.get(layer)
        at = (
            self.at
            if size is None
            else torch.where(self.at == self.slots.capacity, size, self.at % size)
        )
        keys, values = (
            self._store(held[layer], new, at, slice(size or self.used))
            for held, new in ((self.slots.keys, k), (self.slots.values, v))
        )
        return keys, values

    def _store(self, held: Tensor, new: Tensor, at: Tensor, used: slice) -> Tensor:
        # [B, G, T, E] → [B, T, G, E]; autocast may produce half precision
        held[self.index[:, None], :, at] = new.transpose(1, 2).to(held.dtype)
        return held[slice(self.rows) if isinstance(self.rows, int) else self.rows, :, used]


class FusedSlotView(SlotView, FusedDecodeCache):
    """One new token for each of the first rows, stored and attended to by one GPU kernel."""

    def __init__(self, slots: KVSlots, rows: int) -> None:
        super().__init__(slots, rows, slots.capacity)

    def grow(self, positions: Tensor, keep: Tensor | None) -> None:
        super().grow(positions, keep)
        self.lengths = positions[:, 0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from malmoi.kernels.triton_attention import decode_step

        return decode_step(
            q, k, v, self.slots.keys[layer], self.slots.values[layer], self.lengths, self.at[:, 0]
        )


def has_decode_kernel(network: Network, device: torch.device) -> bool:
    """Whether the fused kernel applies: plain causal layers, no prefix, and Triton installed."""
    trunk = network.trunk
    plain = (
        all(pattern.text == "causal" for pattern in trunk.patterns)
        and not trunk.has_soft_tokens
        and not trunk.needs_distances
    )
    return plain and device.type == "cuda" and this_machine().has_triton


class BranchCache(KVCache):
    """Read-only rows with many branches each; the branches' keys and values are discarded."""

    def __init__(self, slots: KVSlots, rows: Tensor, lengths: Tensor) -> None:
        self.slots = slots
        self.rows = rows
        self.prefix = int(lengths.max())
        places = slots.places[: self.prefix]
        self.positions = torch.where(places < lengths[:, None], places, UNREACHABLE_POSITION)
        self.used = self.prefix
        self.padded = False

    def grow(self, positions: Tensor, keep: Tensor | None) -> None:
        seen = positions if keep is None else positions.masked_fill(~keep, UNREACHABLE_POSITION)
        self.positions = torch.cat((self.positions, seen), dim=1)
        self.used = self.positions.size(1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stems = (
            held[layer][self.rows, :, : self.prefix]
            for held in (self.slots.keys, self.slots.values)
        )
        keys, values = (
            torch.cat((prefix, new), dim=2) for prefix, new in zip(stems, (k, v), strict=True)
        )
        return keys, values


def prefill_rows(
    network: Network, slots: KVSlots, rows: list[int], parts: list[list[int]], starts: list[int]
) -> Tensor:
    """Reads the next tokens of some rows at once: hidden states [B, T, D], right-padded."""
    lengths = [len(part) for part in parts]
    where = torch.tensor((rows, starts, lengths), device=slots.device)
    width = max(map(add, starts, lengths))
    return read_rows(network, slots, where, pad(parts, device=slots.device), width)


def read_rows(
    network: Network, slots: KVSlots, where: Tensor, tokens: Tensor, width: int
) -> Tensor:
    """Reads tokens [B, T] that see `width` places; `where` [3, B]: row, first place, length."""
    rows, starts, lengths = where
    steps = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    hidden: Tensor = network.trunk(
        tokens,
        keep=steps < lengths[:, None],
        positions=starts[:, None] + steps.minimum((lengths[:, None] - 1).clamp(min=0)),
        cache=SlotView(slots, rows, width),
    )
    return hidden


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two token sequences."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def check_causal(network: Network) -> None:
    require_that(
        network.trunk.is_causal,
        "This model cannot be decoded token by token: its attention sees later tokens.",
    )
