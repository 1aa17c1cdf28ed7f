"""All layers of a network as a single call of C: a step of decoding, quantised whole texts.

For few rows the calls between two products take longer than the products: of SmolLM2's 43 ms a
token on an ARM server in int8, the products are 9 (`decode_step.c`). Weights of 32 bits are read
where they lie. In whole texts padding is left out, and where dot products are of bytes activations
are rounded to 8 bits, 128 of them with one step: reading is bound by dot products, and 15 bits take
twice as many (`encode_texts.c`). AMX has no such bound: there the modules read whole texts, with 15
bits (`int8_tiles.c`). B rows or texts, T tokens, D width, G key/value heads, S places, E the width
of a head.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.kernels.int8 import MANY, LinearArgument, QuantizedLinear, kernels, linear_argument
from malmoi.model.elementwise import RMSNorm
from malmoi.model.patterns import Layout, Pattern
from malmoi.model.transformer import Block, Transformer
from malmoi.system.machine import this_machine

COLUMN_ROWS = 8  # beyond this, weights stored by input are read faster by the modules
ACTIVATION_CODES = {
    "gelu": 1,
    "geglu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "silu": 5,
    "swiglu": 5,
}


@dataclass(frozen=True)
class FusedStep:
    """tokens [B], positions [B], live [B] → hidden states [B, D], for up to `most_rows`."""

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    most_rows: int


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, LinearArgument) for name in ("qkv", "out", "up", "down")),
        *((name, _Norm) for name in ("attention_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "cos", "sin")),
        ("window", ctypes.c_long),
    )


class _Trunk(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("last", _Norm),
        *(
            (name, ctypes.c_long)
            for name in ("depth", "width", "heads", "key_heads", "size", "places")
        ),
        *((name, ctypes.c_int32) for name in ("activation", "gated", "rms", "qk_norm", "post")),
        ("eps", ctypes.c_float),
    )


def fused_step(
    trunk: Transformer, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> FusedStep | None:
    """A step of all rows in one call, or None if only torch has it.

    `keys` and `values` [rows, G, S, E] of each layer are the cache that it extends and reads; the
    token of a row is stored at its position. Hidden states are within 5e-4 of those of the modules:
    for quantised weights activations are rounded to 15 bits, at times the other way.
    """
    library = kernels()
    if library is None or not this_machine().fused or not _decodes(trunk, keys[0]):
        return None
    layers = layer_arguments(trunk)
    for layer, k, v in zip(layers, keys, values, strict=True):
        layer.keys = k.data_ptr()
        layer.values = v.data_ptr()
    argument = trunk_argument(trunk, layers, keys[0].size(2))
    address = ctypes.addressof(argument)

    def step(
        tokens: Tensor,
        positions: Tensor,
        live: Tensor,
        held: object = (layers, argument, trunk, keys, values),
    ) -> Tensor:
        run_hooks(trunk)
        x = trunk.embed(tokens[:, None], positions[:, None], None)[:, 0].contiguous()
        places = (x.data_ptr(), positions.data_ptr(), live.data_ptr())
        if library.malmoi_decode_step(address, *places, len(x)):
            raise MemoryError("There is no memory for a row of activations.")
        return cast(Tensor, x)

    by_input = any(_is_by_input(one) for block in trunk.blocks for one in _maps(block))
    return FusedStep(step, COLUMN_ROWS if by_input else MANY - 1)


def _decodes(trunk: Transformer, keys: Tensor) -> bool:
    """Whether the C code supports decoding with this trunk and cache."""
    reaches = trunk.local_rotary is None and keys.size(2) - 1 <= trunk.config.context
    return (
        all(pattern.text == "causal" for pattern in trunk.patterns)
        and keys.dtype == torch.float32
        and (trunk.rotary is None or reaches)
        and (is_plain(trunk) or _has_floats(trunk))
    )


def _has_floats(trunk: Transformer) -> bool:
    """Whether the C code has all layers of a trunk that is not quantised."""
    return (
        is_plain(trunk, nn.Linear)
        and all(weight.dtype == torch.float32 for weight in trunk.parameters())
        and all(1 in one.weight.stride() for block in trunk.blocks for one in _maps(block))
    )


def _maps(block: nn.Module) -> "list[nn.Linear]":
    return cast("list[nn.Linear]", cast(Block, block).linears)


def _is_by_input(one: nn.Linear) -> bool:
    """Whether a weight is stored by input, as GPT-2's files have it."""
    return isinstance(one, nn.Linear) and one.weight.stride(1) != 1


def run_hooks(trunk: Transformer) -> None:
    """What is due before a pass: the server yields there."""
    first = trunk.blocks[0]
    for hook in first._forward_pre_hooks.values():
        hook(first, ())


def is_plain(trunk: Transformer, linear: type[nn.Module] = QuantizedLinear) -> bool:
    """Whether the C code has all layers of this trunk; masks and positions are for the caller."""
    return (
        trunk.is_plain(linear, (nn.LayerNorm, RMSNorm, nn.Identity))
        and not trunk.has_soft_tokens
        and not trunk.config.embedding_residual
        and trunk.skips is None
        and (trunk.config.norm == "pre" or isinstance(trunk.norm, nn.Identity))
    )


