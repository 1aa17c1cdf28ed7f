"""Multi-head self-attention: projections, positions, the KV cache and a kernel.

B batch, T tokens (queries), K keys, D width, H heads, G key/value heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.model.attention_kernels import Kernel, attend, attention_probs
from malmoi.model.attention_mask import Mask
from malmoi.model.kv_cache import FusedDecodeCache, LayerCache
from malmoi.model.positions import rotate


@dataclass(frozen=True)
class LayerInputs:
    """What a layer reads besides its input.

    Tensors that need a gradient are not here: FSDP finds them only among a block's arguments.
    """

    mask: Mask
    rotary: Tensor | None = None
    cache: LayerCache = None
    attention_out: list[Tensor] | None = None  # takes the probabilities [B, H, T, K], if requested


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017 §3.2); heads may share keys and values."""

    needs_distances = False  # whether it reads how far apart tokens are, from its mask

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.key_heads = c.key_heads
        self.size = c.size_per_head
        self.dropout = c.attention_dropout
        self.eps = c.eps
        self.kernel: Kernel | None = None  # None: pick the fastest
        norms: dict[str, Callable[..., Tensor]] = {"layer": F.layer_norm, "rms": F.rms_norm}
        self.qk_norm = norms[c.norm_kind] if c.qk_norm else None
        self.qkv = nn.Linear(c.width, (c.heads + 2 * c.key_heads) * self.size, bias=c.bias)
        self.out = nn.Linear(c.heads * self.size, c.width, bias=c.bias)

    def forward(self, x: Tensor, inputs: LayerInputs, extra_values: Tensor | None = None) -> Tensor:
        """Self-attention of x [B, T, D]; `extra_values` [B, T, G·E] are added to the values."""
        B, T, _ = x.shape
        parts = self.qkv(x).view(B, T, -1, self.size).transpose(1, 2)  # [B, H + 2G, T, E]
        qk, v = parts.split((self.heads + self.key_heads, self.key_heads), dim=1)
        if extra_values is not None:
            v = v + extra_values.view(B, T, -1, self.size).transpose(1, 2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk, (self.size,), eps=self.eps)
        if inputs.rotary is not None:
            qk = rotate(qk, inputs.rotary)
        q, k = qk.split((self.heads, self.key_heads), dim=1)
        y = self.mix((q, k, v), inputs)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(B, T, -1)))

    def mix(self, qkv: tuple[Tensor, Tensor, Tensor], inputs: LayerInputs) -> Tensor:
        """What each query reads [B, H, T, E], from the cached keys and values too."""
        q, k, v = qkv
        cache = inputs.cache
        if cache is not None and isinstance(cache[0], FusedDecodeCache):
            return cache[0].attend(cache[1], q, k, v)
        if cache is not None:
            k, v = cache[0].write(cache[1], k, v)
        if inputs.attention_out is not None:
            inputs.attention_out.append(attention_probs(q, k, inputs.mask))
        return attend(q, k, v, inputs.mask, self.dropout if self.training else 0.0, self.kernel)
