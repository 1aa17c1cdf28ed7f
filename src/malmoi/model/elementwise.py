"""What stands between the products: norms, dropout, activations.

On a processor torch makes RMSNorm and squared ReLU of many passes over memory, and draws dropout
one value after another: with their gradients 2.7, 4.6 and 4.4 ms for 16 × 128 tokens of width 192
(768 for the ReLU) on two cores, in a step of 300 ms with dozens of them. Written out here they take
1.5, 2.4 and 1.4.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.model.positions import compiles_for_gpu


def runs_as_written(x: Tensor) -> bool:
    """Whether this runs on a processor and is not compiled."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# ------------------------------------------------------------------ norms


class _UnitLength(torch.autograd.Function):
    """y = x s, s = 1 / √(mean(x²) + ε); dx = s (dy − y (mean(dy · y) + s ds / D)).

    s is an output, too: with what is neither that nor an input, slopes of slopes would be wrong.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
        scale = length.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y, scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (dy * y).mean(-1, keepdim=True) + scale * ds / y.size(-1)
        return torch.addcmul(dy, y, along, value=-1).mul_(scale), None


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = 1e-5
) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019 eq. 4)."""
    if eps is None or x.dtype.itemsize < 4 or not runs_as_written(x):
        return F.rms_norm(x, list(shape), weight, eps)
    y: Tensor = _UnitLength.apply(x, eps)[0]  # type: ignore[no-untyped-call]
    return y if weight is None else y * weight


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def make_norm(c: ModelConfig, width: int = 0) -> nn.Module:
    if c.norm_kind == "rms":
        return RMSNorm(width or c.width, c.eps)
    return nn.LayerNorm(width or c.width, c.eps, bias=c.norm_bias)


# ------------------------------------------------------------------ dropout


def dropout(x: Tensor, p: float) -> Tensor:
    """Each value with the chance 1 − p, and divided by it, or else 0.

    Compiled for a GPU the choice follows from a hash of each value's place: torch's generator
    computes longer than the norm beside it reads, and what it chose would be kept in memory for the
    backward pass. On a processor a number of 64 bits chooses for four values, p being exact to
    1.5e-5.
    """
    if compiles_for_gpu(x):
        seed = torch.randint(1 << 30, (1,), device=x.device, dtype=torch.int32)
        return torch.where(kept(x.shape, p, seed), x * (1 / (1 - p)), 0.0)
    if not runs_as_written(x):
        return F.dropout(x, p)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    shorts = draws.view(torch.int16)[: x.numel()].view(x.shape).float()
    return x * shorts.ge_((p - 0.5) * 2**16).mul_(1 / (1 - p)).to(x.dtype)


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training and self.p else x


def kept(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    """Which values dropout keeps, each with the chance 1 − p: a 32-bit hash of its number.

    Two rounds of xorshift and multiply (Wellons 2018, "lowbias32"); int32 is shifted with its sign,
    which the masks remove.
    """
    n = torch.arange(shape.numel(), device=seed.device, dtype=torch.int32).view(shape) ^ seed
    n = (n ^ ((n >> 16) & 0xFFFF)) * 0x7FEB352D
    n = (n ^ ((n >> 15) & 0x1FFFF)) * -0x7B935975
    return (n ^ ((n >> 16) & 0xFFFF)) & 0x7FFFFFFF >= round(p * 2**31)


# ------------------------------------------------------------------ activations


class _SquaredReLU(torch.autograd.Function):
    """y = max(x, 0)²; dx = 2 max(x, 0) dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (F.relu(ctx.saved_tensors[0]) * dy).mul_(2)


def squared_relu(x: Tensor) -> Tensor:
    """So et al. 2021."""
    if not runs_as_written(x):
        return F.relu(x).square()
    return cast(Tensor, _SquaredReLU.apply(x))  # type: ignore[no-untyped-call]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # exact, with erf: BERT
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-1, GPT-2
    "relu": F.relu,
    "relu2": squared_relu,
    "silu": F.silu,
    "swiglu": F.silu,  # applied to the gate; heads have no gate and use it as a plain activation
    "geglu": F.gelu,
    "tanh": torch.tanh,
}
