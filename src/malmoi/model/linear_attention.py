"""Linear attention (Katharopoulos et al. 2020): φ(q)·φ(k) instead of exp(q·k), so that a sum over
the keys replaces them.

B batch, H heads, T tokens, E width of a head, n chunks of C tokens.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model.attention import Attention, LayerInputs
from malmoi.model.kv_cache import LayerCache, StateStore

CHUNK_TOKENS = 64  # within a chunk products are quadratic, between chunks linear
EPSILON = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 (eq. 7): positive, like the exponential."""
    return F.elu(x) + 1


def full_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eq. 5: φ(qᵢ)ᵀ Σⱼ φ(kⱼ) vⱼᵀ / φ(qᵢ)ᵀ Σⱼ φ(kⱼ), over all keys; q and k are mapped already."""
    total = k.transpose(-1, -2) @ v
    norm = (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
    return (q @ total) / (norm + EPSILON)


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Eq. 9 over the keys up to each query, after those summed up in `state` [B, H, E, E + 1].

    Returns the outputs [B, H, T, E] and the new state: Σ φ(k) vᵀ, and Σ φ(k) as its last column.
    """
    T = q.size(2)
    size = min(CHUNK_TOKENS, T)
    surplus = -T % size
    # v with a column of ones: the norm is one more value to read
    v = F.pad(F.pad(v, (0, 1), value=1.0), (0, 0, 0, surplus))
    q, k = (F.pad(x, (0, 0, 0, surplus)) for x in (q, k))
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))  # [B, H, n, C, E]
    sums = k.transpose(-1, -2) @ v
    seen = sums.cumsum(2)
    before = seen - sums
    if state is not None:
        before = before + state[:, :, None]
    within = (q @ k.transpose(-1, -2)).tril()
    read = (within @ v + q @ before).flatten(2, 3)[:, :, :T]
    final = seen[:, :, -1] if state is None else seen[:, :, -1] + state
    return read[..., :-1] / (read[..., -1:] + EPSILON), final


class LinearAttention(Attention):
    """Attention of linear cost: full, or causal with a state of constant size."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.causal = c.attention == ("causal",)

    def mix(self, qkv: tuple[Tensor, Tensor, Tensor], inputs: LayerInputs) -> Tensor:
        if inputs.attention_out is not None:
            raise UsageError("Linear attention has no matrix of weights to show.")
        # sums over many keys need fp32
        with torch.autocast(qkv[0].device.type, enabled=False):
            q, k, v = (x.float() for x in qkv)
            each = self.heads // self.key_heads
            if each > 1:
                k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
            q, k = feature_map(q), feature_map(k)
            if inputs.mask.tokens is not None:
                k = k * inputs.mask.tokens[:, None, :, None]
            y = self._read(q, k, v, inputs.cache)
        return y.to(qkv[0].dtype)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
        if not self.causal:
            return full_linear_attention(q, k, v)
        if cache is None:
            return causal_linear_attention(q, k, v)[0]
        store, layer = cast(StateStore, cache[0]), cache[1]
        held = store.read_state(layer)
        shape = (len(q), self.heads, self.size, self.size + 1)
        y, state = causal_linear_attention(q, k, v, held.view(shape).float())
        store.write_state(layer, state.flatten(1).to(held.dtype))
        return y
