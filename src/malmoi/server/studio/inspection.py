"""Attention maps and the logit lens, as the page draws them.

L layers, H heads, T tokens, W words.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from pydantic import BaseModel

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.server.inspect_model import AttentionMaps, LayerGuess, attention, lens
from malmoi.server.studio.tokens import readable_token
from malmoi.tokenizer import Tokenizer

VIEW_DIGITS = 4  # smaller differences are invisible
MAX_VIEW_NUMBERS = 1_000_000  # attention weights that a page can draw
ViewArray = np.ndarray[Any, np.dtype[np.float32]]


class AttentionView(BaseModel):
    names: list[str]  # tokens, or words
    segments: list[int]
    weights: list[list[list[list[float]]]]  # [L][H][T][T]: one row per query


def attention_view(model: Model, text: str, pair: str | None, *, words: bool) -> AttentionView:
    """The attention of every head, rounded."""
    seen = attention(model, text, pair)
    groups = word_groups(seen) if words else [[i] for i in range(len(seen.tokens))]
    weights = by_words(seen.weights, groups) if words else seen.weights
    if weights.size > MAX_VIEW_NUMBERS:
        most = int((MAX_VIEW_NUMBERS / (weights.shape[0] * weights.shape[1])) ** 0.5)
        sentence = f"{len(groups)} are too many to draw for this model; shorten the text to {most}."
        raise UsageError(sentence, code="context_length_exceeded")
    name = _word if words else _token
    return AttentionView(
        names=[name(model.tokenizer, seen, group) for group in groups],
        segments=[seen.segments[group[0]] for group in groups],
        weights=np.round(weights.astype(np.float64), VIEW_DIGITS).tolist(),
    )


def word_groups(seen: AttentionMaps) -> list[list[int]]:
    """The positions of each word's tokens; a token outside words is a group of its own."""

    def word(i: int) -> tuple[int, int]:
        number = seen.words[i]
        return (seen.segments[i], number) if number is not None else (-1, i)

    return [list(places) for _, places in groupby(range(len(seen.tokens)), key=word)]


def by_words(weights: ViewArray, groups: Sequence[Sequence[int]]) -> ViewArray:
    """Attention *to* a word is summed, *from* it averaged (Clark et al. 2019 §4.1)."""
    columns = np.stack([weights[..., group].sum(-1) for group in groups], -1)
    return np.stack([columns[..., group, :].mean(-2) for group in groups], -2)


def _token(tokenizer: Tokenizer, seen: AttentionMaps, group: Sequence[int]) -> str:
    return readable_token(tokenizer, seen.tokens[group[0]])


def _word(tokenizer: Tokenizer, seen: AttentionMaps, group: Sequence[int]) -> str:
    """A word without its leading space; a token without text, such as [CLS], by name."""
    ids = [tokenizer.id(seen.tokens[i]) for i in group]
    text = tokenizer.decode([id for id in ids if id is not None]).strip()
    return text or _token(tokenizer, seen, group)


# ------------------------------------------------------------------ the logit lens


class LayerToken(BaseModel):
    text: str
    probability: float


class LayerGuesses(BaseModel):
    tokens: list[str]
    layers: list[list[list[LayerToken]]]  # [L + 1][T][top]: the embedding first


def layer_guesses(model: Model, text: str, top: int) -> LayerGuesses:
    found = lens(model, text, top)
    words = model.tokenizer

    def named(one: LayerGuess) -> LayerToken:
        return LayerToken(text=readable_token(words, one.token), probability=one.probability)

    return LayerGuesses(
        tokens=[readable_token(words, token) for token in found.tokens],
        layers=[[[named(one) for one in place] for place in layer] for layer in found.guesses],
    )
