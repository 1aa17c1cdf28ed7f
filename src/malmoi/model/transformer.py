"""The Transformer (Vaswani et al. 2017) of every family: embeddings, blocks, final norm; no heads.

B batch, T tokens, K keys, D width, V vocabulary. What differs between families is in `ModelConfig`,
never in a class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.model.attention import Attention, LayerInputs, any_shape, products
from malmoi.model.attention_mask import Bounds, Mask, build_mask
from malmoi.model.elementwise import ACTIVATIONS, Dropout, make_norm
from malmoi.model.kv_cache import FusedDecodeCache, KVCache, KVRecorder, LayerCache, PrefixKV
from malmoi.model.patterns import Layout, parse_pattern
from malmoi.model.positions import POSITIONS, compiles_for_gpu, rotary_table


class Duplicate(nn.Module):
    """The same vector for each direction: [B, T, E] → [B, T, 2E]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)


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
        self.drop = Dropout(c.dropout)
        wider = nn.Linear(c.token_width, c.width) if c.token_width != c.width else nn.Identity()
        self.project = Duplicate() if c.mixer == "bilstm" else wider

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


class MLP(nn.Module):
    """down(f(up(x))), at every position alike (Vaswani et al. 2017 §3.3)."""

    products = 1  # of the input

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[c.activation]
        self.up = nn.Linear(c.width, self.products * c.mlp_width, bias=c.bias)
        self.down = nn.Linear(c.mlp_width, c.width, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.activate(self.up(x))))


class GatedMLP(MLP):
    """SwiGLU and GeGLU (Shazeer 2020): down(f(gate(x)) · up(x)), gate and up in one `up`."""

    products = 2

    def forward(self, x: Tensor) -> Tensor:
        gate, up = products(self.up, x, (1, 1))
        return cast(Tensor, self.down(self.activate(gate) * up))


