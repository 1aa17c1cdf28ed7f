"""8- and 4-bit weights for CPU inference, which is bound by reading every weight once per step.

Each weight row has its own symmetric scale. Activations lose no more than in bfloat16: rounding
them to 8 bits as well, as the fastest kernels do, costs SmolLM2 4.6 % of perplexity. O outputs, I
inputs, G groups, N rows of activations, V vocabulary, D width.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmoi.errors import UsageError
from malmoi.kernels.int8_row import Packed, bf16, fits, product, why_not
from malmoi.model.heads import VOCABULARY_HEADS, VocabularyHead
from malmoi.model.network import Network
from malmoi.system.machine import this_machine

INT8_MAX = 127  # largest magnitude of a signed byte, used symmetrically
MANY = 32  # rows from which AMX, which multiplies whole tiles, beats our kernel
TINY = 1e-30
INT8_DEVICES = ("cpu", "meta")
REFUSAL = "int8 weights run on the CPU; on a GPU use bf16, or pass device='cpu'."


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each row to int8 [O, I] with a bf16 scale [O].

    The scale is rounded before the weights are, so that its error does not reach the result. The
    largest weight is 127 · (1 ± 2⁻⁹) steps, which rounds to 127: packing is idempotent.
    """
    weight = weight.detach().float()
    scale = (weight.abs().amax(1).clamp(min=TINY) / INT8_MAX).to(bf16())
    return (weight / scale.float()[:, None]).round().to(torch.int8).contiguous(), scale


def packed(weight: Tensor) -> Packed:
    """An 8-bit weight, laid out for the kernel."""
    numbers, scale = pack_int8(weight)
    return Packed.of(numbers, scale[:, None])


class QuantizedLinear(nn.Module):
    """x Wᵀ + b with W in 8 or 4 bits; faster than fp32 weights for few rows and for many."""

    bias: Tensor | None

    def __init__(self, weight: Packed, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.amx = weight.bits == 8 and weight.groups == 1 and "amx_int8" in this_machine().features

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                "Quantised weights have no gradients: open the model with dtype='fp32'."
            )
        rows = x.reshape(-1, self.weight.inputs).float()
        y = self._by_tiles(rows) if self.amx and len(rows) >= MANY else self._multiply(rows)
        return y.to(x.dtype).view(*x.shape[:-1], self.weight.outputs)

    @cached_property
    def _multiply(self) -> Callable[[Tensor], Tensor]:
        return product(self.weight, self.bias)

    @cached_property
    def _tiles(self) -> Callable[[Tensor], Tensor]:
        return tile_product(*self.weight.signed())

    def _by_tiles(self, rows: Tensor) -> Tensor:
        """Uses AMX: x ≈ step · (high + low / 127), both parts int8."""
        step = rows.abs().amax(1, keepdim=True).div_(INT8_MAX).clamp_(min=TINY)
        parts = rows.div(step)
        high = parts.to(torch.int8)
        low = parts.sub_(high).mul_(INT8_MAX).to(torch.int8)
        above, below = self._tiles(torch.cat((high, low))).chunk(2)
        y = above.add_(below, alpha=1 / INT8_MAX).mul_(step)
        return y if self.bias is None else y + self.bias

    def _apply(  # torch's signature
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002
    ) -> "QuantizedLinear":
        """Ignores `.to(dtype)`: quantised weights keep their types and stay on the CPU."""
        if fn(torch.empty(0)).device.type not in INT8_DEVICES:
            raise UsageError(REFUSAL)
        return self


