"""Embeddings: token, position and segment in one vector; and the norms.

B batch, T tokens, D width, E width of an embedding.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig


def make_norm(c: ModelConfig, width: int = 0) -> nn.Module:
    if c.norm_kind == "rms":
        return nn.RMSNorm(width or c.width, c.eps)
    return nn.LayerNorm(width or c.width, c.eps, bias=c.norm_bias)


def sinusoid_table(
    positions: int, width: int, *, halves: bool = False, device: torch.device | str = "cpu"
) -> Tensor:
    """Vaswani et al. 2017 §3.5: PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(…).

    With `halves` the same columns in another order: the sines first, then the cosines.
    """
    even = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] / 10_000 ** (
        even / width
    )
    return torch.stack((angle.sin(), angle.cos()), dim=1 if halves else -1).flatten(1)[:, :width]


class Sinusoid(nn.Module):
    """A table of sinusoids in the place of learned positions."""

    def __init__(self, context: int, width: int, *, halves: bool = False) -> None:
        super().__init__()
        table = sinusoid_table(context, width, halves=halves)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, cast(Tensor, self.table))


def make_position(c: ModelConfig) -> nn.Module | None:
    if c.positions == "learned":
        return nn.Embedding(c.context + c.position_offset, c.token_width)
    if not c.positions.startswith("sinusoidal"):
        return None
    return Sinusoid(c.context, c.token_width, halves=c.positions == "sinusoidal_halves")


class Duplicate(nn.Module):
    """The same vector for each direction: [B, T, E] → [B, T, 2E]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)


def make_projection(c: ModelConfig) -> nn.Module:
    if c.mixer == "bilstm":
        return Duplicate()
    return nn.Linear(c.token_width, c.width) if c.token_width != c.width else nn.Identity()


class Embedding(nn.Module):
    """Token + position + segment (BERT figure 2), then an optional norm or projection (ALBERT)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.token_width)
        self.position = make_position(c)
        self.position_offset = c.position_offset
        self.scale = c.width**0.5 if c.embed_scale else 1.0
        self.segment = nn.Embedding(c.segments, c.token_width) if c.segments else None
        self.norm = make_norm(c, c.token_width) if c.embed_norm else nn.Identity()
        self.drop = nn.Dropout(c.dropout)
        self.project = make_projection(c)

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        x = self.token(tokens)
        return self.place(x * self.scale if self.scale != 1 else x, positions, segments)

    def place(self, x: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """Adds position and segment embeddings to vectors [B, T, E], which need not be tokens'."""
        if self.segment is not None:
            # RoBERTa has one segment, but a BERT tokenizer (klue/roberta) still emits 0 and 1
            one = segments is None or len(self.segment.weight) == 1
            x = x + (self.segment.weight[0] if one else self.segment(segments))
        if self.position is not None:
            x = x + self.position(positions + self.position_offset)
        return cast(Tensor, self.project(self.drop(self.norm(x))))
