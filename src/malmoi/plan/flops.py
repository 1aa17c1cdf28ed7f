"""The arithmetic of a run: every matrix product once, attention by the pairs that its pattern lets see each other."""

from dataclasses import dataclass

import torch
from torch import nn

from malmoi.model import Layout, Network, parameters, parse
from malmoi.model.heads import POOLED
from malmoi.train.recipe import Recipe

QUERIES = 4096  # of a longer context so many are asked, evenly, how many keys they see


@dataclass(frozen=True)
class Flops:
    """Of one token of training, on average over the phases."""

    rule: float  # 6 for each weight (Kaplan et al. 2020 §2.1): what papers print
    exact: float  # every product, forward and backward
    again: float  # what rematerialisation computes a second time; 0 without

    @property
    def done(self) -> float:
        """What the machine computes."""
        return self.exact + self.again


def flops(network: Network, recipe: Recipe) -> Flops:
    """A backward pass takes each product twice more: for the slope of its input and of its weight."""
    phases = [(length, length * share) for length, share in recipe.phases]
    tokens = sum(weight for _, weight in phases)
    layers = sum(weight * _layers(network, length) for length, weight in phases) / tokens
    heads = sum(weight * _heads(network, recipe, length) for length, weight in phases) / tokens
    around = heads + 2.0 * _matrices(network.trunk.embed.project)
    return Flops(6.0 * parameters(network), 3 * (layers + around), layers if recipe.train.rematerialise else 0.0)


def _layers(network: Network, length: int) -> float:
    """One token forward through all blocks: its products with the weights, and q·k and p·v with the keys it sees."""
    c = network.config
    seen = [keys_seen(text, c.heads, length) for text in c.attention]
    keys = sum(seen[i % len(seen)] for i in range(c.depth))
    return 2.0 * c.depth * _matrices(network.trunk.blocks[0]) + 4.0 * c.heads * c.size_per_head * keys


def _heads(network: Network, recipe: Recipe, length: int) -> float:
    """One token's share of the heads: all of them speak of every token, of the masked ones, or of the sequence."""
    total = 0.0
    for name, head in network.heads.items():
        share = {"lm": 1.0, "mlm": recipe.data.mask_rate}.get(name, 1 / length)
        pooler = network.pooler if name in POOLED else None
        total += 2.0 * share * (_matrices(head) + (0 if pooler is None else _matrices(pooler)))
    return total


def keys_seen(text: str, heads: int, length: int) -> float:
    """How many keys a query sees, on average over queries and heads."""
    queries = torch.linspace(0, length - 1, min(length, QUERIES)).round().long()
    keys, document = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long)
    seen = 0.0
    for some in queries.split(256):
        layout = Layout(
            1, len(some), length, query_positions=some[None], key_positions=keys,
            query_documents=document[:, : len(some)], key_documents=document,
        )  # fmt: skip
        seen += parse(text, heads).mask(layout).expand(-1, -1, len(some), length).float().mean((0, 1)).sum().item()
    return seen / len(queries)


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)
