"""LoRA (Hu et al. 2021): a frozen weight plus a trained product of two thin matrices.

r rank, `in` and `out` sides of a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.adapters.config import AdapterConfig
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, nearest
from malmoi.model import Network

LinearPart = tuple[str, int, int]  # a linear map of a block, and the start and stop of its rows


def block_parts(c: ModelConfig) -> dict[str, LinearPart]:
    """A block's linear maps by name; query, key and value share one weight, as do gate and up."""
    q = c.heads * c.size_per_head
    k = c.key_heads * c.size_per_head
    m = c.mlp_width
    named = {
        "qkv": ("attend.qkv", 0, q + 2 * k),
        "query": ("attend.qkv", 0, q),
        "key": ("attend.qkv", q, q + k),
        "value": ("attend.qkv", q + k, q + 2 * k),
        "out": ("attend.out", 0, c.width),
        "up": ("mlp.up", m, 2 * m) if c.gated else ("mlp.up", 0, m),
        "down": ("mlp.down", 0, c.width),
    }
    return named | ({"gate": ("mlp.up", 0, m)} if c.gated else {})


class LoRAPatch(nn.Module):
    """ΔW x = (α / r) · B A x on some rows of a linear map (Hu et al. 2021 eq. 3)."""

    def __init__(
        self, rows: tuple[int, int], a: Tensor, b: Tensor, scale: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        (self.start, self.stop), self.scale = rows, scale
        # [r, in], [out, r]
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.linear(self.drop(x), self.a), self.b)

    def change(self) -> Tensor:
        """ΔW itself [out, in]."""
        return self.scale * (self.b.float() @ self.a.float())


class LoRALinear(nn.Linear):
    """A linear map with the same weight under the same name, plus LoRA patches."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.patches = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for patch in self.patches:
            y[..., patch.start : patch.stop] += patch(x)
        return y

    def joined(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """The patches on some rows as one (A, B): the A's stacked, the B's side by side."""
        patches = (p for p in self.patches if isinstance(p, LoRAPatch))
        met = [p for p in patches if p.start < stop and start < p.stop]
        if not met:
            return None
        a = torch.cat([p.a for p in met])
        b = a.new_zeros(stop - start, len(a))
        at = 0
        for p in met:
            low = max(start, p.start)
            high = min(stop, p.stop)
            b[low - start : high - start, at : at + len(p.a)] = p.b[low - p.start : high - p.start]
            at += len(p.a)
        return a, b

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain linear map with W + ΔW, so that inference costs no more (Hu et al. 2021 §4.1)."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = self.weight.detach().clone()
        for patch in self.patches:
            rows = weight[patch.start : patch.stop]
            rows.copy_(rows.float() + patch.change())  # type: ignore[operator]
        plain.weight = nn.Parameter(weight)
        plain.bias = self.bias
        return plain


def add_lora(network: Network, adapter: AdapterConfig, generator: torch.Generator) -> None:
    """Patches the named maps of every block; B starts at zero, so that nothing changes at first."""
    known = block_parts(network.config)
    for name in adapter.targets:
        if name not in known:
            raise UsageError(
                "There is no linear layer {name!r} for adapter.targets.{hint}",
                name=name,
                hint=nearest(name, known),
            )
    for i in range(len(network.trunk.blocks)):
        for name in adapter.targets:
            path, start, stop = known[name]
            map_ = patched(network, f"trunk.blocks.{i}.{path}")
            a = torch.randn(adapter.rank, map_.in_features, generator=generator)
            a *= map_.in_features**-0.5
            b = torch.zeros(stop - start, adapter.rank)
            scale = adapter.alpha / adapter.rank
            map_.patches.append(LoRAPatch((start, stop), a, b, scale, adapter.dropout))


def patched(network: Network, path: str) -> LoRALinear:
    """The linear map at `path`, replaced by a `LoRALinear` if it is not one yet."""
    found = network.get_submodule(path)
    if not isinstance(found, nn.Linear):
        raise UsageError("{path} is not a linear layer, so LoRA cannot change it.", path=path)
    if isinstance(found, LoRALinear):
        return found
    added = LoRALinear(found)
    network.set_submodule(path, added)
    return added


def merge_lora(network: Network) -> None:
    """Merges every patch into its weight."""
    for path, module in list(network.named_modules()):
        if isinstance(module, LoRALinear):
            network.set_submodule(path, module.merged())
