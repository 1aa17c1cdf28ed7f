"""Weights as int8 for decoding on a processor: a step reads every weight once, so a quarter of the bytes is fast.

Rows of a weight are scaled one by one and symmetrically; only weights are rounded. Activations go through the same
int8 instructions (VNNI, AMX) in two parts of 8 bits, which loses no more of them than bfloat16 would. O outputs,
I inputs, N rows of activations.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmoi.errors import UsageError
from malmoi.model.heads import VOCABULARY, Network, VocabularyHead

LARGEST = 127  # of a signed byte, the same on both sides
BASE = 2 * LARGEST  # x ≈ step · (BASE · high + low), both parts whole numbers of at most LARGEST
TINY = 1e-30
PLACES = ("cpu", "meta")
REFUSAL = "int8 weights are for the processor; on a GPU use bf16, or name device='cpu'."


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 [O, I], and its scale [O]."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp(min=TINY) / LARGEST
    return (weight / scale[:, None]).round().to(torch.int8).contiguous(), scale


class Int8Linear(nn.Module):
    """x Wᵀ + b with W in int8: for few rows or many, several times as fast as with fp32 weights."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        packed, scale = pack(weight)
        self.register_buffer("weight", packed)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.product: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None:
            self.product = product_with(self.weight, self.scale)
        rows = x.reshape(-1, x.size(-1)).float()
        step = torch.linalg.vector_norm(rows, float("inf"), 1, True).clamp_(min=TINY).div_(BASE * LARGEST)
        whole = rows.div(step).round_()
        high = whole.mul(1 / BASE).round_()
        low = whole.sub_(high, alpha=BASE)
        above, below = self.product(torch.cat((high, low)).to(torch.int8)).chunk(2)
        y = below.add_(above, alpha=BASE).mul_(step)
        y = y if self.bias is None else y.add_(self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Linear":
        """A network's `.to(dtype)` is about its float weights; these keep their types, and stay on the processor."""
        if fn(torch.empty(0)).device.type not in PLACES:
            raise UsageError(REFUSAL)
        return self


def product_with(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """int8 rows [N, I] → fp32 [N, O]: oneDNN's, with the weight laid out for it once."""
    ops: Any = torch.ops.onednn
    laid_out, zero = ops.qlinear_prepack(weight, None), torch.zeros(len(weight), dtype=torch.int32)

    def product(rows: Tensor) -> Tensor:
        return cast(
            Tensor,
            ops.qlinear_pointwise.default(
                rows, 1.0, 0, laid_out, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
            ),
        )

    return product


class Int8Vocabulary(nn.Module):
    """A vocabulary head whose last product, the largest of the network, is in int8."""

    def __init__(self, head: VocabularyHead) -> None:
        super().__init__()
        self.product = Int8Linear(head.weight, head.bias)
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


@torch.no_grad()
def quantize(network: Network) -> Network:
    """Replaces every linear map of the trunk, and the last product of vocabulary heads, by one with int8 weights."""
    if network.trunk.embed.token.weight.device.type not in PLACES:
        raise UsageError(REFUSAL)
    for parent in list(network.trunk.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child.weight, child.bias))
    for name in VOCABULARY & set(network.heads):
        head = network.heads[name]
        if isinstance(head, VocabularyHead):
            network.heads[name] = Int8Vocabulary(head)
    return network


def is_quantized(network: nn.Module) -> bool:
    return any(isinstance(module, Int8Linear) for module in network.modules())
