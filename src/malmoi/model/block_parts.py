"""Strided and fixed patterns for FlexAttention, reordered so that most blocks are empty.

Every stride-th key lies in every block of 128 × 128 pairs, so that block sparsity alone saves
nothing. Such a pattern is computed in two parts that together hold each pair once: near pairs as
they are, and far pairs with the positions grouped by remainder (Child et al. 2019, strided), or
with only those keys that are seen from afar (fixed). The log-sum-exp joins both exactly.

B batch, H heads, T tokens, E width of a head.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from malmoi.model.patterns import Layout, Pattern, Predicate, parse_pattern

# near pairs include the query itself, so that no query is without keys there
_SPREAD = re.compile(r"causal & (strided|column|fixed):(\d+)(?:,(\d+))?")


@dataclass(frozen=True)
class BlockPart:
    """Pairs to compute together: the slots of its queries and keys (None: all, in order)."""

    blocks: Any  # FlexAttention's BlockMask over those queries and keys
    queries: Tensor | None = None
    keys: Tensor | None = None
    back: Tensor | None = None  # where each token is among the queries


@dataclass(frozen=True)
class BlockParts:
    """A pattern over T tokens: for each group of heads, in order, its parts."""

    pattern: Pattern
    groups: tuple[tuple[BlockPart, ...], ...]


def make_parts(pattern: Pattern, length: int, device: torch.device) -> BlockParts | None:
    """The parts of a pattern, or None if plain blocks serve it as well."""
    texts = [text.strip() for text in pattern.text.split(";")]
    spread = [found for text in texts if (found := _SPREAD.fullmatch(text))]
    if pattern.heads % len(texts) or not any(length >= 2 * int(found[2]) for found in spread):
        return None
    return BlockParts(pattern, tuple(tuple(_parts(text, length, device)) for text in texts))


def _parts(text: str, length: int, device: torch.device) -> Iterator[BlockPart]:
    sees = parse_pattern(text).at(Layout(1, length, length))
    found = _SPREAD.fullmatch(text)
    slots = torch.arange(length, device=device)
    if found is None:
        yield BlockPart(_blocks(sees, slots, slots))
        return
    stride = int(found[2])
    fixed = found[1] == "fixed"

    def is_near(q: Any, k: Any) -> Any:
        return q // stride == k // stride if fixed else q - k < stride

    yield BlockPart(_blocks(lambda b, h, q, k: sees(b, h, q, k) & is_near(q, k), slots, slots))
    if fixed:
        queries, keys = slots, slots[slots % stride >= stride - int(found[3])]
    else:
        queries = keys = slots[(slots % stride).argsort(stable=True)]

    def far(b: Any, h: Any, q: Any, k: Any) -> Any:
        q = queries[q]
        k = keys[k]
        return sees(b, h, q, k) & ~is_near(q, k)

    blocks = _blocks(far, queries, keys)
    yield (
        BlockPart(blocks, keys=keys)
        if fixed
        else BlockPart(blocks, queries, keys, queries.argsort())
    )


def _blocks(sees: Predicate, queries: Tensor, keys: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    sizes = (len(queries), len(keys))
    return create_block_mask(sees, None, None, *sizes, device=str(queries.device))


def attend_parts(
    q: Tensor, k: Tensor, v: Tensor, parts: BlockParts, flex: Callable[..., Any]
) -> Tensor:
    """Attention of q, k and v [B, H, T, E]; `flex` is FlexAttention, compiled or not."""
    count = len(parts.groups)
    heads = zip(*(x.chunk(count, dim=1) for x in (q, k, v)), strict=True)
    done = [
        _attend_group(one, keys, values, group, flex)
        for (one, keys, values), group in zip(heads, parts.groups, strict=True)
    ]
    return done[0] if count == 1 else torch.cat(done, 1)


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, parts: tuple[BlockPart, ...], flex: Callable[..., Any]
) -> Tensor:
    out, total = _attend_part(q, k, v, parts[0], flex)
    for part in parts[1:]:
        more, other = _attend_part(q, k, v, part, flex)
        joined = torch.logaddexp(total, other)
        out = out * _share(total, joined, q) + more * _share(other, joined, q)
        total = joined
    return out


def _share(part: Tensor, joined: Tensor, like: Tensor) -> Tensor:
    """A part's share of the softmax [B, H, T, 1]."""
    return (part - joined).exp()[..., None].to(like.dtype)


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, part: BlockPart, flex: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, E] and log-sum-exp [B, H, T], −∞ for a query without keys."""
    # index_select: on a GPU the gradient of x[:, :, slots] sorts the slots first
    if part.queries is not None:
        q = q.index_select(2, part.queries)
    if part.keys is not None:
        k, v = (x.index_select(2, part.keys) for x in (k, v))
    out, total = _with_log_sum(flex, q, k, v, part.blocks)
    if part.back is not None:
        out, total = out.index_select(2, part.back), total.index_select(2, part.back)
    return out, total


def _with_log_sum(
    flex: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, blocks: Any
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention import flex_attention as module

    if hasattr(module, "AuxRequest"):
        out, aux = flex(q, k, v, block_mask=blocks, return_aux=module.AuxRequest(lse=True))
        return out, aux.lse
    out, total = flex(q, k, v, block_mask=blocks, return_lse=True)  # torch before 2.9
    return out, total