KEPT = (
    *("mm", "addmm", "bmm", "_flash_attention_forward", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_flash_attention_for_cpu",
)
FusedBlocks = Callable[["Transformer", Tensor, Layout, Tensor], Tensor | None]


def widened(x: Tensor) -> Tensor:
    """What a norm reads: its weights are fp32, and a fused kernel writes nothing in between."""
    return x.float() if x.dtype.itemsize < 4 and compiles_for_gpu(x) else x


def pre_norm(x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """GPT-2: x + f(LN(x))."""
    return x + branch(norm(widened(x)))


def post_norm(x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """Vaswani et al., BERT, GPT-1: LN(x + f(x))."""
    return cast(Tensor, norm(widened(x + branch(x))).to(x.dtype))


RESIDUALS = {"pre": pre_norm, "post": post_norm}


@dataclass
class Activations:
    """Hidden states of every layer in a forward pass, and attention if requested."""

    # the embedding, then each layer: depth + 1 tensors [B, T, D]
    hidden: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] | None = None  # one [B, H, T, K] per layer
    blocks: list[Tensor] = field(default_factory=list)  # as `hidden`, the last before its norm
    begun: Sequence[Tensor] = ()  # the first `blocks` of an earlier pass, not computed again


class EmbeddingResidual(nn.Module):
    """Feeds the embedding into each block's input and values (cf. Zhou et al. 2024)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.value = nn.Linear(c.width, c.key_heads * c.size_per_head, bias=False)
        self.shares = nn.Parameter(torch.empty(3))  # of x, the embedding, and its projection
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Starts without any contribution of the embedding."""
        self.shares.zero_()
        self.shares[0] = 1

    def forward(self, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        stream, again, values = self.shares.to(x.dtype).unbind()
        return stream * x + again * embedded, values * self.value(embedded)


class SkipConnections(nn.Module):
    """U-Net skips: layer i feeds layer depth − 1 − i (Ronneberger et al. 2015)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.shares = nn.Parameter(torch.empty(depth // 2))
        self.reset()

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        self.shares.fill_(0.5)

    def forward(self, layer: int, x: Tensor, states: list[Tensor]) -> Tensor:
        """The input of a layer; `states` are the embedding, then each layer's output so far."""
        mirrored = self.depth - 1 - layer
        if mirrored >= self.depth // 2:
            return x
        return x + self.shares[mirrored].to(x.dtype) * states[mirrored + 1]


class Block(nn.Module):
    """A layer: attention and an MLP, each with its norm and residual."""

    def __init__(self, c: ModelConfig, *, first: bool = False) -> None:
        super().__init__()
        self.again = EmbeddingResidual(c) if c.embedding_residual else None
        self.residual = RESIDUALS[c.norm]
        self.attend = cast(Attention, (POSITIONS[c.positions].attention or Attention)(c))
        self.attend_norm = nn.Identity() if first and not c.first_norm else make_norm(c)
        self.mlp: nn.Module = GatedMLP(c) if c.gated else MLP(c)
        self.mlp_norm = make_norm(c)
        self.drop = Dropout(c.dropout)

    def forward(self, x: Tensor, inputs: LayerInputs, embedded: Tensor | None = None) -> Tensor:
        return self.transform(self.attention(x, inputs, embedded))

    def attention(self, x: Tensor, inputs: LayerInputs, embedded: Tensor | None = None) -> Tensor:
        """The first half of a block: self-attention with its residual."""
        values = None
        if self.again is not None and embedded is not None:
            x, values = self.again(x, embedded)
        attend = self.attend
        return self.residual(x, self.attend_norm, lambda y: self.drop(attend(y, inputs, values)))

    @property
    def linears(self) -> list[nn.Module]:
        """The products of a block, in their order."""
        mlp = cast(MLP, self.mlp)
        return [self.attend.qkv, self.attend.out, mlp.up, mlp.down]

    def is_plain(self, linear: type[nn.Module], norms: tuple[type[nn.Module], ...]) -> bool:
        """Whether a fused kernel for such parts may stand for it: nothing is tapped or adapted."""
        return (
            type(self) is Block
            and type(self.attend) is Attention
            and type(self.mlp) in (MLP, GatedMLP)
            and all(type(one) is linear for one in self.linears)
            and all(type(norm) in norms for norm in (self.attend_norm, self.mlp_norm))
        )

    def transform(self, x: Tensor) -> Tensor:
        """The last part of a block: the MLP with its residual."""
        return self.residual(x, self.mlp_norm, lambda y: self.drop(self.mlp(y)))


def _keep_products() -> Any:
    """Selective checkpointing: products and attention are kept, what is cheap is computed again."""
    return create_selective_checkpoint_contexts([getattr(torch.ops.aten, n).default for n in KEPT])


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook wants what this module computes; those before a block only pass time."""
    before = None if isinstance(module, Block) else module._forward_pre_hooks
    return bool(module._forward_hooks or before)


class Transformer(nn.Module):
    """tokens [B, T] → hidden states [B, T, D]."""

    block_class = Block

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.patterns = [parse_pattern(text, c.heads) for text in c.attention]
        self.embed = Embedding(c)
        block: type[nn.Module] = self.block_class
        if c.is_lstm:
            from malmoi.model.recurrent import LSTMBlock as block
        self.blocks = nn.ModuleList(block(c, first=i == 0) for i in range(c.distinct))
        first = self.blocks[0]
        self.needs_distances = isinstance(first, Block) and first.attend.needs_distances
        self.skips = SkipConnections(c.depth) if c.skip_connections else None
        self.norm = make_norm(c) if c.final_norm else nn.Identity()
        self.soft_prompt: nn.Parameter | None = None  # [n, E]: vectors before every text
        self.prefix_kv: nn.Parameter | None = None  # [depth, 2, G, n, E]: prefix tuning
        self.gradient_checkpointing = False  # trades a second forward pass for memory
        self.checkpointing_keeps = "inputs"
        # of what is between the blocks in training: half the memory traffic in bf16 (docs/lab.md)
        self.stream: torch.dtype | None = None
        # `run_blocks` as training compiled it; decoding has other shapes and never uses it
        self.compiled_blocks: Callable[..., Tensor] | None = None
        # all blocks of whole texts as one call, where the weights are quantised
        self.fused_blocks: FusedBlocks | None = None
        # rotary tables follow the patterns it was trained with, also in a view with other masks
        self.local_layers = [pattern.is_local for pattern in self.patterns]
        rotary = POSITIONS[c.positions].rotary
        self.register_buffer("rotary", rotary_table(c) if rotary else None, persistent=False)
        local = replace(c, rotary_base=c.local_rotary_base or c.rotary_base, rotary_scaling="")
        table = rotary_table(local) if rotary and c.local_rotary_base else None
        self.register_buffer("local_rotary", table, persistent=False)

    def forward(  # noqa: PLR0913  # the tensors of a batch, by the names that batches have
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        bounds: Bounds | None = None,
        cache: KVCache | None = None,
        activations: Activations | None = None,
    ) -> Tensor:
        """Hidden states of `tokens`.

        `keep` [B, T] marks tokens that are not padding (left or right); `documents` and `bounds`
        describe packed rows; with a `cache`, `tokens` continue the sequences in it.
        """
        self._check_length(tokens, positions, cache)
        if self.soft_prompt is not None and not self.is_causal:
            require_that(
                positions is None and documents is None and cache is None,
                "Soft tokens of a BERT need one padded text per row.",
            )
            soft = self.soft_prompt.expand(len(tokens), -1, -1)
            hidden = self._after_vectors(soft, tokens, segments, keep, activations=activations)
            if activations:
                for states in (activations.hidden, activations.blocks):
                    states[:] = [state[:, soft.size(1) :] for state in states]
            return hidden
        require_that(
            self.config.mixer == "attention" or (documents is None and bounds is None),
            "Recurrent models read no packed documents: set data.packed=false.",
        )
        layout, positions = self._layout(tokens, keep, positions, documents, cache)
        layout = replace(layout, tokens=keep)
        prefix = self.prefix_kv if self.soft_prompt is None else self.prompt_kv(self.soft_prompt)
        kept = self._kept(cache)
        if prefix is not None:
            layout = layout.with_prefix(prefix.size(3))
            positions = positions + prefix.size(3)
            kept = [(PrefixKV(*pair), 0) for pair in zip(prefix, kept, strict=True)]
        x = self.embed(tokens, positions, segments)
        return self._layers(x, layout, positions, bounds, kept, activations)

    def prompt_kv(self, vectors: Tensor) -> Tensor:
        """Keys and values of vectors [n, E] in every layer: [depth, 2, G, n, E]."""
        n = len(vectors)
        record = KVRecorder()
        where = torch.arange(n, device=vectors.device)[None]
        kept: list[LayerCache] = [(record, i) for i in range(self.config.depth)]
        x = self.embed.place(vectors[None], where, None)
        self._layers(x, Layout(1, n, n), where, None, kept, None)
        return torch.stack(record.layers)

    def _after_vectors(
        self,
        vectors: Tensor,
        tokens: Tensor,
        segments: Tensor | None,
        keep: Tensor | None,
        cache: KVCache | None = None,
        activations: Activations | None = None,
    ) -> Tensor:
        """Hidden states of the tokens, with vectors [B, n, E] before them as part of the row."""
        n = vectors.size(1)
        wide = F.pad(tokens, (n, 0))
        segments = None if segments is None else F.pad(segments, (n, 0))
        keep = None if keep is None else F.pad(keep, (n, 0), value=True)
        layout, positions = self._layout(wide, keep, None, None, cache)
        x = self.embed.place(torch.cat((vectors, self.embed.token(tokens)), 1), positions, segments)
        return self._layers(x, layout, positions, None, self._kept(cache), activations)[:, n:]

    def _kept(self, cache: KVCache | None) -> list[LayerCache]:
        return [None if cache is None else (cache, i) for i in range(self.config.depth)]

    def _layers(
        self,
        x: Tensor,
        layout: Layout,
        positions: Tensor,
        bounds: Bounds | None,
        kept: Sequence[LayerCache],
        activations: Activations | None,
    ) -> Tensor:
        """Runs embedded tokens [B, T, D] through every block."""
        if self.fused_blocks is not None and kept[0] is None and activations is None:
            fused = self.fused_blocks(self, x, layout, positions)
            if fused is not None:
                return fused
        x = x.to(self.stream) if self.stream and self.training else x
        masks = self._masks(layout, x.device, bounds, kept[0])
        rotary = self._rotary(positions)
        if self.compiled_blocks is not None and kept[0] is None and activations is None:
            return self.compiled_blocks(x, masks, rotary)
        with any_shape(x.device):
            return self.run_blocks(x, masks, rotary, kept, activations)

    def run_blocks(
        self,
        x: Tensor,
        masks: Sequence[Mask],
        rotary: Sequence[Tensor | None],
        kept: Sequence[LayerCache] | None = None,
        activations: Activations | None = None,
        seen: Sequence[tuple[Any, ...]] | None = None,
    ) -> Tensor:
        """Runs every block and the final norm; `seen` is what a decoder's layers read besides."""
        attention_out = activations.attention if activations else None
        states = list(activations.begun) if activations and activations.begun else [x]
        # not the tensor that every block reads: the first one would be compiled apart
        x = states[-1].clone() if self.stream and self.training else states[-1]
        for i in range(len(states) - 1, self.config.depth):
            if self.skips is not None:
                x = self.skips(i, x, states)
            cache = None if kept is None else kept[i]
            angles = rotary[i % len(rotary)]
            inputs = LayerInputs(masks[i % len(masks)], angles, cache, attention_out)
            x = self._block(i, x, inputs, *((states[0],) if seen is None else seen[i]))
            if activations or self.skips is not None:
                states.append(x)
        x = self.norm(x.float() if self.stream and self.training else x)
        if activations:
            activations.hidden += [*states[:-1], x]
            activations.blocks += states
        return x

    def _masks(
        self, layout: Layout, device: torch.device, bounds: Bounds | None, kept: LayerCache
    ) -> list[Mask]:
        if kept is not None and isinstance(kept[0], FusedDecodeCache):
            return [Mask()]
        if self.config.mixer != "attention":
            return [Mask(tokens=layout.tokens)]
        dropout = self.config.attention_dropout if self.training else 0.0
        masks = []
        for layer, pattern in enumerate(self.patterns):
            here = layout
            if kept is not None and isinstance(kept[0], KVCache):
                here = kept[0].layout(layer, layout)  # it may hold the newest keys only
            if self.needs_distances:
                mask = Mask.of(pattern.mask(here, device))
                masks.append(replace(mask, distances=here.distances(device)))
            else:
                masks.append(build_mask(pattern, here, device, bounds, dropout))
        return masks

    def _block(self, i: int, *inputs: Any) -> Tensor:
        block = self.blocks[i * self.config.distinct // self.config.depth]
        if self.gradient_checkpointing and self.training:
            products = self.checkpointing_keeps != "inputs"
            kept: Any = {"context_fn": _keep_products} if products else {}
            return cast(Tensor, checkpoint(block, *inputs, use_reentrant=False, **kept))
        return cast(Tensor, block(*inputs))

    def _layout(
        self,
        tokens: Tensor,
        keep: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Layout, Tensor]:
        """The layout of queries and keys, and the positions to embed [B or 1, T]."""
        B, T = tokens.shape
        past = cache.used if cache is not None else 0
        moved = positions is not None or keep is not None or (cache is not None and cache.padded)
        where = self._positions(tokens, keep, past, cache) if positions is None else positions
        if cache is not None:
            cache.grow(where.expand(B, T), keep)
        plain = Layout(B, T, past + T, past, query_documents=documents, key_documents=documents)
        if not moved:
            return plain, where
        where = where.expand(B, T)
        if cache is None:
            return replace(plain, query_positions=where, key_positions=where, keep=keep), where
        known = cache.positions[:, : cache.used]
        kept = cache.keep[:, : cache.used] if cache.padded else None
        held = Layout(B, T, cache.used, query_positions=where, key_positions=known, keep=kept)
        return held, where

    def _positions(
        self, tokens: Tensor, keep: Tensor | None, past: int, cache: KVCache | None
    ) -> Tensor:
        """Counts positions from the first token that is not padding, continuing after the cache."""
        steps = torch.arange(tokens.size(1), device=tokens.device)[None]
        if cache is not None and past and cache.padded:
            held = cache.positions[:, :past].masked_fill(~cache.keep[:, :past], -1)
            return held.amax(1, keepdim=True) + 1 + steps
        if keep is None or past:
            return past + steps
        return (steps - keep.int().argmax(1, keepdim=True)).clamp(min=0)

    def is_plain(self, linear: type[nn.Module], norms: tuple[type[nn.Module], ...]) -> bool:
        """Whether fused kernels for such parts may stand for its blocks."""
        blocks = (isinstance(one, Block) and one.is_plain(linear, norms) for one in self.blocks)
        plain = type(self) is Transformer and not self.training and all(blocks)
        return plain and not any(map(_is_watched, self.modules()))

    @property
    def is_watched(self) -> bool:
        """Whether a hook sees the output of the trunk or of a block, or what the trunk is given."""
        return any(map(_is_watched, (self, *self.blocks)))

    @property
    def has_soft_tokens(self) -> bool:
        return self.soft_prompt is not None or self.prefix_kv is not None

    @cached_property
    def is_causal(self) -> bool:
        """Whether no layer lets a token see a later one."""
        return all(pattern.is_causal for pattern in self.patterns)

    def _rotary(self, positions: Tensor) -> list[Tensor | None]:
        """cos and sin at these positions by pattern; windowed patterns may have their own base."""
        if self.rotary is None:
            return [None]
        wide = cast(Tensor, self.rotary)[:, positions][:, :, None]
        if self.local_rotary is None:
            return [wide]
        near = cast(Tensor, self.local_rotary)[:, positions][:, :, None]
        return [near if is_local else wide for is_local in self.local_layers]

    def _check_length(
        self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None
    ) -> None:
        length = tokens.size(1) + (cache.used if cache is not None else 0)
        c = self.config
        require_that(
            length <= c.max_length or positions is not None or c.positions == "none",
            "{length} tokens are more than this model's context of {context}.",
            length=length,
            context=c.context,
        )
