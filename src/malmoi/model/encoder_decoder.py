"""Trunks that read more than a text: the Transformer of Vaswani et al. 2017, and feature prefixes.

An encoder, and a decoder that attends to its states; or ready-made vectors before the text: images,
sounds, anything that has features. B batch, T target tokens, S source tokens, D width, H heads,
G key/value heads, E head width, P vectors of each row, F their width.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model.attention import LayerInputs, attend, attention_probs
from malmoi.model.attention_mask import Mask
from malmoi.model.embedding import make_norm
from malmoi.model.kv_cache import KVCache
from malmoi.model.transformer import Activations, Block, Transformer


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
        self.encoder = Transformer(
            replace(c, depth=c.encoder_depth, encoder_depth=0, attention=("full",))
        )
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
        kept = self.encoder._kept(None)
        return self.encoder._layers(x, layout, positions, None, kept, activations)

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
            if source is None:
                raise UsageError("This model translates: it needs a source beside the target.")
            states = self.encoder_states(source, source_keep)
            memory = Memory((states,) * self.config.depth, source_keep)
        self._check_length(tokens, None, cache)
        layout, positions = self._layout(tokens, keep, None, None, cache)
        masks = self._masks(layout, tokens.device, None, None)
        cross = activations.cross if isinstance(activations, CrossActivations) else None
        source_inputs = LayerInputs(memory.mask, attention_out=cross)
        seen = [(layer, source_inputs) for layer in memory.layers]
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
            if cache is None or not cache.used:
                raise UsageError("This model needs features: pass them with the text.")
            return super().forward(tokens, keep=keep, cache=cache, activations=activations)
        shape = (self.config.feature_count, self.config.feature_width)
        if features.dim() != 3 or tuple(features.shape[1:]) != shape:
            raise UsageError(
                "These features have the shape {shape}; this model reads {first} vectors of "
                "{shape2} numbers for each text.",
                shape=list(features.shape),
                first=shape[0],
                shape2=shape[1],
            )
        self._check_length(F.pad(tokens, (features.size(1), 0)), None, cache)
        vectors = self.project(features.to(self.project.weight.dtype))
        return self._after_vectors(vectors, tokens, None, keep, cache, activations)
