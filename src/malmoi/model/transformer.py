"""The Transformer (Vaswani et al. 2017), once for every paper: embeddings, blocks, final norm; no head, no loss.

B batch, T tokens, K keys, D width, V vocabulary. What differs between families is in `ModelConfig`, never in a class.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model.attention import Attention, Bounds, KVCache, Mask, prepare
from malmoi.model.patterns import Layout, parse
from malmoi.model.rotary import rotary_table

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # exact, with erf: BERT
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-1, GPT-2
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021
    "tanh": torch.tanh,
}


def make_norm(c: ModelConfig, width: int = 0) -> nn.Module:
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[c.norm_kind]
    return kind(width or c.width, c.eps)


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[c.activation]
        self.up = nn.Linear(c.width, c.mlp_width, bias=c.bias)
        self.down = nn.Linear(c.mlp_width, c.width, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(c.width, 2 * c.mlp_width, bias=c.bias)
        self.down = nn.Linear(c.mlp_width, c.width, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


Branch = Callable[[Tensor], Tensor]


def pre_norm(x: Tensor, norm: nn.Module, branch: Branch) -> Tensor:
    """GPT-2: x + f(LN(x))."""
    return x + branch(norm(x))


def post_norm(x: Tensor, norm: nn.Module, branch: Branch) -> Tensor:
    """Vaswani et al., BERT, GPT-1: LN(x + f(x))."""
    return norm(x + branch(x))


RESIDUAL = {"pre": pre_norm, "post": post_norm}


@dataclass
class Trail:
    """What a curious caller wants to see of a pass: hidden states of every layer, and the attention if asked for."""

    hidden: list[Tensor] = field(default_factory=list)  # the embedding, then each layer: depth + 1 of [B, T, D]
    attention: list[Tensor] | None = None  # [B, H, T, K] of each layer


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.residual = RESIDUAL[c.norm]
        self.attend, self.attend_norm = Attention(c), make_norm(c)
        self.mlp: nn.Module = GatedMLP(c) if c.activation == "swiglu" else MLP(c)
        self.mlp_norm = make_norm(c)
        self.drop = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        turn: Tensor | None = None,
        cache: tuple[KVCache, int] | None = None,
        look: list[Tensor] | None = None,
    ) -> Tensor:
        x = self.residual(x, self.attend_norm, lambda y: self.drop(self.attend(y, mask, turn, cache, look)))
        return self.residual(x, self.mlp_norm, lambda y: self.drop(self.mlp(y)))


class Sinusoid(nn.Module):
    """Vaswani et al. 2017 §3.5: PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(…). Nothing to learn."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        even = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
        angle = torch.arange(context, dtype=torch.float32, device="cpu")[:, None] / 10_000 ** (even / width)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, cast(Tensor, self.table))


def make_position(c: ModelConfig) -> nn.Module | None:
    if c.positions == "learned":
        return nn.Embedding(c.context, c.token_width)
    return Sinusoid(c.context, c.token_width) if c.positions == "sinusoidal" else None


class Embedding(nn.Module):
    """Token + position + segment (BERT figure 2), normed where the family does, projected where E ≠ D (ALBERT)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.token_width)
        self.position = make_position(c)
        self.segment = nn.Embedding(c.segments, c.token_width) if c.segments else None
        self.norm = make_norm(c, c.token_width) if c.embed_norm else nn.Identity()
        self.drop = nn.Dropout(c.dropout)
        self.project = nn.Linear(c.token_width, c.width) if c.token_width != c.width else nn.Identity()

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        x = self.token(tokens)
        if self.segment is not None:
            x = x + (self.segment.weight[0] if segments is None else self.segment(segments))
        if self.position is not None:
            x = x + self.position(positions)
        return self.project(self.drop(self.norm(x)))


class Transformer(nn.Module):
    """tokens [B, T] → hidden states [B, T, D]."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.patterns = [parse(text, c.heads) for text in c.attention]
        self.embed = Embedding(c)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.distinct))
        self.norm = make_norm(c) if c.final_norm else nn.Identity()
        self.rematerialise = False  # gradient checkpointing: trade a second forward pass for memory
        if c.positions == "rotary":
            self.register_buffer("turns", rotary_table(c), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        bounds: Bounds | None = None,
        cache: KVCache | None = None,
        trail: Trail | None = None,
    ) -> Tensor:
        """Hidden states of `tokens`. `keep` [B, T] marks tokens that are not padding (left or right); `documents`
        and `bounds` say what a packed row holds; a `cache` makes `tokens` continue what it has seen."""
        self._check_length(tokens, positions, cache)
        layout, positions = self._layout(tokens, keep, positions, documents, cache)
        dropout = self.config.attention_dropout if self.training else 0.0
        masks = [prepare(p, layout, tokens.device, bounds, dropout) for p in self.patterns]
        turn = self._turn(positions)
        x = self.embed(tokens, positions, segments)
        if trail:
            trail.hidden.append(x)
        for i in range(self.config.depth):
            x = self._block(i, x, masks[i % len(masks)], turn, cache, trail)
        x = self.norm(x)
        if trail:
            trail.hidden[-1] = x
        return x

    def _block(
        self, i: int, x: Tensor, mask: Mask, turn: Tensor | None, cache: KVCache | None, trail: Trail | None
    ) -> Tensor:
        block = self.blocks[i * self.config.distinct // self.config.depth]
        if self.rematerialise and self.training:
            return cast(Tensor, checkpoint(block, x, mask, turn, use_reentrant=False))
        x = block(x, mask, turn, None if cache is None else (cache, i), trail and trail.attention)
        if trail:
            trail.hidden.append(x)
        return x

    def _layout(
        self,
        tokens: Tensor,
        keep: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Layout, Tensor]:
        """Where every query and key stands, and the positions to embed [B or 1, T]."""
        B, T = tokens.shape
        past = cache.used if cache is not None else 0
        moved = positions is not None or keep is not None or (cache is not None and cache.padded)
        where = self._positions(tokens, keep, past, cache) if positions is None else positions
        if cache is not None:
            cache.grow(where.expand(B, T), keep)
        if not moved:
            return Layout(B, T, past + T, past, query_documents=documents, key_documents=documents), where
        where = where.expand(B, T)
        if cache is None:
            return Layout(B, T, T, 0, where, where, keep, documents, documents), where
        kept = cache.keep[:, : cache.used] if cache.padded else None
        return Layout(B, T, cache.used, 0, where, cache.positions[:, : cache.used], kept), where

    def _positions(self, tokens: Tensor, keep: Tensor | None, past: int, cache: KVCache | None) -> Tensor:
        """Positions count from the first token that is not padding, and go on where the cache ended."""
        steps = torch.arange(tokens.size(1), device=tokens.device)[None]
        if cache is not None and past and cache.padded:
            last = cache.positions[:, :past].masked_fill(~cache.keep[:, :past], -1).amax(1, keepdim=True)
            return last + 1 + steps
        if keep is None or past:
            return past + steps
        return (steps - keep.int().argmax(1, keepdim=True)).clamp(min=0)

    def _turn(self, positions: Tensor) -> Tensor | None:
        return cast(Tensor, self.turns)[:, positions][:, :, None] if self.config.positions == "rotary" else None

    def _check_length(self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None) -> None:
        length = tokens.size(1) + (cache.used if cache is not None else 0)
        if length > self.config.context and positions is None and self.config.positions != "none":
            raise UsageError(f"{length} tokens are more than this model's context of {self.config.context}.")
