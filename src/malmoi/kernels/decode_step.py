"""One decoding step of a quantised network as a single call of C (`decode_step.c`).

For few rows the calls between two products take longer than the products: of SmolLM2's 43 ms a
token on an ARM server, the products are 9. B rows, D width, G key/value heads, S places, E head
width.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from malmoi.kernels.int8 import MANY, QuantizedLinear, QuickRMS
from malmoi.kernels.int8_row import LinearArgument, kernels, linear_argument
from malmoi.model.transformer import Block, Transformer
from malmoi.system.machine import this_machine

MAX_FUSED_ROWS = MANY - 1
ACTIVATION_CODES = {
    "gelu": 1,
    "geglu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "silu": 5,
    "swiglu": 5,
}
FusedStep = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    """tokens [B], positions [B], live [B] → hidden states [B, D], or None if only torch has it.

    `keys` and `values` [rows, G, S, E] of each layer are the cache that it extends and reads; the
    token of a row is stored at its position. Hidden states are within 5e-4 of those of the modules:
    activations are rounded to 15 bits, at times the other way.
    """
    library = kernels()
    if library is None or not this_machine().fused or not supports(trunk, keys[0]):
        return None
    layers = _layers(trunk, keys, values)
    argument = trunk_argument(trunk, layers, keys[0].size(2))
    address = ctypes.addressof(argument)
    call = library.malmoi_decode_step
    first = trunk.blocks[0]

    def step(
        tokens: Tensor,
        positions: Tensor,
        live: Tensor,
        held: object = (layers, argument, trunk, keys, values),
    ) -> Tensor:
        for hook in first._forward_pre_hooks.values():  # once a step: the server yields there
            hook(first, ())
        x = trunk.embed(tokens[:, None], positions[:, None], None)[:, 0].contiguous()
        places = (x.data_ptr(), positions.data_ptr(), live.data_ptr())
        if call(address, *places, len(x)):
            raise MemoryError("There is no memory for a row of activations.")
        return cast(Tensor, x)

    return step


def supports(trunk: Transformer, keys: Tensor) -> bool:
    """Whether the C code supports decoding with this trunk and cache."""
    c = trunk.config
    rotary = trunk.rotary is not None
    return (
        all(pattern.text == "causal" for pattern in trunk.patterns)
        and keys.dtype == torch.float32
        and (not rotary or (trunk.local_rotary is None and keys.size(2) - 1 <= c.context))
        and is_plain(trunk)
    )


def is_plain(trunk: Transformer) -> bool:
    """Whether the C code has all layers of this trunk; masks and positions are for the caller."""
    return (
        trunk.is_plain(QuantizedLinear, (nn.LayerNorm, QuickRMS, nn.Identity))
        and not trunk.has_soft_tokens
        and not trunk.config.embedding_residual
        and trunk.skips is None
        and (trunk.config.norm == "pre" or isinstance(trunk.norm, nn.Identity))
    )


def _norm_argument(norm: nn.Module | None) -> _Norm:
    if norm is None or isinstance(norm, nn.Identity):
        return _Norm(None, None)
    bias = getattr(norm, "bias", None)
    weight = cast(Tensor, norm.weight)
    return _Norm(weight.data_ptr(), None if bias is None else bias.data_ptr())


def _layers(
    trunk: Transformer, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> "ctypes.Array[Layer]":
    layers = layer_arguments(trunk)
    for layer, k, v in zip(layers, keys, values, strict=True):
        layer.keys = k.data_ptr()
        layer.values = v.data_ptr()
    return layers


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
        linears = cast("list[QuantizedLinear]", block.linears)
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