def tile_product(numbers: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """int8 rows [N, I] → fp32 [N, O] by oneDNN, with a copy of the weight in oneDNN's layout."""
    ops: Any = torch.ops.onednn
    laid_out = ops.qlinear_prepack(numbers.contiguous(), None)
    zero = torch.zeros(len(numbers), dtype=torch.int32)
    scales = scale[:, 0].float()

    def multiply(rows: Tensor) -> Tensor:
        how: Any = (None, 1.0, 0, torch.float32, "none", [], "")
        found = ops.qlinear_pointwise.default(rows, 1.0, 0, laid_out, scales, zero, *how)
        return cast(Tensor, found)

    return multiply


class QuantizedEmbedding(nn.Module):
    """Token embeddings from 8-bit rows, which a tied vocabulary head shares."""

    weight: Tensor

    def __init__(self, rows: Packed) -> None:
        super().__init__()
        self.packed = rows
        # Callers read an embedding's device and dtype from its weight; this one has no rows to be
        # read by mistake.
        self.register_buffer("weight", torch.empty(0, rows.inputs), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.packed.rows(tokens).to(self.weight.dtype)


class QuantizedVocabulary(nn.Module):
    """A vocabulary head whose last matmul, the largest of the network, is in int8."""

    def __init__(self, head: VocabularyHead, weight: Packed) -> None:
        super().__init__()
        self.product = QuantizedLinear(weight, head.bias)
        self.cap = head.cap
        head.weight = head.bias = None  # type: ignore[assignment]
        self.head = head

    def features(self, hidden: Tensor) -> Tensor:
        return self.head.features(hidden)

    def scores(self, features: Tensor) -> Tensor:
        logits = self.product(features)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scores(self.features(hidden))


class QuickRMS(nn.Module):
    """RMSNorm in five calls instead of torch's nine: for a single row, call overhead dominates.

    x / √(‖x‖²/D + ε) = x / (hypot(‖x‖, √(D ε)) / √D).
    """

    floor: Tensor

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        size = norm.normalized_shape[0]
        self.root = size**0.5
        self.register_buffer(
            "floor", torch.tensor(self.root * cast(float, norm.eps) ** 0.5), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, keepdim=True), self.floor)
        return x.div(length.div_(self.root)).mul_(self.weight)


def _linear(linear: nn.Linear) -> nn.Module:
    fitting = fits(linear.in_features, 1)
    return QuantizedLinear(packed(linear.weight), linear.bias) if fitting else linear


INT8_MODULES: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: _linear,
    nn.RMSNorm: QuickRMS,
}


@torch.no_grad()
def quantize_int8(network: Network) -> Network:
    """Quantises a network to 8 bits in place, for inference only.

    Covers the trunk's linear maps (unless they have fewer bits already), the token embedding and
    the last matmul of vocabulary heads. Weights are replaced one by one, so that two networks are
    never in memory.
    """
    check_place(network)
    for parent in list(network.trunk.modules()):
        for name, child in parent.named_children():
            if type(child) in INT8_MODULES:
                setattr(parent, name, INT8_MODULES[type(child)](child))
    _quantize_vocabulary(network)
    return network


def check_place(network: Network) -> None:
    """Raises unless this machine has a kernel for quantised weights: some CPUs do, no GPU does."""
    if network.device.type not in INT8_DEVICES:
        raise UsageError(REFUSAL)
    reason = why_not()
    if reason is not None:
        raise UsageError(
            "int8 would be slower than fp32 here: {reason}. Omit --dtype.", reason=reason
        )


def _quantize_vocabulary(network: Network) -> None:
    token = network.trunk.embed.token
    rows = packed(token.weight)
    for name in VOCABULARY_HEADS & set(network.heads):
        head = network.heads[name]
        if isinstance(head, VocabularyHead):
            own = rows if head.weight is token.weight else packed(head.weight)
            network.heads[name] = QuantizedVocabulary(head, own)
    network.trunk.embed.token = QuantizedEmbedding(rows)  # type: ignore[assignment]


def is_quantized(network: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in network.modules())


def plain_state(network: Network) -> dict[str, Tensor | Packed]:
    """A network's weights under the names they have in an unquantised network."""
    found: dict[str, Tensor | Packed] = {**network.state_dict()}
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            found[f"{name}.weight"] = (
                module.weight if isinstance(module, QuantizedLinear) else module.packed
            )
    for head_name, head in network.heads.items():
        prefix = f"heads.{head_name}."
        for part in ("product.", "head.") if isinstance(head, QuantizedVocabulary) else ():
            for name in [name for name in found if name.startswith(prefix + part)]:
                found[prefix + name.removeprefix(prefix + part)] = found.pop(name)
    return found


def memory_of(network: nn.Module) -> int:
    """Bytes that a network's weights take in memory; shared ones count once."""
    held = [*network.parameters(), *network.buffers()]
    for module in network.modules():
        weight = getattr(module, "packed", None) or getattr(module, "weight", None)
        if isinstance(weight, Packed):
            held += [weight.numbers, weight.scale]
    storages = (tensor.untyped_storage() for tensor in held)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
