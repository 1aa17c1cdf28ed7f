"""Cross-entropy of a vocabulary head without ever holding all of its logits.

The last product and the softmax are computed a few thousand rows at a time, with their gradients:
the memory is that of one piece's logits, the arithmetic that of the plain form (no second pass). N
rows, D width, V vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model.heads import VocabularyHead
from malmoi.system.machine import per_device
from malmoi.training.data.loader import IGNORE_LABEL

# logits held at once; on a CPU they should fit in its cache
MAX_LOGITS = {"cuda": 1 << 29, "cpu": 1 << 22}
# a vocabulary that is not a multiple of this misses the GPU's fast matrix product
VOCAB_MULTIPLE = 128


def linear_cross_entropy(
    features: Tensor,
    head: VocabularyHead,
    labels: Tensor,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Σ −log softmax(features Wᵀ + b)[label] over the labels that are not IGNORE.

    `weights`, one per label, multiply its loss. With `smoothing` ε the label has the probability
    1 − ε, and all tokens share ε (Szegedy et al. 2016 §7).
    """
    x = features.flatten(0, -2)
    y = labels.flatten()
    kept = y != IGNORE_LABEL if weights is None else weights.flatten() * (y != IGNORE_LABEL)
    weight = head.weight
    bias = head.bias
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x = x.to(kind)
        weight = weight.to(kind)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _forward_only(Shape(head.cap, smoothing), x, weight, bias, y, kept)
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
    return apply(Shape(head.cap, smoothing), x, weight, bias, y, kept)


class Shape(NamedTuple):
    """What changes the plain cross-entropy: a cap on the logits, and label smoothing."""

    cap: float = 0.0
    smoothing: float = 0.0


def _forward_only(
    shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor
) -> Tensor:
    total = x.new_zeros((), dtype=torch.float32)
    how: Any = dict(ignore_index=IGNORE_LABEL, reduction="none", label_smoothing=shape.smoothing)
    size = _rows(x, weight)
    for rows, labels, share in zip(x.split(size), y.split(size), kept.split(size), strict=True):
        losses = F.cross_entropy(_logits(rows, weight, bias, shape.cap), labels, **how)
        total = total + (losses * share).sum()
    return total


def _rows(x: Tensor, weight: Tensor) -> int:
    return max(1, per_device(MAX_LOGITS, x.device.type) // weight.size(0))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    logits = F.linear(x, weight).float()
    logits = logits if bias is None else logits + bias
    return cap * torch.tanh(logits / cap) if cap else logits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, *tensors: Any) -> Tensor:
        x, weight, bias, y, kept = tensors
        padded = F.pad(weight, (0, 0, 0, -weight.size(0) % VOCAB_MULTIPLE)) if x.is_cuda else weight
        dx = torch.empty_like(x)
        dw = torch.zeros_like(padded, dtype=torch.float32)
        db = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        total: Tensor = x.new_zeros((), dtype=torch.float32)
        size = _rows(x, weight)
        piece = _fused() if x.is_cuda else _in_place
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            logits = F.linear(x[part], padded)
            loss, slope = piece(logits, bias, y[part], kept[part], weight.size(0), shape)
            total += loss
            slope = slope.to(x.dtype)
            dx[part] = slope @ padded
            dw += slope.T @ x[part]
            if db is not None:
                db += slope[:, : weight.size(0)].sum(0, dtype=torch.float32)
        ctx.save_for_backward(dx, dw[: weight.size(0)].to(weight.dtype), db)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        slopes = (None if d is None else d * grad.to(d.dtype) for d in ctx.saved_tensors)
        return None, *slopes, None, None


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiles `_piece` only: torch 2.11 compiles the Function around it to zero gradients."""
    return torch.compile(_piece)


def _piece(
    logits: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor, vocab: int, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Loss of some rows and its gradient by the logits, ignoring vocabulary padding."""
    cap, smoothing = shape
    z = logits.float()
    if bias is not None:
        z = z + F.pad(bias, (0, logits.size(1) - vocab))
    squash = torch.tanh(z / cap) if cap else None
    z = cap * squash if squash is not None else z
    mean = z[:, :vocab].mean(-1) if smoothing else 0.0
    if logits.size(1) != vocab:
        z = z.masked_fill(torch.arange(logits.size(1), device=z.device) >= vocab, float("-inf"))
    at = y.clamp(min=0)[:, None]
    log_sum = z.logsumexp(-1, keepdim=True)
    # cross-entropy with the target (1 − ε) · label + ε / V
    wanted = (1 - smoothing) * z.gather(1, at).squeeze(1) + smoothing * mean
    loss = log_sum.squeeze(1) - wanted
    slope = (z - log_sum).exp()
    columns = torch.arange(z.size(1), device=z.device)
    slope = slope - (1 - smoothing) * (columns == at).to(slope.dtype)
    if smoothing:
        slope = slope - smoothing / vocab * (columns < vocab).to(slope.dtype)
    slope = slope * kept[:, None]
    if squash is not None:
        slope = slope * (1 - squash.square())
    # rounded here, so that the compiler never writes the fp32 gradient to memory
    return (loss * kept).sum(), slope.to(logits.dtype)


def _in_place(
    logits: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor, vocab: int, shape: Shape
) -> tuple[Tensor, Tensor]:
    """The same without a compiler: in place, with as few passes over the logits as possible."""
    if bias is not None or any(shape):
        return _piece(logits, bias, y, kept, vocab, shape)
    slope = F.log_softmax(logits, -1, dtype=torch.float32)
    at = y.clamp(min=0)[:, None]
    loss = -(slope.gather(1, at).squeeze(1) * kept).sum()
    slope.exp_().scatter_add_(1, at, torch.full_like(at, -1.0, dtype=slope.dtype))
    return loss, slope if bool((kept == 1).all()) else slope.mul_(kept[:, None])
