"""Feature-based models on a frozen trunk (BERT §5.3): which layers to read and how to combine them.

B batch, T tokens, L layers read, D width.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model.heads import token_mean
from malmoi.model.transformer import Activations, Transformer
from malmoi.settings import Config

# precision of cached states on disk; used in memory as well, so that both agree
STATE_DTYPE = torch.float16


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(Config):
    """How a small model reads the hidden states of a frozen one (BERT §5.3)."""

    layers: tuple[int, ...]  # 0 is the embedding, `depth` the last layer
    weighted: bool = False  # a learned weighted sum of the layers; otherwise they are concatenated
    recurrent: int = 0  # width of the two-layer BiLSTM on top; 0: none
    frozen: bool = True  # the layers below; else they are trained too (BERT table 5)
    normalized: bool = False  # scale each state to unit variance: pre-norm states grow with depth


class LayeredTransformer(Transformer):
    """A trunk that returns the states of several layers [B, T, L, D]; frozen, without dropout.

    Frozen states are rounded exactly as the on-disk cache rounds them, so that a model sees the
    same numbers at inference as in training.
    """

    def __init__(self, c: ModelConfig, f: FeatureConfig) -> None:
        super().__init__(c)
        self.layers = f.layers
        self.frozen = f.frozen
        self.requires_grad_(requires_grad=not f.frozen)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  # torch's signature
        return super().train(mode=mode and not self.frozen)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, *, activations: Activations | None = None, **inputs: Any
    ) -> Tensor:
        seen = activations or Activations()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            last = super().forward(tokens, activations=seen, **inputs)
            states = torch.stack([seen.hidden[layer] for layer in self.layers], dim=2)
            return states.to(STATE_DTYPE).to(last.dtype) if self.frozen else states


class BiLSTM(nn.Module):
    """A two-layer BiLSTM (Hochreiter & Schmidhuber 1997, Graves & Schmidhuber 2005).

    `width` is the output width, half from each direction. Padding is never read, so it cannot
    change the result.
    """

    def __init__(self, inputs: int, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise UsageError(
                "A BiLSTM's width must be even (half per direction), not {width}.", width=width
            )
        self.lstm = nn.LSTM(
            inputs, width // 2, 2, batch_first=True, dropout=dropout, bidirectional=True
        )

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """[B, T, inputs] → [B, T, width]; `keep` [B, T] marks tokens; padding is on the right."""
        if keep is None:
            return cast(Tensor, self.lstm(x)[0])
        packed = pack_padded_sequence(x, keep.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        read, _ = self.lstm(packed)
        return pad_packed_sequence(read, batch_first=True, total_length=x.size(1))[0]

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """U(−1/√h, 1/√h), the usual initialisation of recurrent layers with h units."""
        bound = self.lstm.hidden_size**-0.5
        for weight in self.lstm.parameters():
            weight.uniform_(-bound, bound, generator=generator)


class FeatureReader(nn.Module):
    """Combines the layers, then applies the BiLSTM if any: [B, T, L, D] → [B, T, width]."""

    def __init__(self, c: ModelConfig, f: FeatureConfig) -> None:
        super().__init__()
        joined = c.width if f.weighted else c.width * len(f.layers)
        self.normalized = f.normalized
        self.weights = nn.Parameter(torch.zeros(len(f.layers))) if f.weighted else None
        self.scale = nn.Parameter(torch.ones(1)) if f.weighted else None
        self.recurrent = BiLSTM(joined, f.recurrent, dropout=c.dropout) if f.recurrent else None
        self.width = f.recurrent or joined

    def forward(self, states: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.join(states)
        return x if self.recurrent is None else self.recurrent(x, keep)

    def join(self, states: Tensor) -> Tensor:
        """Concatenates the layers, or γ Σ softmax(w)_l · h_l (Peters et al. 2018 eq. 1)."""
        if self.normalized:
            states = F.layer_norm(states, states.shape[-1:])
        if self.weights is None or self.scale is None:
            return states.flatten(2)
        weights = (self.scale * self.weights.softmax(0)).to(states.dtype)
        return torch.einsum("l,btld->btd", weights, states)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Starts with equal layer weights and γ = 1; the BiLSTM has its own rule."""
        if self.weights is not None and self.scale is not None:
            self.weights.zero_()
            self.scale.fill_(1.0)
        if self.recurrent is not None:
            self.recurrent.reset(generator)


class MeanPooler(nn.Module):
    """The mean of a sequence's tokens, since a frozen [CLS] was not trained to represent it."""

    def forward(
        self, hidden: Tensor, keep: Tensor | None = None, firsts: Tensor | None = None
    ) -> Tensor:
        return token_mean(hidden, keep)
