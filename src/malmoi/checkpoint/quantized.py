"""Quantized linear maps on disk, in the `pack-quantized` format of compressed-tensors.

transformers and vLLM read it. A weight [O, I] becomes `weight_packed`, int32 [O, I · bits / 32]
with the numbers side by side, each plus half the range; `weight_scale` [O, I / group], or [O, 1]
with one scale per row; and `weight_shape`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.checkpoint.table import TRANSPOSE, Table
from malmoi.checkpoint.weights import Quantized, Weight, dense
from malmoi.errors import ensure, explained, require_that
from malmoi.kernels.int8 import TINY, Packed, QuantizedLinear, bf16, fits, plain_state
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.system.untrusted import shown

QUANT_METHOD = "compressed-tensors"
PACK_FORMAT = "pack-quantized"
BLOCK_PREFIX = "trunk.blocks."
WORD_BITS = 32  # of an int32
PART_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape")
# clipping thresholds tried, relative to the largest weight: clipping buys smaller steps
CLIP_RATIOS = {8: (1.0,), 4: tuple(1 - 0.04 * i for i in range(12))}


def state_of(network: Network) -> dict[str, Weight]:
    """A network's weights by name, with quantized ones as numbers and scales."""
    found: dict[str, Weight] = {}
    for name, weight in plain_state(network).items():
        if isinstance(weight, Packed):
            kept = Quantized(*weight.signed(), weight.bits)
            found[name] = kept if name.startswith(BLOCK_PREFIX) else kept.dense()
        else:
            found[name] = weight
    return found


def place_quantized(network: Network, name: str, weight: Quantized, bias: Tensor | None) -> bool:
    """Replaces a plain map by a quantised one; False if the kernel lacks such groups or scales."""
    scale = weight.scale.to(bf16())
    exact = torch.equal(scale.float(), weight.scale.float())
    if not exact or not fits(weight.numbers.size(1), scale.size(1)):
        return False
    network.set_submodule(
        name, QuantizedLinear(Packed.of(weight.numbers, scale, weight.bits), bias)
    )
    return True


