"""What the studio says about the loaded models; attention patterns, drawn."""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool2d

from malmoi import __version__
from malmoi.errors import require_that
from malmoi.inference import Model
from malmoi.inference.predictors import LABEL_SET, ONE_LABEL
from malmoi.model import Layout, count_parameters
from malmoi.model.patterns import Pattern
from malmoi.studio import few_shot
from malmoi.studio.endpoint import Registry, StudioRequest, covers, router
from malmoi.tokenizer import Tokenizer
from malmoi.tracing.index import find_stores

SAMPLES = {"en": "The state of the union is strong", "ko": "어제 카페 갔었어 거기 사람 많더라"}


@router.get("/about")
def show_about(request: Request, registry: Registry) -> dict[str, Any]:
    """The loaded models and the available views."""
    return {
        "version": __version__,
        "samples": SAMPLES,  # a sentence by language
        "models": [model_facts(served.name, served.model) for served in registry],
        "runs": request.app.state.settings.runs is not None,
        "tasks": few_shot.LAB_TASKS,
    }


def model_facts(name: str, model: Model) -> dict[str, Any]:
    """A model's abilities and shape."""
    c = model.config
    words = model.checkpoint.tokenizer
    mask = None if words is None else words.specials.mask
    return {
        "name": name,
        "can": model.abilities,
        "width": c.width,
        "depth": c.depth,
        "heads": c.heads,
        "context": c.context,
        "vocab": c.vocab,
        "parameters": count_parameters(model.network),
        "causal": model.network.trunk.is_causal,
        "attention": c.attention,
        "tokenizer": None if words is None else words.kind,
        "template": words is not None and bool(words.chat_template),
        "mask": None if words is None or mask is None else words.token(mask),
        # whether it was trained to tell the next sentence
        "next_sentence": "nsp" in model.network.heads,
        "labels": model.labels,
        "knows": [] if words is None else known_languages(words),
        "head": "" if model.task_head is None else model.task_head.head,  # of its fine-tuning
        "classifies": model.task_head in (ONE_LABEL, LABEL_SET),  # whole texts
        "several": model.task_head is LABEL_SET,  # labels of a text
        "trained": bool(find_stores(model.checkpoint.source)),  # its training text is in its folder
    }


def known_languages(words: Tokenizer) -> list[str]:
    """The languages whose sample the tokenizer covers, or the one of which it covers most."""
    found = {language: covers(words, text) for language, text in SAMPLES.items()}
    ordered = sorted(found, key=lambda language: (found[language].unknown, found[language].ratio))
    return [language for language in ordered if found[language].known] or ordered[:1]


# ------------------------------------------------------------------ patterns

MASK_TILE = 128  # queries and keys of a tile that FlexAttention computes or skips
MAX_MASK_NUMBERS = 1_000_000  # a number in a pattern: more than any context
MAX_HEAD_GROUPS = 8  # in patterns typed by users
MAX_NESTING = 20


class PatternRequest(StudioRequest):
    """A pattern to draw."""

    pattern: Annotated[str, Field(max_length=300)]
    length: int = Field(32, ge=1, le=128)  # tokens that are drawn
    at: int = Field(2048, ge=1, le=8192)  # tokens for which the cost is computed
    heads: int = Field(12, ge=1, le=128)
    others: list[Annotated[str, Field(max_length=300)]] = Field([], max_length=8)


@router.post("/pattern")
def show_pattern(body: PatternRequest) -> dict[str, Any]:
    """An attention pattern over some tokens, and its cost over many beside that of others."""
    pattern = _read(body.pattern, body.heads)
    size = body.length
    masks = pattern.mask(Layout(1, size, size)).expand(1, pattern.heads, size, size)[0]
    pairs, tiles = pattern_cost(body.pattern, body.at, body.heads)
    return {
        "masks": [mask_rows(mask) for mask in masks],  # one for each group of heads
        "causal": pattern.is_causal,
        "at": body.at,
        "pairs": round(pairs),  # of one head
        "share": pairs / body.at**2,  # of all pairs
        "tiles": tiles,  # share of 128 × 128 tiles that hold a pair, which a GPU computes
        "memory": round(2 * pairs * body.heads),  # bytes of the scores of all heads in bf16
        "others": [pattern_share(other, body.at) for other in body.others],
    }


def mask_rows(mask: Tensor) -> list[str]:
    """A mask [T, T] as rows of 0 and 1, one per query."""
    return ["".join("01"[seen] for seen in row) for row in mask.int().tolist()]


@lru_cache(maxsize=256)
def pattern_share(text: str, at: int) -> float:
    """The share of all pairs that a pattern keeps, averaged over its groups of heads."""
    return pattern_cost(text, at, text.count(";") + 1)[0] / at**2


def pattern_cost(text: str, at: int, heads: int) -> tuple[float, float]:
    """Pairs of one head over `at` tokens, averaged over heads that differ, and share of tiles."""
    pattern = _read(text, heads)
    groups = range(pattern.heads)
    sizes = [sum(h * len(groups) // heads == g for h in range(heads)) for g in groups]
    return _count(pattern, at, Tensor(sizes) / heads)


def _read(text: str, heads: int) -> Pattern:
    """The pattern with one head per group. Not cached: users type arbitrarily many."""
    for number in re.findall(r"\d+", text):
        require_that(
            len(number) < 8 and int(number) <= MAX_MASK_NUMBERS,
            "The number {large:.20} in this pattern is larger than any context; write a "
            "smaller one.",
            large=number,
        )
    require_that(
        not re.search(r"\b(document|padding)\b", text),
        "The patterns 'document' and 'padding' depend on a batch; they cannot be drawn alone.",
    )
    require_that(
        text.count(";") < MAX_HEAD_GROUPS and text.count("(") <= MAX_NESTING,
        "A pattern has up to {most} head groups and {most2} parentheses here; write a simpler one.",
        most=MAX_HEAD_GROUPS,
        most2=MAX_NESTING,
    )
    return replace(Pattern(text, heads), heads=text.count(";") + 1)


def _count(pattern: Pattern, length: int, shares: Tensor) -> tuple[float, float]:
    """Pairs of one head, and the share of tiles that hold any, a few rows of the mask at a time."""
    pairs = tiles = blocks = 0.0
    for start in range(0, length, MASK_TILE):
        rows = min(MASK_TILE, length - start)
        seen = pattern.mask(Layout(1, rows, length, offset=start))
        mask = seen.expand(1, len(shares), rows, length)[0].float()
        touched = max_pool2d(mask[:, None], MASK_TILE, ceil_mode=True)[:, 0]
        pairs += float(mask.sum((1, 2)) @ shares)
        tiles += float(touched.sum((1, 2)) @ shares)
        blocks += touched[0].numel()
    return pairs, tiles / blocks
