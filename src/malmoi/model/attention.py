"""Multi-head self-attention: projections, positions, the KV cache, and the kernels to pick from.

B batch, T tokens (queries), K keys, D width, H heads, G key/value heads, E head width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, require_that
from malmoi.model.attention_mask import Bounds, Mask, visible
from malmoi.model.elementwise import dropout, rms_norm, runs_as_written
from malmoi.model.kv_cache import FusedDecodeCache, LayerCache
from malmoi.model.positions import compiles_for_gpu, rotate

# keys: up to this many, plain matmuls beat SDPA in bf16 training on a CPU (5x at 128, 1.2x at 512)
SHORT_KEYS = 512
MOST_SHAPES = 256  # for which FlexAttention is compiled in one process

Kernel = Literal["sdpa", "short", "flex", "packed", "tiled"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0, kernel: Kernel | None = None
) -> Tensor:
    """softmax(q kᵀ / √E) v under a mask: q [B, H, T, E], k and v [B, G, K, E] → [B, H, T, E].

    A query that may see no key gets zeros from every kernel; `kernel=None` picks the fastest.
    """
    return KERNELS[kernel or fastest_kernel(q, k, mask, dropout)](q, k, v, mask, dropout)


@contextmanager
def any_shape(device: torch.device) -> Iterator[None]:
    """In use, where shapes vary, SDPA without cuDNN, which plans 80 ms for each new one (H200)."""
    was = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    if not was or not torch.is_inference_mode_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled=True)


def fastest_kernel(q: Tensor, k: Tensor, mask: Mask, dropout: float = 0.0) -> Kernel:
    if mask.bounds is not None:
        return "packed"
    if mask.tiles is not None:
        return "tiled"
    # in training SDPA draws dropout value after value: 1.7x with 16 texts of 128 tokens
    slow = q.requires_grad and (q.dtype == torch.bfloat16 or dropout > 0)
    # plain matmuls when compiling: NaN gradients on a CPU with torch 2.13
    if slow and runs_as_written(q) and k.size(2) <= SHORT_KEYS:
        return "short"
    return "sdpa" if mask.blocks is None and mask.parts is None else "flex"


def _per_head(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values that heads share [B, G, K, E], once for each head of q [B, H, K, E]."""
    return x.repeat_interleave(q.size(1) // x.size(1), dim=1) if x.size(1) < q.size(1) else x


def attention_probs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Attention probabilities [B, H, T, K], which fused kernels do not return; 0 without keys."""
    scores: Tensor = (q * q.size(-1) ** -0.5) @ _per_head(q, k).transpose(-1, -2)
    scores = scores if mask.bias is None else scores + mask.bias
    seen = visible(mask, scores)
    if seen is None:
        return scores.softmax(-1)
    # The dtype's minimum instead of -inf keeps NaN out of the gradient, but makes a fully masked
    # row uniform over all keys, future ones included, so such rows are zeroed below. A plain causal
    # row always sees itself.
    chosen = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    if mask.causal:
        return chosen
    empty = ~seen.any(-1, keepdim=True) if mask.empty is None else mask.empty
    return chosen.masked_fill(empty, 0.0)


def _short(q: Tensor, k: Tensor, v: Tensor, mask: Mask, p: float) -> Tensor:
    probs = attention_probs(q, k, mask)
    return (dropout(probs, p) if p else probs).to(q.dtype) @ _per_head(q, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    grouped = q.size(1) != k.size(1)
    seen = mask.dense
    if mask.bias is not None:
        seen = mask.bias.to(q.dtype).masked_fill(~cast(Tensor, seen), torch.finfo(q.dtype).min)
    y = F.scaled_dot_product_attention(q, k, v, seen, dropout, mask.causal, enable_gqa=grouped)
    # In bf16 on a GPU the kernel behind SDPA spreads a query without keys over all of them.
    return y if mask.empty is None else y.masked_fill(mask.empty, 0.0)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    if mask.parts is not None:
        from malmoi.model.sparse import attend_parts

        return attend_parts(q, _per_head(q, k), _per_head(q, v), mask.parts, _compiled_flex())
    grouped = q.size(1) != k.size(1)
    return cast(Tensor, _compiled_flex()(q, k, v, block_mask=mask.blocks, enable_gqa=grouped))


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    """FlashAttention over packed sequences; torch's public `varlen_attn` lacks dropout."""
    require_that(
        v.dtype in (torch.bfloat16, torch.float16),
        "Packed sequences need bf16 on a GPU: set train.precision=bf16, or data.packed=false.",
    )
    bounds = cast(Bounds, mask.bounds)
    # autocast leaves normalised queries and keys in fp32; [1, H, N, E] → [N, H, E], no copy
    q, k, v = (x[0].to(v.dtype).transpose(0, 1) for x in (q, k, v))
    n = bounds.longest
    left = mask.window - 1 if mask.window else None  # FlashAttention counts its window inclusively
    y = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds.starts, bounds.starts, n, n, dropout, mask.causal, return_debug_mask=False,
        window_size_left=left, window_size_right=0 if mask.window and mask.causal else left,
    )[0]  # fmt: skip
    return cast(Tensor, y.transpose(0, 1)[None])