@dataclass(frozen=True)
class Packing:
    """How linear weights are stored: bits (8 or 4), and inputs per scale (0: a whole row)."""

    bits: int
    group: int = 0
    exact: bool = False  # whether all other weights keep their dtype

    @classmethod
    def of(cls, network: Network) -> "Packing | None":
        """The packing of a network that is already quantised, else None."""
        modules = network.trunk.blocks.modules()
        first = next((one.weight for one in modules if isinstance(one, QuantizedLinear)), None)
        if first is None:
            return None
        return cls(first.bits, 0 if first.groups == 1 else first.inputs // first.groups, exact=True)

    def pack(
        self, tensors: Mapping[str, Weight], network: Network, table: Table | None
    ) -> dict[str, Tensor]:
        """A folder's tensors, with the blocks' linear maps packed and all others in bf16.

        bf16 halves the bytes and keeps fp32's range, which activations need when a network is
        computed in the folder's own dtype.
        """
        chosen = _linear_maps(network, table) & tensors.keys()
        found: dict[str, Tensor] = {}
        for name, weight in tensors.items():
            if name in chosen:
                found |= self._packed(name, weight)
            else:
                tensor = dense(weight)
                kept = self.exact or not tensor.is_floating_point()
                found[name] = tensor if kept else tensor.to(bf16())
        return found

    def _packed(self, name: str, weight: Weight) -> dict[str, Tensor]:
        rows, columns = weight.shape
        group = self.group or columns
        require_that(
            columns % group == 0,
            "Groups of {group} do not divide the {columns} inputs of {name}: change --group.",
            group=group,
            columns=columns,
            name=name,
        )
        numbers, scale = (
            (weight.numbers, weight.scale)
            if isinstance(weight, Quantized)
            else rounded(weight.detach().cpu().float().reshape(-1, group), self.bits)
        )
        words = to_words(numbers.reshape(rows, columns), self.bits)
        parts = (words, scale.view(rows, -1), torch.tensor([rows, columns]))
        names = (name.removesuffix(".weight") + part for part in PART_SUFFIXES)
        return dict(zip(names, parts, strict=True))

    def config_json(self, table: Table | None) -> dict[str, Any]:
        """Its entry in config.json; linear layers outside the blocks are ignored."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
        }
        how = {
            "quant_method": QUANT_METHOD,
            "format": PACK_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": _others(table) if table else [],
        }
        return {"dtype": "float32" if self.exact else "bfloat16", "quantization_config": how}


def _linear_maps(network: Network, table: Table | None) -> set[str]:
    """Names of the blocks' linear weights in the folder, with and without the trunk's prefix."""
    parts = network.trunk.blocks.named_modules()
    maps = (name for name, part in parts if isinstance(part, nn.Linear | QuantizedLinear))
    ours = {f"{BLOCK_PREFIX}{name}.weight" for name in maps}
    if table is None:
        return ours
    rules = [rule for rule in table.expand(network.config, set(network.heads)) if rule.ours in ours]
    names = {name for rule in rules for name in rule.theirs}
    return names | {name.removeprefix(table.prefix) for name in names}


def _others(table: Table) -> list[str]:
    """Modules of a family outside its blocks, with and without the trunk's prefix."""
    rules = [rule for rule in table.rules if not rule.ours.startswith(BLOCK_PREFIX)]
    names = [name for rule in rules for name in rule.theirs]
    whole = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    return sorted(whole | {name.removeprefix(table.prefix) for name in whole})


def is_linear_there(table: Table) -> bool:
    """Whether a family's linear maps are `nn.Linear` in transformers (not GPT-1's and GPT-2's)."""
    return not any(rule.via is TRANSPOSE for rule in table.rules)


def rounded(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rounds rows [N, I] to integers, with the bf16 scales [N] that give the least squared error.

    At 8 bits nothing is clipped: the nearest bf16 is off by 2⁻⁸ at most, and 127 · (1 ± 2⁻⁸) rounds
    to 127. The largest weight is therefore always 127 steps, and `malmoi.kernels.int8.pack_int8`
    finds the same numbers again.
    """
    scale = clipped_scales(rows, bits)
    return _steps(rows, scale, bits).to(torch.int8), scale


def clipped_scales(groups: Tensor, bits: int, importance: Tensor | float = 1.0) -> Tensor:
    """The bf16 scale of each group of weights [..., I] with the least error² · importance."""
    largest = groups.abs().amax(-1).clamp(min=TINY) / ((1 << bits - 1) - 1)
    best = largest.to(bf16())
    least = torch.full_like(largest, torch.inf)
    for clip in CLIP_RATIOS[bits]:
        scale = (clip * largest).to(bf16())
        error = _steps(groups, scale, bits) * scale.float()[..., None] - groups
        cost = (error.square() * importance).sum(-1)
        best = torch.where(cost < least, scale, best)
        least = torch.minimum(cost, least)
    return best


def _steps(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    half = 1 << bits - 1
    return (groups / scale.float()[..., None]).round().clamp(-half, half - 1)


def to_words(numbers: Tensor, bits: int) -> Tensor:
    """Signed integers [O, I] of 8 or 4 bits as int32 [O, ⌈I · bits / 32⌉], lowest bits first."""
    above = F.pad(
        numbers.short() + (1 << bits - 1), (0, -numbers.size(1) % (WORD_BITS // bits))
    ).to(torch.uint8)
    if bits == 4:
        above = above[:, ::2] | above[:, 1::2] << 4
    return above.contiguous().view(torch.int32)


def from_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Unpacks the signed numbers, as int8."""
    above = words.contiguous().view(torch.uint8)
    if bits == 4:
        above = torch.stack((above & 15, above >> 4), -1).flatten(1)
    return (above[:, :columns].short() - (1 << bits - 1)).to(torch.int8)


# ------------------------------------------------------------------ reading


def read_quantized(
    tensors: dict[str, Tensor], config: Mapping[str, Any], folder: Path
) -> dict[str, Weight]:
    """A folder's tensors, with packed weights as numbers and scales."""
    bits = bits_of(config["quantization_config"], folder)
    parts = {name for name in tensors if name.endswith(PART_SUFFIXES)}
    for name in tensors:
        ensure(
            not name.endswith((".weight_zero_point", ".weight_g_idx")),
            "{folder} has {name}; Malmoi reads packed weights without zero points or reordering.",
            folder=folder,
            name=name,
        )
    stems = sorted({name.rpartition(".")[0] for name in parts})
    plain: dict[str, Weight] = {k: tensor for k, tensor in tensors.items() if k not in parts}
    return plain | {prefix + ".weight": _weight(prefix, tensors, bits, folder) for prefix in stems}


def unpacked(weights: dict[str, Weight]) -> dict[str, Weight]:
    """The same weights, all plain and in fp32, which holds number · scale exactly."""
    if not any(isinstance(weight, Quantized) for weight in weights.values()):
        return weights
    plain = {name: dense(weight) for name, weight in weights.items()}
    return {name: t.float() if t.is_floating_point() else t for name, t in plain.items()}


def bits_of(settings: Any, folder: Path) -> int:
    """Bits per packed weight; refuses any other quantization with an explanation."""
    where = msg("{folder} says that the weights are quantised", folder=folder / "config.json")
    with explained(
        (AttributeError, KeyError, TypeError),
        "{where}, but not how: its quantization_config is not understood.",
        where=where,
    ):
        method, kind = settings.get("quant_method"), settings.get("format")
        groups = settings.get("config_groups", {}).values()
        bits = {group["weights"]["num_bits"] for group in groups}
    ensure(
        (method, kind) == (QUANT_METHOD, PACK_FORMAT),
        "{where} by {method} ({kind}); Malmoi reads {method2!r} with the format {format!r}.",
        where=where,
        method=shown(method),
        kind=shown(kind),
        method2=QUANT_METHOD,
        format=PACK_FORMAT,
    )
    ensure(
        bits in ({4}, {8}),
        "{where} to {bits} bits; Malmoi reads 8 or 4, the same for all.",
        where=where,
        bits=sorted(bits, key=str),
    )
    return int(bits.pop())


def _weight(prefix: str, tensors: Mapping[str, Tensor], bits: int, folder: Path) -> Quantized:
    names = [prefix + part for part in PART_SUFFIXES]
    for name in names:
        ensure(
            name in tensors,
            "{folder}: {name} is missing from a packed weight.",
            folder=folder,
            name=name,
        )
    words, scale, shape = (tensors[name] for name in names)
    ensure(
        _fits(words, scale, shape, bits),
        "{folder}: parts of the weight {prefix} do not fit together; the folder is damaged.",
        folder=folder,
        prefix=prefix,
    )
    return Quantized(from_words(words, bits, shape.tolist()[1]), scale, bits)


def _fits(words: Tensor, scale: Tensor, shape: Tensor, bits: int) -> bool:
    whole = words.dtype == torch.int32 and shape.dtype in (torch.int32, torch.int64)
    if not whole or shape.shape != (2,) or scale.dim() != 2 or not scale.is_floating_point():
        return False
    rows, columns = shape.tolist()
    held, groups = scale.shape
    packed = words.shape == (rows, -(-columns * bits // WORD_BITS))
    return packed and held == rows and groups > 0 and columns % groups == 0
