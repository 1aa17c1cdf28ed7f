"""Sparse attention in pieces: tiles of queries and keys on a CPU, reordered blocks on a GPU.

On a CPU queries are cut into tiles; each tile gathers the keys that any of its queries sees, and
tiles with about as many keys go through one call of the flash kernel. Every stride-th key (Child et
al. 2019, strided) is seen by queries with the same remainder, so those pairs are tiled in that
order. The two parts of such a pattern are joined by their log-sum-exp; the backward pass of each
takes the joined result, which makes it exact.

For FlexAttention every stride-th key lies in every block of 128 × 128 pairs, so that block sparsity
alone saves nothing. Such a pattern is computed in two parts that together hold each pair once: near
pairs as they are, and far pairs with the positions grouped by remainder (strided), or with only
those keys that are seen from afar (fixed). The log-sum-exp joins both exactly.

B batch, H heads, T tokens, E width of a head, n tiles, Q queries of a tile, W keys of a tile.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model.patterns import Layout, Pattern, Predicate, parse_pattern

TILE_QUERIES = 128
MAX_TILE_HEADS = 16  # tiles times heads in one call: bounds the memory of gathered keys
MAX_TILED_SHARE = 0.5  # of all pairs; above this, one masked call is faster than the tiles
HIDDEN_SCORE = -1e9  # added to scores of pairs that do not see one another


@dataclass(frozen=True)
class Bucket:
    """Tiles with about as many keys: slots, padded with 0, and what is visible [n, 1, Q, W]."""

    queries: Tensor
    keys: Tensor
    seen: Tensor
    real: Tensor  # [n, Q]: queries that are not padding

    def bias(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores."""
        return torch.zeros(self.seen.shape, dtype=dtype).masked_fill_(~self.seen, HIDDEN_SCORE)


@dataclass(frozen=True)
class HeadTiles:
    """Some heads and the tiles of their pattern; together the parts hold each pair once."""

    heads: slice
    parts: tuple[tuple[Bucket, ...], ...]


@dataclass(frozen=True)
class Tiling:
    """A pattern over T tokens as tiles."""

    pattern: Pattern
    length: int
    groups: tuple[HeadTiles, ...]
    run: Callable[[Tensor, Tensor, Tensor, "Tiling"], Tensor]  # attend_tiles, never compiled


def make_tiling(pattern: Pattern, length: int) -> Tiling | None:
    """The tiles of a pattern, or None if they would hold most of the pairs."""
    groups = _groups(pattern, length)
    if groups is None:
        return None
    # a run that compiles something has loaded the compiler; others are spared its 80 MB
    run = _uncompiled() if "torch._dynamo" in sys.modules else attend_tiles
    return Tiling(pattern, length, groups, run)