def _tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> Tensor:
    assert mask.tiles is not None
    return mask.tiles.run(q, _per_head(q, k), _per_head(q, v), mask.tiles)


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
        limits: Any = dict(recompile_limit=shapes, accumulated_recompile_limit=4 * shapes)
        try:
            with torch._dynamo.config.patch(**limits, fail_on_recompile_limit_hit=True):
                return compiled(*inputs, **settings)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise MalmoiError(
                "Sparse attention was compiled for {shapes} shapes: use fewer lengths.",
                shapes=shapes,
            ) from error

    return run


@dataclass(frozen=True)
class LayerInputs:
    """What a layer reads besides its input.

    Tensors that need a gradient are not here: FSDP finds them only among a block's arguments.
    """

    mask: Mask
    rotary: Tensor | None = None
    cache: LayerCache = None
    attention_out: list[Tensor] | None = None  # takes the probabilities [B, H, T, K], if requested


def products(linear: nn.Module, x: Tensor, shares: Sequence[int]) -> Sequence[Tensor]:
    """The parts of a product of x, of these shares.

    Compiled for a GPU each is a product of its own: what joins the gradients of parts is slow.
    """

    def parts(whole: Tensor, dim: int) -> Sequence[Tensor]:
        unit = whole.size(dim) // sum(shares)
        return cast(Sequence[Tensor], whole.split([unit * share for share in shares], dim))

    plain = type(linear) is nn.Linear and linear.bias is None and not linear._forward_pre_hooks
    if plain and compiles_for_gpu(x):
        return [F.linear(x, weight) for weight in parts(cast(Tensor, linear.weight), 0)]
    return parts(linear(x), -1)


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
        norms: dict[str, Callable[..., Tensor]] = {"layer": F.layer_norm, "rms": rms_norm}
        self.qk_norm = norms[c.norm_kind] if c.qk_norm else None
        self.qkv = nn.Linear(c.width, (c.heads + 2 * c.key_heads) * self.size, bias=c.bias)
        self.out = nn.Linear(c.heads * self.size, c.width, bias=c.bias)

    def forward(self, x: Tensor, inputs: LayerInputs, extra_values: Tensor | None = None) -> Tensor:
        """Self-attention of x [B, T, D]; `extra_values` [B, T, G·E] are added to the values."""
        B, T, _ = x.shape
        shares = (self.heads, self.key_heads, self.key_heads)
        parts = (part.view(B, T, -1, self.size) for part in products(self.qkv, x, shares))
        q, k, v = (part.transpose(1, 2) for part in parts)  # [B, H or G, T, E]
        if extra_values is not None:
            v = v + extra_values.view(B, T, -1, self.size).transpose(1, 2)
        if self.qk_norm is not None:
            q, k = (self.qk_norm(one, (self.size,), eps=self.eps) for one in (q, k))
        if inputs.rotary is not None:
            q, k = rotate(q, inputs.rotary), rotate(k, inputs.rotary)
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
        q, mask = self.biased(q, inputs.mask)
        if inputs.attention_out is not None:
            inputs.attention_out.append(attention_probs(q, k, mask))
        return attend(q, k, v, mask, self.dropout if self.training else 0.0, self.kernel)

    def biased(self, q: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        """The queries and the mask, with a bias of scores where positions need one."""
        return q, mask
