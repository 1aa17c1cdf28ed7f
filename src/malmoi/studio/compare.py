"""One word of a sentence, predicted by a GPT from the left and by a BERT from both sides."""

from collections.abc import Iterator, Sequence

import torch
from pydantic import BaseModel

from malmoi.errors import UsageError, require_that
from malmoi.inference import Model
from malmoi.inference.prompt import mask_token
from malmoi.inference.pseudo_likelihood import SplitText, fills, pseudo_scores
from malmoi.interpret.forward_pass import attention, encode_for_model
from malmoi.model import Layout
from malmoi.studio.endpoint import TokenChance, covers, readable_token

TOP_GUESSES = 5


class ModelSide(BaseModel):
    """One model's prediction of the word."""

    words: list[str]  # as it reads them
    mask: list[str]  # the model's mask over W words: rows of 0 and 1
    row: int  # the word from which the guess is made
    # attention from there to each word: mean over the last layer's heads, 0 for unseen words
    looks: list[float]
    guesses: list[TokenChance]
    logprob: float  # probability of the word itself
    tokens: int  # tokens of the word
    unknown: bool  # whether the tokenizer does not know the word: logprob is then of [UNK]


class Comparison(BaseModel):
    words: list[str]
    place: int
    gpt: ModelSide | None
    bert: ModelSide | None


def compare_word(text: str, place: int, gpt: Model | None, bert: Model | None) -> Comparison:
    words = text.split()
    if not words:
        raise UsageError("There is no sentence: write a few words.", code="empty_prompt")
    require_that(
        0 <= place < len(words),
        "There is no word {place}: the sentence has {words}.",
        place=place + 1,
        words=len(words),
    )
    sides = (
        None if gpt is None else _gpt(gpt, words, place),
        None if bert is None else _bert(bert.masked, words, place),
    )
    return Comparison(words=words, place=place, gpt=sides[0], bert=sides[1])


def _gpt(model: Model, words: Sequence[str], place: int) -> ModelSide:
    """p(word | the words before it): figures 3 to 8, one for each position."""
    before = " ".join(words[:place])
    score = model.score(before, f" {words[place]}" if place else words[place])
    seen = _looks(model, before, len(before) - 1, words[:place]) if place else []
    return ModelSide(
        words=list(words),
        mask=_mask(model, len(words)),
        row=max(place - 1, 0),
        looks=[*seen, *[0.0] * (len(words) - len(seen))],
        guesses=_likeliest(model, before),
        logprob=score.logprob,
        tokens=len(score.tokens),
        unknown=covers(model.tokenizer, words[place]).unknown > 0,
    )


def _bert(model: Model, words: Sequence[str], place: int) -> ModelSide:
    """p(word | the words around it), the word masked: figures 10 and 11.

    A model of both readings guesses it from the position before.
    """
    ahead = int(model.config.both_ways)
    gap = model.tokenizer.token(mask_token(model.tokenizer))
    hidden = [*words[:place], gap, *words[place + 1 :]]
    text = " ".join(hidden)
    before = " ".join([*words[:place], ""])
    after = " ".join(["", *words[place + 1 :]])
    score = pseudo_scores(
        model.network, model.tokenizer, [SplitText(before, words[place], after)], together=True
    )[0]
    return ModelSide(
        words=hidden,
        mask=_mask(model, len(words)),
        row=max(place - ahead, 0),
        looks=_looks(model, text, len(before) - 2 * ahead, hidden),
        guesses=[
            TokenChance(
                text=readable_token(model.tokenizer, one.token), probability=one.probability
            )
            for one in fills(model.network, model.tokenizer, text, TOP_GUESSES)[before.count(gap)]
        ],
        logprob=score.logprob,
        tokens=len(score.tokens),
        unknown=covers(model.tokenizer, words[place]).unknown > 0,
    )


def _likeliest(model: Model, before: str) -> list[TokenChance]:
    """The likeliest next tokens."""
    words = model.tokenizer
    chances = torch.from_numpy(model.logits(before)[-1]).double().softmax(-1)
    best = chances[: words.vocab_size].topk(min(TOP_GUESSES, words.vocab_size))
    return [
        TokenChance(text=readable_token(words, words.token(token)), probability=chance)
        for token, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _mask(model: Model, size: int) -> list[str]:
    """The mask of the model's first layer over this many words."""
    seen = (
        model.network.trunk.patterns[0].mask(Layout(1, size, size)).expand(1, -1, size, size)[0, 0]
    )
    return ["".join("01"[one] for one in row) for row in seen.int().tolist()]


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
