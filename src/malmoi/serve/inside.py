"""What goes on in a model while it reads: who looks at whom, and what each layer would say.

L layers, H heads, T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malmoi.decode.batch import inputs
from malmoi.errors import UsageError
from malmoi.infer import Model
from malmoi.infer.prompt import encode_prompt
from malmoi.model import Trail
from malmoi.serve.executor import checkpoint
from malmoi.tokenizer import Encoding

MOST = 4_000_000  # numbers of one picture of attention
MAX_GUESSES = 1_000_000  # of one lens
HEAD_TOKENS = 128  # whose scores over the vocabulary are held at once
Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Attention:
    """How much each token looks at each other one."""

    tokens: list[str]
    words: list[int | None]  # the word each token is a piece of; None: no word, such as [CLS]
    segments: list[int]  # 1 for the second text of a pair
    weights: Array  # [L, H, T, T]: a query's row sums to 1, but for what it gives to soft tokens before the text


@dataclass(frozen=True)
class Guess:
    """A token that a layer finds likely at some place."""

    token: str
    probability: float


@dataclass(frozen=True)
class Lens:
    """What each layer would say if it were the last (the logit lens, nostalgebraist 2020)."""

    tokens: list[str]
    guesses: list[list[list[Guess]]]  # [L + 1][T][top]: the embedding first; of a GPT's they are about the next token


@torch.inference_mode()
def attention(model: Model, text: str, pair: str | None = None) -> Attention:
    """The attention of every head while the model reads a text, or a pair of texts."""
    encoding = read(model, text, pair)
    size, c = len(encoding.tokens), model.config
    if c.depth * c.heads * size**2 > MOST:
        most = int((MOST / (c.depth * c.heads)) ** 0.5)
        sentence = f"The text has {size} tokens; the attention of {most} or fewer can be shown of this model."
        raise UsageError(sentence, code="context_length_exceeded")
    trail = Trail(attention=[])
    _watch(model, encoding, trail)
    seen = torch.stack(trail.attention or [])[:, 0, :, -size:, -size:]
    names = [model.tokenizer.token(token) for token in encoding.tokens]
    return Attention(names, encoding.words, encoding.segments, seen.float().cpu().numpy())


@torch.inference_mode()
def lens(model: Model, text: str, top: int = 5) -> Lens:
    """The likeliest tokens at every place by every layer: the final norm and the head on each layer's states."""
    head = next((name for name in ("lm", "mlm") if name in model.network.heads), None)
    if head is None:
        raise UsageError("This model has no head over the vocabulary, so its layers say no words.")
    if not 1 <= top <= model.tokenizer.vocab_size:
        raise UsageError(f"top must be between 1 and {model.tokenizer.vocab_size}, not {top}.")
    encoding, trail = read(model, text), Trail()
    places = MAX_GUESSES // (top * (model.config.depth + 1))
    if len(encoding.tokens) > places:
        sentence = f"The text has {len(encoding.tokens)} tokens; {top} guesses can be shown of {places} or fewer."
        raise UsageError(sentence, code="context_length_exceeded")
    _watch(model, encoding, trail)
    *before, last = trail.hidden  # the last has been through the norm already
    states = [*map(model.network.trunk.norm, before), last]
    names = [model.tokenizer.token(token) for token in encoding.tokens]
    return Lens(names, [_guesses(model, head, state, top) for state in states])


def read(model: Model, text: str, pair: str | None = None) -> Encoding:
    """A text, or a pair of texts, as the model reads it; too long is refused."""
    causal = model.network.trunk.is_causal
    if causal and pair is not None:
        raise UsageError("This model reads one text at a time: write both into one.")
    encoding = encode_prompt(model.tokenizer, text) if causal else model.tokenizer.encode_masked(text, pair)
    size, context = len(encoding.tokens), model.config.context
    if size > context:
        sentence = f"The text has {size} tokens, more than this model's context of {context}; shorten it."
        raise UsageError(sentence, code="context_length_exceeded")
    return encoding


def _watch(model: Model, encoding: Encoding, trail: Trail) -> None:
    network = model.network
    network.trunk(**inputs([encoding], network.config, network.trunk.embed.token.weight.device), trail=trail)


def _guesses(model: Model, head: str, states: Tensor, top: int) -> list[list[Guess]]:
    """What one layer [1, T, D] says at each place; what pads the vocabulary is no token."""
    name, found = model.tokenizer.token, []
    for part in states[0].split(HEAD_TOKENS):
        checkpoint()
        chances = model.network.read(head, part).float().softmax(-1)
        best = chances[:, : model.tokenizer.vocab_size].topk(top)
        for tokens, row in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            found.append([Guess(name(token), chance) for token, chance in zip(tokens, row, strict=True)])
    return found
