"""Attention: the projections, the KV cache, and the one place that picks a kernel.

B batch, T tokens (queries), K keys, D width, H heads, G key/value heads, S cache slots, E head
width.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, UsageError
from malmoi.model.block_parts import BlockParts, attend_parts, make_parts
from malmoi.model.patterns import Layout, Pattern
from malmoi.model.rotary import rotate
from malmoi.model.tiled import Tiling, make_tiling

logger = logging.getLogger(__name__)

# keys: up to this many, plain matmuls beat SDPA in bf16 training on a CPU (5x at 128, 1.2x at 512)
SHORT_KEYS = 512
# patterns that the packed-sequence (varlen) kernel handles without a mask
PACKED_PATTERN = re.compile(r"full|causal|(?:causal & )?local:(?P<window>\d+)")
MIN_SPARSE_KEYS = 1024  # keys: below this a dense mask is as fast as blocks or tiles
# keys: below this, blocks in the order of the text are faster on a GPU (docs/performance.md)
MIN_REORDERED_KEYS = 16_384
MOST_SHAPES = 256  # for which FlexAttention is compiled in one process


@dataclass(frozen=True)
class Bounds:
    """Sequences packed into one row: cumulative starts (int32 [N + 1]) and the longest length."""

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Mask:
    """A pattern over a layout, prepared for a kernel; with every field empty, full attention."""

    causal: bool = False
    dense: Tensor | None = None  # bool, broadcasts to [B, H, T, K]
    empty: Tensor | None = None  # bool, broadcasts to [B, H, T, 1]: queries that may see no key
    blocks: Any = None  # FlexAttention's BlockMask
    parts: BlockParts | None = None  # blocks in another order, for patterns that touch all of them
    bounds: Bounds | None = None  # packed documents, kept apart without a mask tensor
    window: int = 0  # with bounds: attend to positions less than this apart; 0: any
    tiles: Tiling | None = None  # the pairs to compute on a CPU
    distances: Tensor | None = None  # int, broadcasts to [B, 1, T, K]: for relative positions
    tokens: Tensor | None = None  # bool [B, T]: queries that are not padding, for recurrent layers

    @classmethod
    def of(cls, seen: Tensor) -> "Mask":
        """Wraps a boolean mask that broadcasts to [B, H, T, K]."""
        return cls(dense=seen, empty=~seen.any(-1, keepdim=True))


def build_mask(
    pattern: Pattern, layout: Layout, device: torch.device, bounds: Bounds | None, dropout: float
) -> Mask:
    """The cheapest exact form of a pattern: a flag, nothing, bounds, blocks or a dense mask."""
    causal = pattern.text == "causal"
    packed = PACKED_PATTERN.fullmatch(pattern.text)
    if bounds is not None and device.type == "cuda" and packed and not layout.prefix:
        causal = pattern.text.startswith("causal")
        return Mask(causal=causal, bounds=bounds, window=int(packed["window"] or 0))
    if layout.plain and (pattern.text == "full" or (causal and layout.queries == 1)):
        return Mask()
    if layout.plain and causal and layout.queries == layout.keys:
        return Mask(causal=True)
    if layout.queries == layout.keys >= MIN_SPARSE_KEYS:
        if dropout:
            _note_dropout()
        elif device.type == "cuda":
            long = layout.keys >= MIN_REORDERED_KEYS and layout.plain and not layout.prefix
            parts = _plain_parts(pattern, layout.keys, str(device)) if long else None
            if parts is not None:
                return Mask(parts=parts)
            return Mask(blocks=_blocks(pattern, layout, device))
        elif device.type == "cpu" and layout.plain and not layout.prefix:
            tiles = make_tiling(pattern, layout.keys)
            if tiles is not None:
                return Mask(tiles=tiles)
    return Mask.of(pattern.mask(layout, device))


@cache
def _note_dropout() -> None:
    logger.warning(
        "Sparse attention is computed densely here because its kernels do not support dropout: "
        "set model.attention_dropout=0 (model.dropout may stay)."
    )


Kernel = Literal["sdpa", "short", "flex", "packed", "tiled"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0, kernel: Kernel | None = None
) -> Tensor:
    """softmax(q kᵀ / √E) v under a mask: q [B, H, T, E], k and v [B, G, K, E] → [B, H, T, E].

    A query that may see no key gets zeros from every kernel; `kernel=None` picks the fastest.
    """
    return KERNELS[kernel or fastest_kernel(q, k, mask)](q, k, v, mask, dropout)


def fastest_kernel(q: Tensor, k: Tensor, mask: Mask) -> Kernel:
    if mask.bounds is not None:
        return "packed"
    if mask.tiles is not None:
        return "tiled"
    if _is_short(q, k):
        return "short"
    return "sdpa" if mask.blocks is None and mask.parts is None else "flex"


def attention_probs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Attention probabilities [B, H, T, K], which fused kernels do not return; 0 without keys."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores: Tensor = (q * q.size(-1) ** -0.5) @ k.transpose(-1, -2)
    seen = visible(mask, scores)
    if seen is None:
        return scores.softmax(-1)
    # The dtype's minimum instead of -inf keeps NaN out of the gradient, but makes a fully masked
    # row uniform over all keys, future ones included, so such rows are zeroed below. A plain causal
    # row always sees itself.
    chosen = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    if mask.causal:
        return chosen
    return chosen.masked_fill(
        ~seen.any(-1, keepdim=True) if mask.empty is None else mask.empty, 0.0
    )


def visible(mask: Mask, scores: Tensor) -> Tensor | None:
    """Any form of mask as booleans that broadcast to [B, H, T, K]; None means full attention."""
    B, H, T, K = scores.shape
    if mask.blocks is not None:
        b, h, q, k = (torch.arange(n, device=scores.device) for n in (B, H, T, K))
        return cast(
            Tensor, mask.blocks.mask_mod(b[:, None, None, None], h[:, None, None], q[:, None], k)
        )
    if (reordered := mask.tiles or mask.parts) is not None:
        return reordered.pattern.mask(Layout(1, T, K), scores.device)
    places = torch.arange(K, device=scores.device)
    behind = places[-T:, None] - places
    if mask.bounds is None:
        return behind >= 0 if mask.causal else mask.dense
    document = torch.bucketize(places, mask.bounds.starts, right=True)
    same = document[-T:, None] == document
    if mask.window:
        same &= behind.abs() < mask.window
    return same & (behind >= 0) if mask.causal else same


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether to use plain matmuls; not when compiling (torch 2.13: NaN gradients on a CPU)."""
    cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad
    return cpu and k.size(2) <= SHORT_KEYS and not torch.compiler.is_compiling()


