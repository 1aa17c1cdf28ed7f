"""Optimizers, their parameter groups, and weight averaging."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from malmoi.model import Network
from malmoi.system.groups import grouped
from malmoi.system.machine import this_machine
from malmoi.system.optimizers import lean
from malmoi.training.parallel import local_part
from malmoi.training.recipe import TrainConfig

# what Muon updates: matrices of blocks, an encoder's and a generator's too
MATRICES = ("trunk.blocks.", "trunk.encoder.blocks.", "heads.generator.trunk.blocks.")

# of an iteration that brings singular values near one: a x + b x³ + c x⁵ (Jordan et al. 2024)
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315


def make_optimizers(
    network: Network, c: TrainConfig, *, capturable: bool = False
) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest.

    Biases, norms and other vectors never decay (BERT appendix A.2, GPT-1 §4.1). A capturable AdamW
    has its rate on the GPU, so that a captured step can be replayed with another; so has Muon.
    """
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    blocks = MATRICES if c.optimizer == "muon" else ()
    matrices = [p for name, p in named if name.startswith(blocks) and p.dim() == 2]
    rest = [p for name, p in named if not (name.startswith(blocks) and p.dim() == 2)]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": c.decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    for group in groups if capturable else ():
        group["lr"] = torch.tensor(c.lr, device=rest[0].device)
    how: Any = dict(betas=(c.betas[0], c.betas[1]), fused=True, capturable=capturable)
    adam = lean(torch.optim.AdamW)(groups, lr=c.lr, eps=c.eps, **how)
    if not matrices:
        return [adam]
    decay = c.decay if c.muon_decay is None else c.muon_decay
    rate: Any = torch.tensor(c.muon_lr, device=rest[0].device) if capturable else c.muon_lr
    return [adam, Muon(matrices, lr=rate, decay=decay, cautious=c.cautious_decay)]


def set_rate(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Sets every group's learning rate to this share of its peak."""
    on_gpu: list[Tensor] = []
    rates: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "peak" not in group:  # reading it waits for the GPU, so only once
                group["peak"] = float(group["lr"])
            now = group["peak"] * share
            if isinstance(group["lr"], Tensor):
                on_gpu.append(group["lr"])
                rates.append(now)
            else:
                group["lr"] = now
    if on_gpu:  # two launches for all groups
        torch._foreach_zero_(on_gpu)
        torch._foreach_add_(on_gpu, rates)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised before it is applied, a shape at once (Jordan et al. 2024)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        decay: float = 0.0,
        cautious: bool = False,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, weight_decay=decay, cautious=cautious)
        super().__init__(list(params), defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes = grouped((p.shape, p) for p in group["params"] if p.grad is not None)
            for params in shapes.values():
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        weights: list[Tensor] = list(params)
        buffers = [self._momentum(p) for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        # rows of one length orthogonalise better (MuonEq-R, Chang et al. 2026; docs/lab.md)
        rows = nn.functional.normalize(torch.stack(list(nesterov)), dim=-1)
        # torch has no fused kernels for lists of several layouts: tall matrices are transposed here
        whole: Any = dict(dtype=params[0].dtype, memory_format=torch.contiguous_format)
        updates = list(orthogonal(rows).to(**whole).unbind())
        scale = max(1.0, rows.size(-2) / rows.size(-1)) ** 0.5
        if group["weight_decay"]:
            share = group["lr"] * group["weight_decay"]
            _decay(weights, updates, share, cautious=group["cautious"])
        torch._foreach_mul_(updates, group["lr"] * scale)  # the rate may be on the GPU
        torch._foreach_sub_(weights, updates)

    def _momentum(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        momentum: Tensor = state["momentum"]
        return momentum


def _decay(
    weights: list[Tensor], updates: list[Tensor], share: float | Tensor, *, cautious: bool
) -> None:
    """Shrinks weights; cautiously, those that the update shrinks too (Chen et al. 2025 eq. 4)."""
    if not cautious:
        torch._foreach_mul_(weights, 1 - share)
        return
    agree = torch._foreach_mul(weights, updates)
    torch._foreach_sign_(agree)
    torch._foreach_clamp_min_(agree, 0.0)
    torch._foreach_mul_(agree, share)
    torch._foreach_addcmul_(weights, weights, agree, value=-1)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximates the nearest orthogonal matrices [N, R, C] by a quintic Newton–Schulz iteration.

    bf16 is exact enough on machines with bf16 units; emulated, it takes 270 times as long as fp32.
    In fp32 long matrices X are left out of it: X Xᵀ and the factor of X follow from each other, in
    two thirds of the time, and 2e-4 of the result is lost.
    """
    x = matrices.to(this_machine().training_dtype(matrices.device.type))
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    apart = x.dtype == torch.float32 and x.size(-1) >= 3 * x.size(-2)
    found = torch.eye(x.size(-2), device=x.device).expand(len(x), -1, -1) if apart else x
    gram = x @ x.mT
    for left in reversed(range(steps)):
        change = torch.baddbmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC)
        found = torch.baddbmm(found, change, found, beta=LINEAR)
        if left and apart:
            gram = torch.baddbmm(gram, change, gram, beta=LINEAR)
            gram = torch.baddbmm(gram, gram, change, beta=LINEAR)
        elif left:
            gram = found @ found.mT
    found = found @ x if apart else found
    return found.mT if tall else found


class WeightAverage:
    """A running mean of weights over the last part of a run (Izmailov et al. 2018)."""

    def __init__(self, network: nn.Module) -> None:
        named = dict(network.named_parameters())
        self.tensors = {f"average.{n}": torch.zeros_like(p.data) for n, p in named.items()}
        self._weights = [local_part(p.data) for p in named.values()]
        self._means = [local_part(mean) for mean in self.tensors.values()]

    def add(self, count: int) -> None:
        """Adds the current weights to the mean as the `count`-th sample."""
        torch._foreach_lerp_(self._means, self._weights, 1 / count)

    def fill(self, network: nn.Module) -> None:
        """Makes the means the weights of another network of this shape."""
        for weight, mean in zip(network.parameters(), self._means, strict=True):
            weight.data = mean

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the averaged weights into the network within the context."""
        own = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._means)
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, own)

    def keep(self) -> None:
        """Copies the averaged weights into the network for good."""
        torch._foreach_copy_(self._weights, self._means)
