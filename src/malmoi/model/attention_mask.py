"""A pattern over the tokens of a batch, in the cheapest form that a kernel takes.

B batch, T tokens (queries), K keys, H heads.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from malmoi.messages import logger
from malmoi.model.patterns import Layout, Pattern

if TYPE_CHECKING:
    from malmoi.model.sparse import BlockParts, Tiling


# patterns that the packed-sequence (varlen) kernel handles without a mask
PACKED_PATTERN = re.compile(r"full|causal|(?:causal & )?local:(?P<window>\d+)")
MIN_SPARSE_KEYS = 1024  # keys: below this a dense mask is as fast as blocks or tiles
# keys: below this, blocks in the order of the text are faster on a GPU (docs/performance.md)
MIN_REORDERED_KEYS = 16_384


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
    parts: "BlockParts | None" = None  # blocks in another order, if a pattern touches all
    bounds: Bounds | None = None  # packed documents, kept apart without a mask tensor
    window: int = 0  # with bounds: attend to positions less than this apart; 0: any
    tiles: "Tiling | None" = None  # the pairs to compute on a CPU
    distances: Tensor | None = None  # int, broadcasts to [B, 1, T, K]: for relative positions
    bias: Tensor | None = None  # with dense: added to the scores, broadcasts to [B, H, T, K]
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
        elif device.type == "cuda" and layout.plain:
            return _plain_sparse(pattern, layout.keys, str(device))
        elif device.type == "cuda":
            return Mask(blocks=_block_mask(pattern, layout, layout.batch, device))
        elif device.type == "cpu" and layout.plain and not layout.prefix:
            from malmoi.model.sparse import make_tiling

            if (tiles := make_tiling(pattern, layout.keys)) is not None:
                return Mask(tiles=tiles)
    return Mask.of(pattern.mask(layout, device))


@cache
def _note_dropout() -> None:
    logger.warning("Sparse attention is dense with dropout: set model.attention_dropout=0.")


@lru_cache(maxsize=16)
def _plain_sparse(pattern: Pattern, length: int, device: str) -> Mask:
    """The blocks of unpadded text, in another order where that leaves most of them empty."""
    place = torch.device(device)
    if length >= MIN_REORDERED_KEYS:
        from malmoi.model.sparse import make_parts

        if (parts := make_parts(pattern, length, place)) is not None:
            return Mask(parts=parts)
    return Mask(blocks=_block_mask(pattern, Layout(1, length, length), None, place))


def _block_mask(pattern: Pattern, layout: Layout, batch: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    heads = pattern.heads if pattern.varies_by_head else None
    return create_block_mask(
        pattern.at(layout), batch, heads, layout.queries, layout.keys, device=str(device)
    )


def visible(mask: Mask, scores: Tensor) -> Tensor | None:
    """Any form of mask as booleans that broadcast to [B, H, T, K]; None means full attention."""
    B, H, T, K = scores.shape
    if mask.blocks is not None:
        b, h, q, k = (torch.arange(n, device=scores.device) for n in (B, H, T, K))
        b, h, q = b[:, None, None, None], h[:, None, None], q[:, None]
        return cast(Tensor, mask.blocks.mask_mod(b, h, q, k))
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
