"""The studio's endpoints that concern no model, all of them, or two; attention patterns, drawn."""

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import max_pool2d

from malmoi import __version__
from malmoi.errors import UsageError, require_that
from malmoi.inference import Model
from malmoi.inference.predictors import LABEL_SET, ONE_LABEL
from malmoi.model import Layout, count_parameters
from malmoi.model.patterns import Pattern
from malmoi.server.api.requests import NameField
from malmoi.server.executor import run_on_model
from malmoi.studio import compare, few_shot
from malmoi.studio.endpoint import Registry, StudioRequest, covers, router
from malmoi.tokenizer import Tokenizer
from malmoi.tracing.index import find_stores

SAMPLES = {"en": "The state of the union is strong", "ko": "어제 카페 갔었어 거기 사람 많더라"}


class ModelFacts(BaseModel):
    """A model's abilities and shape."""

    name: str
    can: list[str]
    width: int
    depth: int
    heads: int
    context: int
    vocab: int
    parameters: int
    causal: bool
    attention: list[str]
    tokenizer: str | None
    template: bool  # whether it has a chat template
    mask: str | None  # the mask token, if there is one
    next_sentence: bool  # whether it was trained to tell the next sentence
    labels: list[str]
    knows: list[str]  # languages of SAMPLES that its tokenizer covers, the best covered first
    head: str  # of its fine-tuning: classify, tag, span…; empty without one
    classifies: bool  # whether it classifies whole texts
    several: bool  # whether a text may have several labels
    trained: bool  # whether the text that it was trained on is in its folder


class Overview(BaseModel):
    version: str
    samples: dict[str, str]  # a sample sentence by language
    models: list[ModelFacts]
    runs: bool  # whether a folder of runs was given
    tasks: list[str]  # of the few-shot lab


def model_facts(name: str, model: Model) -> ModelFacts:
    c = model.config
    words = model.checkpoint.tokenizer
    mask = None if words is None else words.specials.mask
    return ModelFacts(
        name=name,
        can=list(model.abilities),
        width=c.width,
        depth=c.depth,
        heads=c.heads,
        context=c.context,
        vocab=c.vocab,
        parameters=count_parameters(model.network),
        causal=model.network.trunk.is_causal,
        attention=list(c.attention),
        tokenizer=None if words is None else words.kind,
        template=words is not None and bool(words.chat_template),
        mask=None if words is None or mask is None else words.token(mask),
        next_sentence="nsp" in model.network.heads,
        labels=list(model.labels),
        knows=[] if words is None else known_languages(words),
        head="" if model.task_head is None else model.task_head.head,
        classifies=model.task_head in (ONE_LABEL, LABEL_SET),
        several=model.task_head is LABEL_SET,
        trained=bool(find_stores(model.checkpoint.source)),
    )


def known_languages(words: Tokenizer) -> list[str]:
    """The languages whose sample the tokenizer covers, or the one of which it covers most."""
    found = {language: covers(words, text) for language, text in SAMPLES.items()}
    ordered = sorted(found, key=lambda language: (found[language].unknown, found[language].ratio))
    return [language for language in ordered if found[language].known] or ordered[:1]


# ------------------------------------------------------------------ patterns

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


# ------------------------------------------------------------------ endpoints


class PatternRequest(StudioRequest):
    """A pattern to draw."""

    pattern: Annotated[str, Field(max_length=300)]
    length: int = Field(32, ge=1, le=128)  # tokens that are drawn
    at: int = Field(2048, ge=1, le=8192)  # tokens for which the cost is computed
    heads: int = Field(12, ge=1, le=128)
    others: list[Annotated[str, Field(max_length=300)]] = Field([], max_length=8)


class CompareRequest(StudioRequest):
    """A word of a sentence to predict."""

    text: Annotated[str, Field(max_length=2000)]
    place: int = Field(0, ge=0, le=2000)
    gpt: NameField | None = None  # none: that side stays empty
    bert: NameField | None = None


@router.get("/about")
def show_about(request: Request, registry: Registry) -> Overview:
    """The loaded models and the available views."""
    return Overview(
        version=__version__,
        samples=SAMPLES,
        models=[model_facts(served.name, served.model) for served in registry],
        runs=request.app.state.settings.runs is not None,
        tasks=list(few_shot.LAB_TASKS),
    )


@router.post("/pattern")
def show_pattern(body: PatternRequest) -> DrawnPattern:
    """An attention pattern over some tokens, and its cost over many beside that of others."""
    drawn = draw_pattern(body.pattern, body.length, body.at, body.heads)
    shares = [pattern_share(other, body.at) for other in body.others]
    return drawn.model_copy(update={"others": shares})


@router.post("/beside")
async def show_comparison(
    request: Request, registry: Registry, body: CompareRequest
) -> compare.Comparison:
    """One word of a sentence, predicted by a GPT and by a BERT."""
    gpt, bert = (None if name is None else registry.get(name) for name in (body.gpt, body.bert))
    first = gpt or bert
    if first is None:
        raise UsageError("Choose a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    return await run_on_model(
        request, first, partial(compare.compare_word, body.text, body.place, *models)
    )
