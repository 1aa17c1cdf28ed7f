"""GPU kernel for decoding one token per row: stores its key and value, and attends to its row.

A captured step must not depend on the rows' lengths, and a mask as wide as the longest row would
slow down all the others; here each row is read only up to its own length. B rows, H heads,
G key/value heads, C places, E width of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KERNEL_BLOCK = 64  # places processed together
KERNEL_WARPS = 2  # of 64 rows and more; H200: 15 µs where four take 17, of 256 rows 39 and 52


@triton.jit  # type: ignore[untyped-decorator]
def normalised(x, inside, size: tl.constexpr, eps, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """LayerNorm or RMSNorm of a vector in fp32, without weights; 0 where it is not `inside`."""
    if NORM == "layer":
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _load_head(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    at, e, inside, angles, sines, eps, E: tl.constexpr, NORM: tl.constexpr
):
    """A query or key, normalised and rotated, and rounded where the modules round it."""
    x = tl.load(at + e, mask=inside, other=0.0)
    kind = x.dtype
    if NORM != "":
        x = normalised(x.to(tl.float32), inside, E, eps, NORM).to(kind)
    if angles is not None:  # pairs (x_i, x_{i+E/2}), as `model/positions.py`
        half = E // 2
        other = tl.where(e < half, e + half, e - half)
        y = tl.load(at + other, mask=inside, other=0.0)
        if NORM != "":
            y = normalised(y.to(tl.float32), inside, E, eps, NORM).to(kind)
        cos = tl.load(angles + e % half, mask=inside, other=0.0).to(kind).to(tl.float32)
        sin = tl.load(angles + sines + e % half, mask=inside, other=0.0).to(kind).to(tl.float32)
        turned = tl.where(e < half, -sin, sin) * y.to(tl.float32)
        x = (x.to(tl.float32) * cos).to(kind).to(tl.float32) + turned.to(kind).to(tl.float32)
    return x.to(kind)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_step_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # Triton reads it
    q, k, v, keys, values, positions, slots, extra, rotary, out,
    q_row, q_head, k_row, k_head, v_row, v_head, row_size, head_size, sines, eps,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,  # noqa: E501
    BLOCK: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row: online softmax, block by block (Milakov & Gimelshein 2018)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    shared = head // GROUP
    e = tl.arange(0, WIDE)
    inside = e < E
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + row)
    angles = None if rotary is None else rotary + position * (E // 2)
    query = _load_head(q + row * q_row + head * q_head, e, inside, angles, sines, eps, E, NORM)
    query = query.to(tl.float32) * SCALE
    key = _load_head(k + row * k_row + shared * k_head, e, inside, angles, sines, eps, E, NORM)
    value = tl.load(v + row * v_row + shared * v_head + e, mask=inside, other=0.0)
    if extra is not None:
        here = (row * (HEADS // GROUP) + shared) * E + e
        value += tl.load(extra + here, mask=inside, other=0.0)
    held = row * row_size + shared * head_size

    # start from the newest token, which always attends to itself
    best = tl.sum(query * key.to(tl.float32))
    total = tl.exp(best - best)  # 1, as a tensor of the accumulator's type
    mixed = value.to(tl.float32)
    for start in range(0, position, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = place < position
        at = held + place[:, None] * E + e[None, :]
        valid = seen[:, None] & inside[None, :]
        scores = tl.sum(
            query[None, :] * tl.load(keys + at, mask=valid, other=0.0).to(tl.float32), 1
        )
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        weights = tl.exp(scores - higher)
        fade = tl.exp(best - higher)
        found = tl.load(values + at, mask=valid, other=0.0).to(tl.float32)
        mixed = mixed * fade + tl.sum(weights[:, None] * found, 0)
        total = total * fade + tl.sum(weights, 0)
        best = higher
    tl.store(
        out + (row * HEADS + head) * E + e, (mixed / total).to(out.dtype.element_ty), mask=inside
    )

    if head % GROUP == 0:  # once per group; no program reads this place in this pass
        mine = held + tl.load(slots + row) * E + e
        tl.store(keys + mine, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + mine, value.to(values.dtype.element_ty), mask=inside)


def decode_step(  # noqa: PLR0913  # what a kernel takes
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    extra: Tensor | None = None,
    rotary: Tensor | None = None,
    *,
    norm: str = "",
    eps: float = 0.0,
    block: int = KERNEL_BLOCK,
    warps: int = KERNEL_WARPS,
    overlap: bool = False,
) -> Tensor:
    """Attends with q [B, H, 1, E] to a cache [B, G, C, E] and the new k, v [B, G, 1, E].

    Reads the first `positions` [B] places of each row and stores k, v at `slots` [B]. Returns
    [B, H, 1, E]. On the way it can add `extra` [B, G · E] to v, and normalise q and k (layer, rms)
    and rotate them by a table [2, context, E/2]. `overlap`: see `triton_step.py`.
    """
    B, H, _, E = q.shape
    out = torch.empty(B, H, 1, E, dtype=q.dtype, device=q.device)
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    _decode_step_kernel[(B, H)](
        q,
        k,
        v,
        keys,
        values,
        positions,
        slots,
        extra,
        rotary,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        keys.stride(0),
        keys.stride(1),
        0 if rotary is None else rotary.stride(0),
        eps,
        SCALE=E**-0.5,
        HEADS=H,
        GROUP=H // k.size(1),
        E=E,
        WIDE=triton.next_power_of_2(E),
        BLOCK=block,
        NORM=norm,
        OVERLAP=overlap,
        num_warps=warps,
        **options,
    )
    return out
