"""Who looks at whom, by tokens or by whole words, for the picture. L layers, H heads, T tokens,
W words.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from pydantic import BaseModel

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.server.inspect_model import AttentionMaps, attention
from malmoi.server.studio.tokens import readable_token
from malmoi.tokenizer import Tokenizer

VIEW_DIGITS = 4  # of a weight: more cannot be seen
MAX_VIEW_NUMBERS = 1_000_000  # weights of one picture: a page draws no more
ViewArray = np.ndarray[Any, np.dtype[np.float32]]


class AttentionView(BaseModel):
    names: list[str]  # tokens, or words
    segments: list[int]
    weights: list[list[list[list[float]]]]  # [L][H][T][T]: a row is one that looks


def attention_view(model: Model, text: str, pair: str | None, *, words: bool) -> AttentionView:
    """The attention of every head, its numbers rounded."""
    seen = attention(model, text, pair)
    groups = word_groups(seen) if words else [[i] for i in range(len(seen.tokens))]
    weights = by_words(seen.weights, groups) if words else seen.weights
    if weights.size > MAX_VIEW_NUMBERS:
        most = int((MAX_VIEW_NUMBERS / (weights.shape[0] * weights.shape[1])) ** 0.5)
        sentence = (
            f"{len(groups)} are too many to draw of this model: shorten the text to {most}, "
            f"or fewer."
        )
        raise UsageError(sentence, code="context_length_exceeded")
    name = _word if words else _token
    return AttentionView(
        names=[name(model.tokenizer, seen, group) for group in groups],
        segments=[seen.segments[group[0]] for group in groups],
        weights=np.round(weights.astype(np.float64), VIEW_DIGITS).tolist(),
    )


def word_groups(seen: AttentionMaps) -> list[list[int]]:
    """The places of each word's tokens; what belongs to no word stands alone."""

    def word(i: int) -> tuple[int, int]:
        number = seen.words[i]
        return (seen.segments[i], number) if number is not None else (-1, i)

    return [list(places) for _, places in groupby(range(len(seen.tokens)), key=word)]


def by_words(weights: ViewArray, groups: Sequence[Sequence[int]]) -> ViewArray:
    """Attention between words: *to* a word its pieces' summed, *from* a word its pieces' mean, so
    that rows still
    sum to 1 (Clark et al. 2019 §4.1).
    """
    columns = np.stack([weights[..., group].sum(-1) for group in groups], -1)
    return np.stack([columns[..., group, :].mean(-2) for group in groups], -2)


def _token(tokenizer: Tokenizer, seen: AttentionMaps, group: Sequence[int]) -> str:
    return readable_token(tokenizer, seen.tokens[group[0]])


def _word(tokenizer: Tokenizer, seen: AttentionMaps, group: Sequence[int]) -> str:
    """A word without the space before it; what has no text, such as [CLS], by its token."""
    ids = [tokenizer.id(seen.tokens[i]) for i in group]
    text = tokenizer.decode([id for id in ids if id is not None]).strip()
    return text or _token(tokenizer, seen, group)