def _short(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    chosen = F.dropout(attention_probs(q, k, mask), dropout).to(q.dtype)
    return chosen @ v.repeat_interleave(q.size(1) // v.size(1), dim=1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    grouped = q.size(1) != k.size(1)
    y = F.scaled_dot_product_attention(
        q, k, v, mask.dense, dropout, mask.causal, enable_gqa=grouped
    )
    # In bf16 on a GPU the kernel behind SDPA spreads a query without keys over all of them.
    return y if mask.empty is None else y.masked_fill(mask.empty, 0.0)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    if mask.parts is not None:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        return attend_parts(q, k, v, mask.parts, _compiled_flex())
    grouped = q.size(1) != k.size(1)
    return cast(Tensor, _compiled_flex()(q, k, v, block_mask=mask.blocks, enable_gqa=grouped))


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """FlashAttention over packed sequences; torch's public `varlen_attn` lacks dropout."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(
            "Packed sequences need bf16 on a GPU: set train.precision=bf16, or data.packed=false."
        )
    bounds = cast(Bounds, mask.bounds)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [1, H, N, E] → [N, H, E], no copy
    n = bounds.longest
    left = mask.window - 1 if mask.window else None  # FlashAttention counts its window inclusively
    right = 0 if mask.window and mask.causal else left
    y = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds.starts, bounds.starts, n, n, dropout, mask.causal, return_debug_mask=False,
        window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return cast(Tensor, y.transpose(0, 1)[None])


def _tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    each = q.size(1) // k.size(1)
    if each > 1:
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))
    tiling = cast(Tiling, mask.tiles)
    return tiling.run(q, k, v, tiling)


KERNELS: dict[Kernel, Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor]] = {
    "sdpa": _sdpa,
    "short": _short,
    "flex": _flex,
    "packed": _packed,
    "tiled": _tiled,
}


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return compile_each_shape(flex_attention)


def compile_each_shape(
    function: Callable[..., Any], shapes: int = MOST_SHAPES, **options: Any
) -> Callable[..., Any]:
    """Compiles a function anew for each shape; more than `shapes` of them raise.

    Past torch's own limit it would run uncompiled without a word: FlexAttention would compute all
    scores, in 100 times the memory.
    """
    compiled = torch.compile(function, dynamic=False, **options)

    def run(*inputs: Any, **settings: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger graph, which has its own limit
            return compiled(*inputs, **settings)
        limits: dict[str, Any] = {
            "recompile_limit": shapes,
            "accumulated_recompile_limit": 4 * shapes,
        }
        try:
            with torch._dynamo.config.patch(**limits, fail_on_recompile_limit_hit=True):
                return compiled(*inputs, **settings)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise MalmoiError(
                f"Sparse attention has been compiled for {shapes} shapes of inputs, and for more "
                "it would be slow: use fewer lengths and batch sizes."
            ) from error

    return run


def _blocks(pattern: Pattern, layout: Layout, device: torch.device) -> Any:
    if layout.plain:
        return _plain_blocks(pattern, layout.queries, str(device))
    return _block_mask(pattern, layout, layout.batch, device)


@lru_cache(maxsize=16)
def _plain_blocks(pattern: Pattern, length: int, device: str) -> Any:
    return _block_mask(pattern, Layout(1, length, length), None, torch.device(device))


@lru_cache(maxsize=16)
def _plain_parts(pattern: Pattern, length: int, device: str) -> BlockParts | None:
    return make_parts(pattern, length, torch.device(device))


def _block_mask(pattern: Pattern, layout: Layout, batch: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    heads = pattern.heads if pattern.varies_by_head else None
    return create_block_mask(
        pattern.at(layout), batch, heads, layout.queries, layout.keys, device=str(device)
    )


class KVStore(Protocol):
    """Stores new keys and values and returns every one to attend to."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


LayerCache = tuple[KVStore, int] | None  # a layer's KV store, and the layer's index in it


@dataclass(frozen=True)
class LayerInputs:
    """What a layer reads besides its input.

    Tensors that need a gradient are not here: FSDP finds them only among a block's arguments.
    """

    mask: Mask
    rotary: Tensor | None = None
    cache: LayerCache = None
    attention_out: list[Tensor] | None = None  # takes the probabilities [B, H, T, K], if requested


class StateStore(Protocol):
    """Keeps the state of recurrent layers, one vector [B, N] each."""

    def read_state(self, layer: int) -> Tensor: ...

    def write_state(self, layer: int, state: Tensor) -> None: ...


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
        self.used = self.used + positions.size(1)
        if self.used > self.capacity:
            raise UsageError(
                f"{self.used} tokens do not fit into a cache of {self.capacity}; make a larger one."
            )
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


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017 §3.2); heads may share keys and values."""

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


# Prefix keys and values that every token sees: soft prompts and prefix tuning


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