@lru_cache(maxsize=16)
def _groups(pattern: Pattern, length: int) -> tuple[HeadTiles, ...] | None:
    texts = pattern.text.split(";")
    groups = []
    pairs = 0.0
    for i, text in enumerate(texts):
        heads = slice(*(-(-j * pattern.heads // len(texts)) for j in (i, i + 1)))
        together = max(1, MAX_TILE_HEADS // (heads.stop - heads.start))
        parts = tuple(_parts(parse_pattern(text), length, together))
        pairs += sum(b.seen.numel() for part in parts for b in part) / len(texts)
        if pairs > MAX_TILED_SHARE * length**2:
            return None
        groups.append(HeadTiles(heads, parts))
    return tuple(groups)


def _parts(pattern: Pattern, length: int, together: int) -> Iterator[tuple[Bucket, ...]]:
    sees = pattern.at(Layout(1, length, length))
    slots = torch.arange(length, dtype=torch.int32)
    strides = [int(n) for n in re.findall(r"(?:column|strided):(\d+)", pattern.text)]
    if not strides:
        yield _buckets(sees, slots, together)
        return
    stride = max(strides)

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return sees(b, h, q, k) & ((q - k).abs() < stride)

    def far(b: Any, h: Any, q: Any, k: Any) -> Any:
        return sees(b, h, q, k) & ((q - k).abs() >= stride)

    yield _buckets(near, slots, together)
    yield _buckets(far, slots[(slots % stride).argsort(stable=True)], together)


def _buckets(sees: Predicate, order: Tensor, together: int) -> tuple[Bucket, ...]:
    """Tiles of the queries in this order, by the number of keys that they gather."""
    keys = torch.arange(len(order), dtype=torch.int32)[None]
    by_size: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for queries in order.split(TILE_QUERIES):
        # a few queries at a time: the predicate's numbers take far more memory than its answer
        few = [sees(0, 0, part[:, None], keys).expand(len(part), -1) for part in queries.split(16)]
        seen = torch.cat(few)
        columns = seen.any(0).nonzero().squeeze(1)
        if len(columns):
            tile = (queries.long(), columns, seen[:, columns])
            by_size.setdefault(_rounded(len(columns)), []).append(tile)
    return tuple(
        _bucket(tiles[i : i + together], size)
        for size, tiles in by_size.items()
        for i in range(0, len(tiles), together)
    )


def _rounded(size: int) -> int:
    """Up to the next of 64, 96, 128, 192, 256, 384…: few different sizes, little padding."""
    power = max(64, 1 << (size - 1).bit_length())
    return power * 3 // 4 if power > 64 and size <= power * 3 // 4 else power


def _bucket(tiles: list[tuple[Tensor, Tensor, Tensor]], size: int) -> Bucket:
    queries = torch.stack([F.pad(q, (0, TILE_QUERIES - len(q))) for q, _, _ in tiles])
    real = torch.stack([torch.arange(TILE_QUERIES) < len(q) for q, _, _ in tiles])
    keys = torch.stack([F.pad(k, (0, size - len(k))) for _, k, _ in tiles])
    seen = torch.stack(
        [F.pad(s, (0, size - s.size(1), 0, TILE_QUERIES - s.size(0))) for _, _, s in tiles]
    )
    return Bucket(queries, keys, seen[:, None], real)


class TiledAttention(torch.autograd.Function):
    """Attention of [B, H, T, E] over the parts of one group of heads."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: tuple[tuple[Bucket, ...], ...]
    ) -> Tensor:
        out, lse = _attend_part(q, k, v, parts[0])
        for part in parts[1:]:
            more, total = _attend_part(q, k, v, part)
            joined = torch.logaddexp(lse, total)
            out = out * (lse - joined).exp()[..., None].to(out.dtype)
            out += more * (total - joined).exp()[..., None].to(out.dtype)
            lse = joined
        # a query that sees no key gets zeros, and passes no gradient on
        empty = lse < HIDDEN_SCORE / 2
        out.masked_fill_(empty[..., None], 0.0)
        lse.masked_fill_(empty, 0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for bucket in (bucket for part in ctx.parts for bucket in part):
            _add_gradients(found, (q, k, v, out, lse, grads[0]), bucket)
        return found[0], found[1], found[2], None


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, part: tuple[Bucket, ...]
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, E] and log-sum-exp [B, H, T] of the queries in this part's tiles."""
    out = torch.zeros_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(q.shape[:3], 2 * HIDDEN_SCORE, dtype=wide)
    for bucket in part:
        inputs = (_tiles(q, bucket.queries), _tiles(k, bucket.keys), _tiles(v, bucket.keys))
        y, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, attn_mask=bucket.bias(q.dtype)
        )
        at = bucket.queries[bucket.real]
        out[:, :, at] = _untiled(y, q, bucket)
        lse[:, :, at] = _untiled(total[..., None], q, bucket)[..., 0]
    return out, lse


def _add_gradients(found: list[Tensor], saved: tuple[Tensor, ...], bucket: Bucket) -> None:
    q, k, v, out, lse, grad = saved
    ours = [_tiles(x, bucket.queries) for x in (grad, q, out, lse[..., None])]
    ours[0] = ours[0].masked_fill(~bucket.real[:, None, :, None], 0.0)
    theirs = [_tiles(x, bucket.keys) for x in (k, v)]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        ours[0], ours[1], *theirs, ours[2], ours[3][..., 0], dropout_p=0.0, is_causal=False,
        attn_mask=bucket.bias(q.dtype),
    )  # fmt: skip
    found[0][:, :, bucket.queries[bucket.real]] += _untiled(dq, q, bucket)
    for total, part in zip(found[1:], (dk, dv), strict=True):
        n, _, W, E = part.shape
        flat = part.view(n, *q.shape[:2], W, E).permute(1, 2, 0, 3, 4).flatten(2, 3)
        total.index_add_(2, bucket.keys.flatten(), flat)


def _tiles(x: Tensor, slots: Tensor) -> Tensor:
    """[B, H, T, E] at slots [n, Q] → [n, B·H, Q, E]."""
    return x.flatten(0, 1)[:, slots].transpose(0, 1)


def _untiled(y: Tensor, like: Tensor, bucket: Bucket) -> Tensor:
    """[n, B·H, Q, E] → [B, H, queries, E], without padding."""
    return y.view(len(y), *like.shape[:2], *y.shape[2:]).permute(1, 2, 0, 3, 4)[:, :, bucket.real]


@cache
def _uncompiled() -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.compiler.disable(attend_tiles))


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    """Attention of q, k and v [B, H, T, E] under a tiled pattern."""
    done = [
        TiledAttention.apply(*(x[:, group.heads] for x in (q, k, v)), group.parts)  # type: ignore[no-untyped-call]
        for group in tiling.groups
    ]
    return done[0] if len(done) == 1 else torch.cat(done, 1)


# ------------------------------------------------------------------ blocks on a GPU
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
    return BlockParts(pattern, tuple(tuple(_block_parts(text, length, device)) for text in texts))


def _block_parts(text: str, length: int, device: torch.device) -> Iterator[BlockPart]:
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
    out, total = _attend_blocks(q, k, v, parts[0], flex)
    for part in parts[1:]:
        more, other = _attend_blocks(q, k, v, part, flex)
        joined = torch.logaddexp(total, other)
        out = out * _share(total, joined, q) + more * _share(other, joined, q)
        total = joined
    return out


def _share(part: Tensor, joined: Tensor, like: Tensor) -> Tensor:
    """A part's share of the softmax [B, H, T, 1]."""
    return (part - joined).exp()[..., None].to(like.dtype)


def _attend_blocks(
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
