"""softmax(q kᵀ / √E) v by several kernels, and the one place that picks one.

B batch, T tokens (queries), K keys, H heads, G key/value heads, E head width.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import MalmoiError, UsageError
from malmoi.model.attention_mask import Bounds, Mask, visible

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
    return KERNELS[kernel or fastest_kernel(q, k, mask)](q, k, v, mask, dropout)


def fastest_kernel(q: Tensor, k: Tensor, mask: Mask) -> Kernel:
    if mask.bounds is not None:
        return "packed"
    if mask.tiles is not None:
        return "tiled"
    if _is_short(q, k):
        return "short"
    return "sdpa" if mask.blocks is None and mask.parts is None else "flex"


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether to use plain matmuls; not when compiling (torch 2.13: NaN gradients on a CPU)."""
    cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad
    return cpu and k.size(2) <= SHORT_KEYS and not torch.compiler.is_compiling()


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
    empty = ~seen.any(-1, keepdim=True) if mask.empty is None else mask.empty
    return chosen.masked_fill(empty, 0.0)


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
        from malmoi.model.block_parts import attend_parts

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
    assert mask.tiles is not None
    return mask.tiles.run(q, k, v, mask.tiles)


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
                "Sparse attention has been compiled for {shapes} shapes of inputs, and for "
                "more it would be slow: use fewer lengths and batch sizes.",
                shapes=shapes,
            ) from error

    return run
