"""Weights as int8 for decoding on a processor: a step reads every weight once, so a quarter of the bytes is fast.

Rows of a weight are scaled one by one and symmetrically. Activations lose no more than in bfloat16: rounding them to
8 bits too, as the fastest kernels do, costs SmolLM2 4.6 % of perplexity. O outputs, I inputs, N rows of activations.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmoi.errors import UsageError
from malmoi.model.heads import VOCABULARY, Network, VocabularyHead
from malmoi.model.int8_row import row_product

LARGEST = 127  # of a signed byte, the same on both sides
SMALL = 2_000_000  # weights up to which one row is done before its two parts would be made
STRIDE = 16  # columns that torch's kernel for one row reads at once, past the end of a row that has fewer
TINY = 1e-30
PLACES = ("cpu", "meta")
REFUSAL = "int8 weights are for the processor; on a GPU use bf16, or name device='cpu'."


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 [O, I], and its scale [O]: the next bfloat16, as one of the kernels wants it, rounded before the
    weights are, so that its own error stays out of the result."""
    weight = weight.detach().float()
    exact = weight.abs().amax(1).clamp(min=TINY) / LARGEST
    near = exact.bfloat16()
    scale = torch.where(near.float() < exact, (exact * (1 + 2**-8)).bfloat16(), near)
    return (weight / scale.float()[:, None]).round().to(torch.int8).contiguous(), scale


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
        self.direct = weight.numel() <= SMALL and weight.size(1) % STRIDE == 0
        self.product: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        if len(rows) == 1 and self.row is not None:
            y = self.row(rows)
        else:
            y = self._one(rows) if len(rows) == 1 and self.direct else self._several(rows)
            y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @cached_property
    def row(self) -> Callable[[Tensor], Tensor] | None:
        """The product of one row by our own kernel, where there is one; made when it is first needed."""
        return row_product(self.weight, self.scale, self.bias)

    def _one(self, row: Tensor) -> Tensor:
        """Reads the weights as they are; the row is rounded to bfloat16."""
        return torch._weight_int8pack_mm(row.bfloat16(), self.weight, self.scale)

    def _several(self, rows: Tensor) -> Tensor:
        """Through int8 instructions (VNNI, AMX): x ≈ step · (high + low / 127), both parts of 8 bits."""
        if self.product is None:
            self.product = product_with(self.weight, self.scale)
        step = rows.abs().amax(1, True).float().div_(LARGEST).clamp_(min=TINY)
        parts = rows.div(step)
        high = parts.to(torch.int8)
        low = parts.sub_(high).mul_(LARGEST).to(torch.int8)
        above, below = self.product(torch.cat((high, low))).chunk(2)
        return above.add_(below, alpha=1 / LARGEST).mul_(step)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Linear":
        """A network's `.to(dtype)` is about its float weights; these keep their types, and stay on the processor."""
        if fn(torch.empty(0)).device.type not in PLACES:
            raise UsageError(REFUSAL)
        return self


def product_with(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """int8 rows [N, I] → fp32 [N, O]: oneDNN's, with the weight laid out for it once."""
    ops: Any = torch.ops.onednn
    laid_out, zero = ops.qlinear_prepack(weight, None), torch.zeros(len(weight), dtype=torch.int32)
    scale = scale.float()

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


class QuickRMS(nn.Module):
    """RMSNorm in five calls instead of torch's nine: of one row, the calls take all the time.

    x / √(‖x‖²/D + ε) = x / (hypot(‖x‖, √(D ε)) / √D).
    """

    floor: Tensor

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, size = norm.weight, norm.normalized_shape[0]
        self.root = size**0.5
        self.register_buffer("floor", torch.tensor(self.root * cast(float, norm.eps) ** 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)
        return x.div(length.div_(self.root)).mul_(self.weight)


QUICK: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: lambda linear: Int8Linear(linear.weight, linear.bias),
    nn.RMSNorm: QuickRMS,
}


@torch.no_grad()
def quantize(network: Network) -> Network:
    """Replaces every linear map of the trunk, and the last product of vocabulary heads, by one with int8 weights.

    The network is then for use, not for training.
    """
    if network.trunk.embed.token.weight.device.type not in PLACES:
        raise UsageError(REFUSAL)
    for parent in list(network.trunk.modules()):
        for name, child in parent.named_children():
            if type(child) in QUICK:
                setattr(parent, name, QUICK[type(child)](child))
    for name in VOCABULARY & set(network.heads):
        head = network.heads[name]
        if isinstance(head, VocabularyHead):
            network.heads[name] = Int8Vocabulary(head)
    return network


def is_quantized(network: nn.Module) -> bool:
    return any(isinstance(module, Int8Linear) for module in network.modules())
