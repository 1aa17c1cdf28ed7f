"""Position schemes: how a model knows where its tokens are, one record for each."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from malmoi.config import ModelConfig
from malmoi.model.attention import Attention
from malmoi.model.position_tables import Sinusoid


def _no_embedding(c: ModelConfig) -> nn.Module | None:
    return None


@dataclass(frozen=True)
class PositionScheme:
    """The parts of a model that depend on positions; by default, none does."""

    # positions [B, T] → vectors that are added to those of the tokens
    embedding: Callable[[ModelConfig], nn.Module | None] = _no_embedding
    attention: Callable[[ModelConfig], Attention] = Attention
    rotary: bool = False  # whether queries and keys are rotated


def learned(c: ModelConfig) -> nn.Module:
    """A vector for each position, as BERT and GPT have it."""
    return nn.Embedding(c.context + c.position_offset, c.token_width)


def sinusoidal(c: ModelConfig) -> nn.Module:
    return Sinusoid(c.context, c.token_width, halves=c.positions == "sinusoidal_halves")


def relative(c: ModelConfig) -> Attention:
    from malmoi.model.relative import RelativeAttention

    return RelativeAttention(c)


POSITIONS = {
    "learned": PositionScheme(learned),
    "sinusoidal": PositionScheme(sinusoidal),
    "sinusoidal_halves": PositionScheme(sinusoidal),
    "rotary": PositionScheme(rotary=True),
    "relative": PositionScheme(attention=relative),
    "none": PositionScheme(),
}
