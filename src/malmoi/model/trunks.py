"""Trunks that read or return more than a text: encoder and decoder, feature prefixes, layers.

Feature-based models read layers of a frozen trunk (BERT §5.3). B batch, T target and S source
tokens, D width, H heads, G key/value heads, E head width, P vectors of each row, F their width,
L layers read.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from malmoi.config import ModelConfig
from malmoi.errors import require_that, required
from malmoi.model.attention import LayerInputs, attend, attention_probs
from malmoi.model.attention_mask import Mask
from malmoi.model.elementwise import make_norm
from malmoi.model.kv_cache import KVCache
from malmoi.model.transformer import Activations, Block, Transformer
from malmoi.settings import Config


@dataclass
class CrossActivations(Activations):
    """Activations that also include the cross-attention, if requested."""

    cross: list[Tensor] = field(default_factory=list)  # one [B, H, T, S] per layer


@dataclass(frozen=True)
class Memory:
    """A batch of sources as every decoder layer sees them.

    For decoding that is keys and values, computed once; in training each block computes its own
    from the encoder's states, because sharded weights (FSDP) are only there inside their block.
    """

    # keys and values [B, G, S, E] of each layer, or the encoder's states [B, S, D]
    layers: tuple[tuple[Tensor, Tensor] | Tensor, ...]
    keep: Tensor | None = None  # [B, S]: source tokens that are not padding

    @property
    def mask(self) -> Mask:
        """Every target token sees the whole source, without its padding."""
        return Mask() if self.keep is None else Mask(dense=self.keep[:, None, None])

    def rows(self, rows: Tensor) -> "Memory":
        """The memory of these rows, in this order; a row may be repeated."""
        layers = tuple((each[0][rows], each[1][rows]) for each in self.layers)
        return Memory(layers, None if self.keep is None else self.keep[rows])


class CrossAttention(nn.Module):
    """Attention whose keys and values are another sequence's (Vaswani et al. 2017 §3.2.3)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.size = c.size_per_head
        self.dropout = c.attention_dropout
        self.query = nn.Linear(c.width, c.heads * self.size, bias=c.bias)
        self.key_value = nn.Linear(c.width, 2 * c.key_heads * self.size, bias=c.bias)
        self.out = nn.Linear(c.heads * self.size, c.width, bias=c.bias)

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's states [B, S, D] as this layer sees them."""
        k, v = self.key_value(states).unflatten(-1, (2, -1, self.size)).unbind(2)
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, seen: tuple[Tensor, Tensor] | Tensor, inputs: LayerInputs
    ) -> Tensor:
        k, v = self.keys_and_values(seen) if isinstance(seen, Tensor) else seen
        q = self.query(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        if inputs.attention_out is not None:
            inputs.attention_out.append(attention_probs(q, k, inputs.mask))
        y = attend(q, k, v, inputs.mask, self.dropout if self.training else 0.0)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class DecoderBlock(Block):
    """A block with attention to the source between its self-attention and its MLP."""

    def __init__(self, c: ModelConfig, *, first: bool = False) -> None:
        super().__init__(c, first=first)
        self.cross = CrossAttention(c)
        self.cross_norm = make_norm(c)

    def forward(self, x: Tensor, inputs: LayerInputs, *source: Any) -> Tensor:
        """A layer; `source` is what `CrossAttention` takes after x."""
        x = self.attention(x, inputs)
        x = self.residual(x, self.cross_norm, lambda y: self.drop(self.cross(y, *source)))
        return self.transform(x)


class EncoderDecoder(Transformer):
    """source [B, S] and target [B, T] → hidden states [B, T, D]; itself the decoder.

    The encoder shares the decoder's embeddings (§3.4) and has the same blocks with full attention.
    """

    block_class = DecoderBlock

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        encoder = replace(c, depth=c.encoder_depth, encoder_depth=0, attention=("full",))
        self.encoder = Transformer(encoder)
        self.encoder.embed = nn.Identity()  # type: ignore[assignment]

    def encode(
        self, source: Tensor, keep: Tensor | None = None, activations: Activations | None = None
    ) -> Memory:
        """Reads the sources; the result serves any number of decoding steps."""
        states = self.encoder_states(source, keep, activations)
        blocks = cast("list[DecoderBlock]", self.blocks)
        return Memory(tuple(block.cross.keys_and_values(states) for block in blocks), keep)

    def encoder_states(
        self, source: Tensor, keep: Tensor | None = None, activations: Activations | None = None
    ) -> Tensor:
        """The encoder's hidden states [B, S, D]."""
        self._check_length(source, None, None)
        layout, positions = self.encoder._layout(source, keep, None, None, None)
        x = self.embed(source, positions, None)
        return self.encoder._layers(
            x, layout, positions, None, self.encoder._kept(None), activations
        )

    def forward(  # type: ignore[override]  # noqa: PLR0913  # the tensors of a batch, by their names
        self,
        tokens: Tensor,
        source: Tensor | None = None,
        source_keep: Tensor | None = None,
        keep: Tensor | None = None,
        memory: Memory | None = None,
        cache: KVCache | None = None,
        activations: Activations | None = None,
    ) -> Tensor:
        """Hidden states of the target `tokens`, given a `source` or its `memory`."""
        if memory is None:
            translates = "This model translates: it needs a source beside the target."
            states = self.encoder_states(required(source, translates), source_keep)
            memory = Memory((states,) * self.config.depth, source_keep)
        self._check_length(tokens, None, cache)
        layout, positions = self._layout(tokens, keep, None, None, cache)
        masks = self._masks(layout, tokens.device, None, None)
        cross = activations.cross if isinstance(activations, CrossActivations) else None
        seen = [(layer, LayerInputs(memory.mask, attention_out=cross)) for layer in memory.layers]
        inputs = (masks, self._rotary(positions), self._kept(cache), activations, seen)
        return self.run_blocks(self.embed(tokens, positions, None), *inputs)


class FeaturePrefix(Transformer):
    """features [B, P, F] and tokens [B, T] → hidden states of the tokens [B, T, D].

    All of a row sees its vectors; the text sees what comes before: the pattern `causal | prefix:P`.
    """

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.project = nn.Linear(c.feature_width, c.token_width)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        features: Tensor | None = None,
        keep: Tensor | None = None,
        cache: KVCache | None = None,
        activations: Activations | None = None,
    ) -> Tensor:
        """Hidden states of the text; with a cache whose rows have their features, of more text."""
        if features is None:
            require_that(
                cache is not None and cache.used,
                "This model needs features: pass them with the text.",
            )
            return super().forward(tokens, keep=keep, cache=cache, activations=activations)
        read = [self.config.feature_count, self.config.feature_width]
        require_that(
            [*features.shape[1:]] == read,
            "Features have the shape {shape}; this model reads {n} vectors of {size} numbers.",
            shape=[*features.shape],
            n=read[0],
            size=read[1],
        )
        self._check_length(F.pad(tokens, (features.size(1), 0)), None, cache)
        vectors = self.project(features.to(self.project.weight.dtype))
        return self._after_vectors(vectors, tokens, None, keep, cache, activations)


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
    """A two-layer BiLSTM (Graves & Schmidhuber 2005), half of `width` each; never reads padding."""

    def __init__(self, inputs: int, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        require_that(
            width >= 2 and width % 2 == 0,
            "A BiLSTM's width must be even (half per direction), not {width}.",
            width=width,
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
