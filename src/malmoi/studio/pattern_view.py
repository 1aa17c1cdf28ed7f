"""An attention pattern drawn from the network's own predicate, and its cost. T tokens."""

import re
from dataclasses import replace
from functools import lru_cache

from pydantic import BaseModel
from torch import Tensor
from torch.nn.functional import max_pool2d

from malmoi.errors import UsageError
from malmoi.model import Layout
from malmoi.model.patterns import Pattern

MASK_TILE = 128  # queries and keys of a tile that FlexAttention computes or skips
MAX_MASK_NUMBERS = 1_000_000  # a number in a pattern: more than any context
# limits on head groups and on parentheses, for patterns typed by users
MAX_HEAD_GROUPS = 8
MAX_NESTING = 20


class DrawnPattern(BaseModel):
    """The mask, and its cost at a realistic length (averaged over heads that differ)."""

    length: int
    masks: list[list[str]]  # one mask per head group: rows of 0 and 1, one row per query
    causal: bool
    at: int  # length for which the cost is computed
    pairs: int  # pairs of one head
    share: float  # share of all pairs
    tiles: float  # share of 128 × 128 tiles that hold a pair, which a GPU computes
    memory: int  # bytes of the scores of all heads in bf16
    others: list[float] = []  # shares of the patterns that it is compared with


@lru_cache(maxsize=256)
def pattern_share(text: str, at: int) -> float:
    """The share of all pairs that a pattern keeps, averaged over its groups of heads."""
    return draw_pattern(text, 1, at, text.count(";") + 1).share


def draw_pattern(text: str, length: int, at: int, heads: int) -> DrawnPattern:
    """Draws the pattern over `length` tokens and computes its cost over `at` tokens."""
    pattern = _read(text, heads)
    groups = text.count(";") + 1
    sizes = Tensor([sum(h * groups // heads == g for h in range(heads)) for g in range(groups)])
    pairs, tiles = _count(pattern, at, sizes / heads)
    masks = pattern.mask(Layout(1, length, length)).expand(1, groups, length, length)[0]
    return DrawnPattern(
        length=length,
        masks=[
            ["".join("01"[seen] for seen in row) for row in mask.int().tolist()] for mask in masks
        ],
        causal=all(Pattern(group).is_causal for group in text.split(";")),
        at=at,
        pairs=round(pairs),
        share=pairs / at**2,
        tiles=tiles,
        memory=round(2 * pairs * heads),
    )


def _read(text: str, heads: int) -> Pattern:
    """The pattern with one head per group. Not cached: users type arbitrarily many."""
    large = next(
        (
            n
            for n in re.findall(r"\d+", text)
            if len(n) > len(str(MAX_MASK_NUMBERS)) or int(n) > MAX_MASK_NUMBERS
        ),
        None,
    )
    if large is not None:
        raise UsageError(
            "The number {large:.20} in this pattern is larger than any context; write a "
            "smaller one.",
            large=large,
        )
    if re.search(r"\b(document|padding)\b", text):
        raise UsageError(
            "The patterns 'document' and 'padding' depend on a batch; they cannot be drawn alone."
        )
    if text.count(";") >= MAX_HEAD_GROUPS or text.count("(") > MAX_NESTING:
        raise UsageError(
            "A pattern has up to {most} head groups and {most2} parentheses here; write a "
            "simpler one.",
            most=MAX_HEAD_GROUPS,
            most2=MAX_NESTING,
        )
    return replace(Pattern(text, heads), heads=text.count(";") + 1)


def _count(pattern: Pattern, length: int, shares: Tensor) -> tuple[float, float]:
    """Pairs of one head, and the share of tiles that hold any, a few rows of the mask at a time."""
    pairs = tiles = blocks = 0.0
    for start in range(0, length, MASK_TILE):
        rows = min(MASK_TILE, length - start)
        mask = (
            pattern.mask(Layout(1, rows, length, offset=start))
            .expand(1, len(shares), rows, length)[0]
            .float()
        )
        touched = max_pool2d(mask[:, None], MASK_TILE, ceil_mode=True)[:, 0]
        pairs += float(mask.sum((1, 2)) @ shares)
        tiles += float(touched.sum((1, 2)) @ shares)
        blocks += touched[0].numel()
    return pairs, tiles / blocks
