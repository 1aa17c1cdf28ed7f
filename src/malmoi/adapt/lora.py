"""LoRA (Hu et al. 2021): a weight stays as it is, and a product of two thin matrices is learnt beside it.

r rank, `in` and `out` sides of a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.adapt.settings import AdapterConfig
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, nearest
from malmoi.model import Network

Part = tuple[str, int, int]  # a map of a block, and which of its rows


def parts(c: ModelConfig) -> dict[str, Part]:
    """The maps of a block by their names: query, key and value are rows of one weight, as gate and up are."""
    q, k, m = c.heads * c.size_per_head, c.key_heads * c.size_per_head, c.mlp_width
    gated = c.activation == "swiglu"
    named = {
        "qkv": ("attend.qkv", 0, q + 2 * k),
        "query": ("attend.qkv", 0, q),
        "key": ("attend.qkv", q, q + k),
        "value": ("attend.qkv", q + k, q + 2 * k),
        "out": ("attend.out", 0, c.width),
        "up": ("mlp.up", m, 2 * m) if gated else ("mlp.up", 0, m),
        "down": ("mlp.down", 0, c.width),
    }
    return named | ({"gate": ("mlp.up", 0, m)} if gated else {})


class Patch(nn.Module):
    """ΔW x = (α / r) · B A x on some rows of a map (Hu et al. 2021 eq. 3)."""

    def __init__(self, rows: tuple[int, int], a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        (self.start, self.stop), self.scale = rows, scale
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)  # [r, in], [out, r]
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(self.drop(x), self.a), self.b)

    def change(self) -> Tensor:
        """ΔW itself [out, in]."""
        return self.scale * (self.b.float() @ self.a.float())


class Patched(nn.Linear):
    """A linear map with the same weight, under the same name, and patches beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.patches = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for patch in self.patches:
            y[..., patch.start : patch.stop] += patch(x)
        return y

    def joined(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """The patches on some rows as one: their A's below one another, their B's side by side."""
        met = [p for p in self.patches if isinstance(p, Patch) and p.start < stop and start < p.stop]
        if not met:
            return None
        a = torch.cat([p.a for p in met])
        b, at = a.new_zeros(stop - start, len(a)), 0
        for p in met:
            low, high = max(start, p.start), min(stop, p.stop)
            b[low - start : high - start, at : at + len(p.a)] = p.b[low - p.start : high - p.start]
            at += len(p.a)
        return a, b

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain map of W + ΔW: nothing is left to compute beside it (Hu et al. 2021 §4.1)."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = self.weight.detach().clone()
        for patch in self.patches:
            rows = weight[patch.start : patch.stop]
            rows.copy_(rows.float() + patch.change())  # type: ignore[operator]
        plain.weight, plain.bias = nn.Parameter(weight), self.bias
        return plain


def add_lora(network: Network, adapter: AdapterConfig, generator: torch.Generator) -> None:
    """Patches on the named maps of every block; A is drawn and B is zero, so that nothing changes at first."""
    known = parts(network.config)
    for name in adapter.targets:
        if name not in known:
            raise UsageError(f"There is no map {name!r} for adapter.targets.{nearest(name, known)}")
    for i in range(len(network.trunk.blocks)):
        for name in adapter.targets:
            path, start, stop = known[name]
            map_ = patched(network, f"trunk.blocks.{i}.{path}")
            a = torch.randn(adapter.rank, map_.in_features, generator=generator) * map_.in_features**-0.5
            b = torch.zeros(stop - start, adapter.rank)
            map_.patches.append(Patch((start, stop), a, b, adapter.alpha / adapter.rank, adapter.dropout))


def patched(network: Network, path: str) -> Patched:
    """The map of that name, made ready to take patches."""
    outer, _, name = path.rpartition(".")
    parent, found = network.get_submodule(outer), network.get_submodule(path)
    if not isinstance(found, nn.Linear):
        raise UsageError(f"{path} is no linear map, so LoRA cannot change it.")
    if not isinstance(found, Patched):
        setattr(parent, name, Patched(found))
    return getattr(parent, name)


def merge(network: Network) -> None:
    """Writes every patch into the weight that it stands beside."""
    found = [(name, module) for name, module in network.named_modules() if isinstance(module, Patched)]
    for path, module in found:
        outer, _, name = path.rpartition(".")
        setattr(network.get_submodule(outer), name, module.merged())
