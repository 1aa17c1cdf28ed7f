"""Layers that carry a state on: LSTMs, and Transformer-XL's memory of segments.

Transformer-XL is Dai et al. 2019. B batch, T tokens (of a segment), D width, U units (memory cells)
of a layer, H heads, E width of a head, M remembered tokens, K = M + T keys.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from malmoi.config import ModelConfig
from malmoi.model.attention import Attention, LayerInputs
from malmoi.model.attention_mask import Mask
from malmoi.model.elementwise import Dropout
from malmoi.model.kv_cache import KVCache, LayerCache
from malmoi.model.positions import sinusoid_table


@dataclass(frozen=True)
class ReadingOrder:
    """The order in which a direction reads each row: its tokens, then the padding."""

    order: Tensor  # [B, T]: the slot read at each step
    lengths: Tensor  # [B]

    @classmethod
    def of(cls, keep: Tensor, *, backward: bool) -> "ReadingOrder":
        T = keep.size(1)
        steps = torch.arange(T, device=keep.device).expand_as(keep)
        when = (T - 1 - steps if backward else steps) + T * ~keep
        return cls(when.argsort(1), keep.sum(1))

    def gather(self, x: Tensor) -> Tensor:
        return x.gather(1, self.order[..., None].expand_as(x))

    def scatter(self, y: Tensor) -> Tensor:
        """Undoes `gather`; padding gets zeros."""
        steps = torch.arange(y.size(1), device=y.device)
        y = y.masked_fill((steps >= self.lengths[:, None])[..., None], 0.0)
        return torch.zeros_like(y).scatter(1, self.order[..., None].expand_as(y), y)


class LSTM(nn.Module):
    """An LSTM layer in one direction; projected if it has more units (Sak et al. 2014)."""

    def __init__(self, width: int, units: int, *, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward
        projected = width if units != width else 0
        if projected:
            # torch warns once; there is no other implementation on a CPU
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        self.cells = nn.LSTM(width, units, batch_first=True, proj_size=projected)

    def forward(
        self, x: Tensor, keep: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, D], and the state after each row's last token [B, D + U]."""
        if keep is None:
            read, final = self._run(x.flip(1) if self.backward else x, state)
            return (read.flip(1) if self.backward else read), final
        turn = ReadingOrder.of(keep, backward=self.backward)
        # torch has no packed rows of length 0; such a row reads one padding and keeps its state
        packed = pack_padded_sequence(
            turn.gather(x), turn.lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        read, final = self._run(packed, state)
        whole, _ = pad_packed_sequence(read, batch_first=True, total_length=x.size(1))
        if state is not None:
            final = torch.where(turn.lengths[:, None] > 0, final, state)
        return turn.scatter(whole), final

    def _run(self, x: Tensor | PackedSequence, state: Tensor | None) -> tuple[Any, Tensor]:
        sizes = (self.cells.proj_size or self.cells.hidden_size, self.cells.hidden_size)
        parts = () if state is None else state.split(sizes, 1)
        read, final = self.cells(x, tuple(part[None].contiguous() for part in parts) or None)
        return read, torch.cat(final, -1)[0]

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """U(−1/√U, 1/√U), and 1 for the forget gate (Jozefowicz et al. 2015 §5)."""
        units = self.cells.hidden_size
        for weight in self.cells.parameters():
            weight.uniform_(-(units**-0.5), units**-0.5, generator=generator)
        forget = slice(units, 2 * units)
        for name, value in (("bias_ih_l0", 1.0), ("bias_hh_l0", 0.0)):
            cast(Tensor, getattr(self.cells, name))[forget] = value


class LSTMBlock(nn.Module):
    """An LSTM layer with dropout (Zaremba et al. 2014) and a residual (Peters et al. 2018 §3.4)."""

    def __init__(self, c: ModelConfig, *, first: bool = False) -> None:
        super().__init__()
        sizes = (c.direction_width, c.units)
        ways = (False, True) if c.mixer == "bilstm" else (False,)
        self.directions = nn.ModuleList(LSTM(*sizes, backward=way) for way in ways)
        self.drop = Dropout(c.dropout)
        self.first = first

    def forward(self, x: Tensor, inputs: LayerInputs, embedded: Tensor | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]; a cache holds the state instead of keys and values."""
        # in the type of the weights: torch's LSTM on a CPU takes no mixed types
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(next(self.parameters()).dtype)
            y = self._read(x, inputs.mask.tokens, inputs.cache)
        dropped: Tensor = self.drop(y)
        return dropped if self.first else x + dropped

    def _read(self, x: Tensor, keep: Tensor | None, cache: LayerCache) -> Tensor:
        if len(self.directions) == 1 and cache is not None:
            store, layer = cast(KVCache, cache[0]), cache[1]
            read, state = self.directions[0](x, keep, store.read_state(layer))
            store.write_state(layer, state)
            return cast(Tensor, read)
        parts = zip(self.directions, x.chunk(len(self.directions), -1), strict=True)
        return torch.cat([lstm(part, keep)[0] for lstm, part in parts], -1)


# ------------------------------------------------------------------ Transformer-XL


class SegmentMemory(KVCache):
    """The last M inputs of every layer's attention, without gradient (§3.2).

    A forward pass reads what the passes before it left. What it leaves itself takes effect with the
    next one, so that gradient checkpointing may run a block twice.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.past: dict[int, Tensor] = {}  # by layer: [B, M, D]
        self.coming: dict[int, Tensor] = {}
        self.padded = False

    @property
    def used(self) -> int:  # type: ignore[override]
        states = self.coming or self.past
        return states[0].size(1) if states else 0

    def grow(self, positions: Tensor, keep: Tensor | None) -> None:
        self.past = self.coming or self.past
        self.coming = {}

    def exchange(self, layer: int, x: Tensor) -> Tensor:
        """The remembered inputs and the new ones [B, M + T, D]; the last M are kept."""
        past = self.past.get(layer)
        whole = x if past is None else torch.cat((past.to(x.dtype), x), 1)
        self.coming[layer] = whole.detach()[:, max(0, whole.size(1) - self.size) :]
        return whole

    def clear(self) -> None:
        self.past = {}
        self.coming = {}


class RelativeAttention(Attention):
    """Attention whose scores depend on distances instead of positions.

    §3.3: (q + u)·k + (q + v)·W R(i − j), with a sinusoid R and learned u and v in every layer.
    """

    needs_distances = True

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.width = c.width
        self.kernel = "sdpa"
        self.distance = nn.Linear(c.width, c.heads * self.size, bias=False)  # W
        self.content_bias = nn.Parameter(torch.zeros(c.heads, 1, self.size))  # u
        self.distance_bias = nn.Parameter(torch.zeros(c.heads, 1, self.size))  # v

    def forward(self, x: Tensor, inputs: LayerInputs, extra_values: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        cache = inputs.cache
        if cache is not None and isinstance(cache[0], SegmentMemory):
            x = cache[0].exchange(cache[1], x)
            inputs = replace(inputs, cache=None)
        q, k, v = self.qkv(x).view(B, x.size(1), -1, self.size).transpose(1, 2).chunk(3, dim=1)
        y = self.mix((q[:, :, -T:], k, v), inputs)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(B, T, -1)))

    def biased(self, q: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        """q + u, and as a bias (q + v)·W R(i − j) / √E [B, H, T, K]."""
        assert mask.distances is not None
        keys = mask.distances.size(-1)
        # no visible key is farther than there are keys; made on the device, as CUDA graphs need it
        table = sinusoid_table(keys, self.width, device=q.device).to(q.dtype)
        r = self.distance(table).view(keys, self.heads, self.size).permute(1, 2, 0)
        by_distance = (q + self.distance_bias) @ r.to(q.dtype)
        at = mask.distances.clamp(0, keys - 1).expand(*q.shape[:3], keys)
        bias = by_distance.gather(-1, at) * self.size**-0.5
        return (q + self.content_bias).to(q.dtype), replace(mask, bias=bias)
