"""Whole texts through all layers of a quantised encoder as a single call of C (`encode_texts.c`).

Padding is left out, and activations are rounded to 8 bits, 128 of them with one step: reading
texts is bound by dot products, and 15 bits take twice as many. B texts, T tokens, D width.
"""

import ctypes
from collections.abc import Callable
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.kernels.decode_step import is_plain, layer_arguments, trunk_argument
from malmoi.kernels.int8_row import kernels
from malmoi.model.patterns import Layout, Pattern
from malmoi.model.transformer import Transformer
from malmoi.system.machine import this_machine

HEAD_UNIT = 16  # the width of a head is a multiple of this
WIDEST_HEAD = 256
Encode = Callable[[Tensor, Tensor, Tensor], None]
_ENCODERS: "WeakKeyDictionary[Transformer, Encode]" = WeakKeyDictionary()


def encode_texts(trunk: Transformer, x: Tensor, layout: Layout, positions: Tensor) -> Tensor | None:
    """Embedded tokens [B, T, D] → hidden states [B, T, D], or None if only the modules have it.

    The states of padding are zero. `MALMOI_MACHINE=no-fused` switches it off.
    """
    if not this_machine().fused or not supports(trunk, x, layout, positions):
        return None
    if trunk not in _ENCODERS:
        _ENCODERS[trunk] = _encoder(trunk)
    first = trunk.blocks[0]
    for hook in first._forward_pre_hooks.values():  # once a pass: the server yields there
        hook(first, ())
    keep = layout.keep
    if keep is None:
        keep = torch.ones(x.shape[:2], dtype=torch.bool)
    rows = x[keep]
    _ENCODERS[trunk](rows, positions.expand(keep.shape)[keep], F.pad(keep.sum(1).cumsum(0), (1, 0)))
    return torch.zeros_like(x).masked_scatter_(keep[..., None], rows)


def supports(trunk: Transformer, x: Tensor, layout: Layout, positions: Tensor) -> bool:
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
