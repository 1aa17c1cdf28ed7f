"""Attention maps and the logit lens. L layers, H heads, T tokens, V vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.inference.base import LoadedModel
from malmoi.inference.batches import model_inputs
from malmoi.inference.prompt import encode_prompt, require_fit, text_too_long
from malmoi.messages import msg
from malmoi.model import Activations
from malmoi.tokenizer import Encoding

MAX_ATTENTION_NUMBERS = 4_000_000  # numbers of one attention map
MAX_GUESSES = 1_000_000  # numbers of one lens
HEAD_TOKENS = 128  # positions whose logits are held at the same time
Reading = Literal["causal", "masked"]
AttentionArray = np.ndarray[Any, np.dtype[np.float32]]
AnyModel = TypeVar("AnyModel", bound=LoadedModel)


@dataclass(frozen=True)
class AttentionMaps:
    """How much each token attends to each other one."""

    tokens: list[str]
    words: list[int | None]  # the word each token belongs to; None: no word, such as [CLS]
    segments: list[int]  # 1 for the second text of a pair
    # [L, H, T, T]: a query's row sums to 1, minus its attention to soft tokens before the text
    weights: AttentionArray


@dataclass(frozen=True)
class LayerGuess:
    """A token that a layer finds likely at a position."""

    token: str
    probability: float


@dataclass(frozen=True)
class Lens:
    """Each layer's predictions as if it were the last (the logit lens, nostalgebraist 2020)."""

    tokens: list[str]
    # [L + 1][T][top]: the embedding first; a GPT's guesses are about the next token
    guesses: list[list[list[LayerGuess]]]


def chosen_reader(model: AnyModel, reading: Reading | None) -> AnyModel:
    """A model trained both ways in the reading that was asked for; masked if none was.

    Raises:
        UsageError: the model has one reading only.
    """
    if reading is not None and not model.config.both_ways:
        raise UsageError("This model reads in one way only: leave `reading` out.")
    return model if reading == "causal" else model.masked


@torch.inference_mode()
def attention(
    model: LoadedModel, text: str, pair: str | None = None, limit: int = MAX_ATTENTION_NUMBERS
) -> AttentionMaps:
    """The attention of every head while the model reads a text or a pair of texts."""
    model.network.require_attention("The attention view")
    encoding = encode_for_model(model, text, pair)
    size = len(encoding.tokens)
    c = model.config
    if c.depth * c.heads * size**2 > limit:
        longest = int((limit / (c.depth * c.heads)) ** 0.5)
        raise text_too_long(size, longest, "the attention map's limit")
    activations = Activations(attention=[])
    _watch(model, encoding, activations)
    seen = torch.stack(activations.attention or [])[:, 0, :, -size:, -size:]
    names = [model.tokenizer.token(token) for token in encoding.tokens]
    return AttentionMaps(names, encoding.words, encoding.segments, seen.float().cpu().numpy())


def word_groups(seen: AttentionMaps) -> list[list[int]]:
    """The positions of each word's tokens; a token outside words is a group of its own."""

    def word(i: int) -> tuple[int, int]:
        number = seen.words[i]
        return (seen.segments[i], number) if number is not None else (-1, i)

    return [list(places) for _, places in groupby(range(len(seen.tokens)), key=word)]


def by_words(weights: AttentionArray, groups: Sequence[Sequence[int]]) -> AttentionArray:
    """Attention *to* a word is summed, *from* it averaged (Clark et al. 2019 §4.1)."""
    columns = np.stack([weights[..., group].sum(-1) for group in groups], -1)
    return np.stack([columns[..., group, :].mean(-2) for group in groups], -2)


@torch.inference_mode()
def lens(model: LoadedModel, text: str, top: int = 5, pause: Callable[[], object] = bool) -> Lens:
    """The likeliest tokens by layer and position: final norm and head on each layer's states.

    `pause` is called between parts, where a server lets others have their turn.
    """
    head = model.network.require_language_head()
    if not 1 <= top <= model.tokenizer.vocab_size:
        raise UsageError(
            "top must be between 1 and {vocab_size}, not {top}.",
            vocab_size=model.tokenizer.vocab_size,
            top=top,
        )
    encoding = encode_for_model(model, text)
    activations = Activations()
    places = MAX_GUESSES // (top * (model.config.depth + 1))
    if len(encoding.tokens) > places:
        raise text_too_long(
            len(encoding.tokens), places, msg("the lens limit with {top} guesses", top=top)
        )
    _watch(model, encoding, activations)
    *before, last = activations.hidden  # the last layer's states are already normalised
    states = [*map(model.network.trunk.norm, before), last]
    names = [model.tokenizer.token(token) for token in encoding.tokens]
    return Lens(names, [_guesses(model, head, state, top, pause) for state in states])


def encode_for_model(model: LoadedModel, text: str, pair: str | None = None) -> Encoding:
    """A text or a pair of texts as the model reads it; one that is too long is refused."""
    causal = model.network.trunk.is_causal
    if causal and pair is not None:
        raise UsageError("This model reads one text at a time: join both into one.")
    encoding = (
        encode_prompt(model.tokenizer, text)
        if causal
        else model.tokenizer.encode_masked(text, pair)
    )
    return require_fit(encoding, model.config.context)


def _watch(model: LoadedModel, encoding: Encoding, activations: Activations) -> None:
    network = model.network
    network.trunk(**model_inputs(network, [encoding]), activations=activations)


def _guesses(
    model: LoadedModel, head: str, states: Tensor, top: int, pause: Callable[[], object]
) -> list[list[LayerGuess]]:
    """One layer's [1, T, D] predictions at each position; padding of the vocabulary is left out."""
    name = model.tokenizer.token
    found = []
    for part in states[0].split(HEAD_TOKENS):
        pause()
        chances = model.network.read(head, part).float().softmax(-1)
        best = chances[:, : model.tokenizer.vocab_size].topk(top)
        for tokens, row in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            found.append(
                [LayerGuess(name(token), chance) for token, chance in zip(tokens, row, strict=True)]
            )
    return found
