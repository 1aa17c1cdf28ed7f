"""Embeddings: token, position and segment in one vector; and the norms.

B batch, T tokens, D width, E width of an embedding.
"""

from typing import cast

import torch
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.model.positions import POSITIONS


def make_norm(c: ModelConfig, width: int = 0) -> nn.Module:
    if c.norm_kind == "rms":
        return nn.RMSNorm(width or c.width, c.eps)
    return nn.LayerNorm(width or c.width, c.eps, bias=c.norm_bias)


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
        embed_positions = POSITIONS[c.positions].embedding
        self.position = None if embed_positions is None else embed_positions(c)
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
