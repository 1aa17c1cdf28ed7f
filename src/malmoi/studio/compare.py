"""One word of a sentence, predicted by a GPT from the left and by a BERT from both sides."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from fastapi import Request
from pydantic import Field

from malmoi.errors import UsageError, require_that
from malmoi.inference import Model
from malmoi.inference.prompt import mask_token
from malmoi.inference.pseudo_likelihood import SplitText, fills, pseudo_scores
from malmoi.inference.score import Score
from malmoi.interpret.forward_pass import attention, encode_for_model, likeliest
from malmoi.model import Layout
from malmoi.server.api.requests import NameField
from malmoi.server.executor import run_on_model
from malmoi.studio.endpoint import Registry, ShortText, StudioRequest, covers, router, token_chance
from malmoi.studio.routes import mask_rows

TOP_GUESSES = 5


class CompareRequest(StudioRequest):
    """A word of a sentence to predict."""

    text: ShortText
    place: int = Field(0, ge=0, le=2000)
    gpt: NameField | None = None  # none: that side stays empty
    bert: NameField | None = None


@router.post("/beside")
async def show_comparison(
    request: Request, registry: Registry, body: CompareRequest
) -> dict[str, Any]:
    """One word of a sentence, predicted by a GPT and by a BERT."""
    gpt, bert = (None if name is None else registry.get(name) for name in (body.gpt, body.bert))
    first = gpt or bert
    if first is None:
        raise UsageError("Choose a GPT, a BERT or both.")
    models = [None if one is None else one.model for one in (gpt, bert)]
    return await run_on_model(request, first, partial(compare_word, body.text, body.place, *models))


def compare_word(text: str, place: int, gpt: Model | None, bert: Model | None) -> dict[str, Any]:
    """Each model's prediction of a word; None for a side without one."""
    words = text.split()
    if not words:
        raise UsageError("There is no sentence: write a few words.", code="empty_prompt")
    require_that(
        place < len(words),
        "There is no word {place}: the sentence has {words}.",
        place=place + 1,
        words=len(words),
    )
    return {
        "words": words,
        "place": place,
        "gpt": None if gpt is None else _gpt(gpt, words, place),
        "bert": None if bert is None else _bert(bert.masked, words, place),
    }


def _gpt(model: Model, words: Sequence[str], place: int) -> dict[str, Any]:
    """p(word | the words before it): figures 3 to 8, one for each position."""
    before = " ".join(words[:place])
    seen = _looks(model, before, len(before) - 1, words[:place]) if place else []
    return {
        "words": words,  # as the model reads them
        "row": max(place - 1, 0),  # the word from which the guess is made
        # attention from there to each word: mean over the last layer's heads, 0 for unseen words
        "looks": [*seen, *[0.0] * (len(words) - len(seen))],
        "guesses": _likeliest(model, before),
        **_facts(model, words, place),
        **_scored(model.score(before, f" {words[place]}" if place else words[place])),
    }


def _bert(model: Model, words: Sequence[str], place: int) -> dict[str, Any]:
    """p(word | the words around it), the word masked: figures 10 and 11.

    A model of both readings guesses it from the position before.
    """
    ahead = int(model.config.both_ways)
    gap = model.tokenizer.token(mask_token(model.tokenizer))
    hidden = [*words[:place], gap, *words[place + 1 :]]
    text = " ".join(hidden)
    before = " ".join([*words[:place], ""])
    split = SplitText(before, words[place], " ".join(["", *words[place + 1 :]]))
    guesses = fills(model.network, model.tokenizer, text, TOP_GUESSES)[before.count(gap)]
    return {
        "words": hidden,
        "row": max(place - ahead, 0),
        "looks": _looks(model, text, len(before) - 2 * ahead, hidden),
        "guesses": [token_chance(model.tokenizer, one.token, one.probability) for one in guesses],
        **_facts(model, words, place),
        **_scored(pseudo_scores(model.network, model.tokenizer, [split], together=True)[0]),
    }


def _facts(model: Model, words: Sequence[str], place: int) -> dict[str, Any]:
    size = len(words)
    seen = model.network.trunk.patterns[0].mask(Layout(1, size, size))
    return {
        "mask": mask_rows(seen.expand(1, -1, size, size)[0, 0]),  # of the first layer, over words
        # whether the tokenizer does not know the word: its probability is then that of [UNK]
        "unknown": covers(model.tokenizer, words[place]).unknown > 0,
    }


def _scored(score: Score) -> dict[str, Any]:
    return {"logprob": score.logprob, "tokens": len(score.tokens)}


def _likeliest(model: Model, before: str) -> list[dict[str, Any]]:
    """The likeliest next tokens."""
    words = model.tokenizer
    logits = torch.from_numpy(model.logits(before)[-1:]).double()
    (best,) = likeliest(logits, words.vocab_size, TOP_GUESSES)
    return [token_chance(words, words.token(token), chance) for token, chance in best]


def _looks(model: Model, text: str, at: int, words: Sequence[str]) -> list[float]:
    """How much the token at or before character `at` attends to each word of the text."""
    offsets = encode_for_model(model, text).offsets
    weights = attention(model, text).weights
    asker = max(
        (i for i, (first, last) in enumerate(offsets) if first <= at and first < last), default=0
    )
    row = weights[-1].mean(0)[asker]
    return [float(row[places].sum()) for places in _places(offsets, words)]


def _places(offsets: Sequence[tuple[int, int]], words: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of each word of the joined text; a space belongs to the word after it."""
    begin = 0
    for word in words:
        end = begin + len(word)
        yield [i for i, (first, last) in enumerate(offsets) if begin < last <= end]
        begin = end + 1
