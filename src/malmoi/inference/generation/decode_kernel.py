"""GPU kernel for decoding one token per row: stores its key and value, and attends to its row.

A captured step must not depend on the rows' lengths, and a mask as wide as the longest row would
slow down all the others; here each row is read only up to its own length. B rows, H heads,
G key/value heads, C places, E width of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KERNEL_BLOCK = 64  # places processed together


@triton.jit  # type: ignore[untyped-decorator]
def _decode_step_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # Triton reads it
    q, k, v, keys, values, positions, slots, out,
    q_row, q_head, k_row, k_head, v_row, v_head, row_size, head_size,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,  # noqa: E501
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row: online softmax, block by block (Milakov & Gimelshein 2018)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    shared = head // GROUP
    e = tl.arange(0, WIDE)
    inside = e < E
    query = (
        tl.load(q + row * q_row + head * q_head + e, mask=inside, other=0.0).to(tl.float32) * SCALE
    )
    key = tl.load(k + row * k_row + shared * k_head + e, mask=inside, other=0.0)
    value = tl.load(v + row * v_row + shared * v_head + e, mask=inside, other=0.0)
    position = tl.load(positions + row)
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


@torch.library.custom_op("malmoi::step", mutates_args=("keys", "values"))
def decode_step(  # noqa: PLR0913  # a custom operator takes tensors
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """Attends with q [B, H, 1, E] to a cache [B, G, C, E] and the new k, v [B, G, 1, E].

    Reads the first `positions` [B] places of each row and stores k, v at `slots` [B]. Returns
    [B, H, 1, E].
    """
    B, H, _, E = q.shape
    out = torch.empty(B, H, 1, E, dtype=q.dtype, device=q.device)
    _decode_step_kernel[(B, H)](
        q,
        k,
        v,
        keys,
        values,
        positions,
        slots,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        keys.stride(0),
        keys.stride(1),
        SCALE=E**-0.5,
        HEADS=H,
        GROUP=H // k.size(1),
        E=E,
        WIDE=triton.next_power_of_2(E),
        BLOCK=KERNEL_BLOCK,
    )
    return out


@decode_step.register_fake
def _(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    return q.new_empty(q.shape)