def _norm_argument(norm: nn.Module | None) -> _Norm:
    if norm is None or isinstance(norm, nn.Identity):
        return _Norm(None, None)
    bias = getattr(norm, "bias", None)
    return _Norm(cast(Tensor, norm.weight).data_ptr(), None if bias is None else bias.data_ptr())


def layer_arguments(trunk: Transformer) -> "ctypes.Array[Layer]":
    """The layers in order; norms are those of the input of each half."""
    c = trunk.config
    blocks = [cast(Block, trunk.blocks[i * c.distinct // c.depth]) for i in range(c.depth)]
    layers = (Layer * c.depth)()
    rotary = (None, None) if trunk.rotary is None else cast(Tensor, trunk.rotary)
    tables = [None if table is None else table.data_ptr() for table in rotary]
    for i, block in enumerate(blocks):
        before: tuple[nn.Module | None, nn.Module] = (block.attend_norm, block.mlp_norm)
        if c.norm == "post":  # each half is followed by its norm, which is then the next one's
            before = (blocks[i - 1].mlp_norm if i else None, block.attend_norm)
        linears = cast("list[QuantizedLinear | nn.Linear]", block.linears)
        maps = (linear_argument(one.weight, one.bias) for one in linears)
        layers[i] = Layer(*maps, *map(_norm_argument, before), None, None, *tables)
    return layers


def trunk_argument(trunk: Transformer, layers: "ctypes.Array[Layer]", places: int = 0) -> _Trunk:
    c = trunk.config
    last = cast(Block, trunk.blocks[-1]).mlp_norm if c.norm == "post" else trunk.norm
    return _Trunk(
        ctypes.addressof(layers),
        _norm_argument(last),
        *(c.depth, c.width, c.heads, c.key_heads, c.size_per_head, places),
        *(ACTIVATION_CODES[c.activation], c.gated, c.norm_kind == "rms", c.qk_norm),
        c.norm == "post",
        c.eps,
    )


HEAD_UNIT = 16  # the width of a head is a multiple of this
WIDEST_HEAD = 256
Encode = Callable[[Tensor, Tensor, Tensor], None]
_ENCODERS: "WeakKeyDictionary[Transformer, Encode]" = WeakKeyDictionary()


def encode_texts(trunk: Transformer, x: Tensor, layout: Layout, positions: Tensor) -> Tensor | None:
    """Embedded tokens [B, T, D] → hidden states [B, T, D], or None if only the modules have it.

    The states of padding are zero. `MALMOI_MACHINE=no-fused` switches it off.
    """
    if not this_machine().fused or _in_tiles(trunk) or not _reads(trunk, x, layout, positions):
        return None
    if trunk not in _ENCODERS:
        _ENCODERS[trunk] = _encoder(trunk)
    run_hooks(trunk)
    keep = torch.ones(x.shape[:2], dtype=torch.bool) if layout.keep is None else layout.keep
    rows = x[keep]
    _ENCODERS[trunk](rows, positions.expand(keep.shape)[keep], F.pad(keep.sum(1).cumsum(0), (1, 0)))
    return torch.zeros_like(x).masked_scatter_(keep[..., None], rows)


def _in_tiles(trunk: Transformer) -> bool:
    """Whether the modules' products are made by AMX, which is faster."""
    maps = (module for module in trunk.modules() if isinstance(module, QuantizedLinear))
    return "amx_int8" in this_machine().features and all(one.weight.fits_tiles for one in maps)


def _reads(trunk: Transformer, x: Tensor, layout: Layout, positions: Tensor) -> bool:
    """Whether the C code reads such texts with this trunk."""
    c = trunk.config
    return (
        x.dtype == torch.float32
        and not (x.requires_grad and torch.is_grad_enabled())
        and layout.query_documents is None
        and layout.queries == layout.keys
        and c.size_per_head % HEAD_UNIT == 0
        and c.size_per_head <= WIDEST_HEAD
        and bool((positions.diff(dim=1) >= 0).all() & (positions < c.context).all())
        and all(_window(pattern) is not None for pattern in trunk.patterns)
        and is_plain(trunk)
    )


def _window(pattern: Pattern) -> int | None:
    """How near tokens must be to see each other; 0: all do; None: another pattern."""
    if pattern.text == "full":
        return 0
    name, _, window = pattern.text.partition(":")
    return int(window) if name == "local" and window.isdecimal() else None


def _encoder(trunk: Transformer) -> Encode:
    call = kernels().malmoi_encode_texts  # type: ignore[union-attr]  # quantised: there is one
    layers = layer_arguments(trunk)
    for i, layer in enumerate(layers):
        pattern = trunk.patterns[i % len(trunk.patterns)]
        layer.window = cast(int, _window(pattern))
        if pattern.is_local and trunk.local_rotary is not None:
            layer.cos, layer.sin = (table.data_ptr() for table in cast(Tensor, trunk.local_rotary))
    argument = trunk_argument(trunk, layers)
    address = ctypes.addressof(argument)

    def encode(
        rows: Tensor, positions: Tensor, starts: Tensor, held: object = (layers, argument)
    ) -> None:
        places = (rows.data_ptr(), positions.contiguous().data_ptr(), starts.data_ptr())
        if call(address, *places, len(starts) - 1):
            raise MemoryError("There is no memory for the activations of these texts.")

    return encode
