"""Transformer-XL (Dai et al. 2019): relative positions, and a memory of earlier segments.

B batch, H heads, T tokens of a segment, M remembered, K = M + T keys, E head width, D width.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.model.attention import Attention, LayerInputs
from malmoi.model.attention_mask import Mask, visible
from malmoi.model.kv_cache import KVCache
from malmoi.model.positions import sinusoid_table


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
        self.distance = nn.Linear(c.width, c.heads * self.size, bias=False)  # W
        self.content_bias = nn.Parameter(torch.zeros(c.heads, 1, self.size))  # u
        self.distance_bias = nn.Parameter(torch.zeros(c.heads, 1, self.size))  # v

    def forward(self, x: Tensor, inputs: LayerInputs, extra_values: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        cache = inputs.cache
        if cache is not None and isinstance(cache[0], SegmentMemory):
            x = cache[0].exchange(cache[1], x)
            cache = None
        parts = self.qkv(x).view(B, x.size(1), -1, self.size).transpose(1, 2)
        q, k, v = parts.chunk(3, dim=1)
        q = q[:, :, -T:]
        if cache is not None:
            k, v = cache[0].write(cache[1], k, v)
        bias = self._distance_scores(q, k.size(2), inputs.mask)
        if inputs.attention_out is not None:
            scores = (q + self.content_bias) @ k.transpose(-1, -2) * self.size**-0.5
            inputs.attention_out.append((scores + bias).softmax(-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            (q + self.content_bias).to(v.dtype), k, v, bias.to(v.dtype), dropout
        )
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(B, T, -1)))

    def _distance_scores(self, q: Tensor, keys: int, mask: Mask) -> Tensor:
        """(q + v)·W R(i − j) / √E [B, H, T, K]; pairs that do not see one another get −∞."""
        assert mask.distances is not None
        # no visible key is farther than there are keys; made on the device, as CUDA graphs need it
        table = sinusoid_table(keys, self.width, device=q.device).to(q.dtype)
        r = self.distance(table).view(keys, self.heads, self.size).permute(1, 2, 0)
        by_distance = (q + self.distance_bias) @ r.to(q.dtype)
        at = mask.distances.clamp(0, keys - 1).expand(*q.shape[:3], keys)
        scores: Tensor = by_distance.gather(-1, at) * self.size**-0.5
        seen = visible(mask, scores)
        return scores if seen is None else scores.masked_fill(~seen, float("-inf"))
