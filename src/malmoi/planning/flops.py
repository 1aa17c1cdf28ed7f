"""The arithmetic of a run: every matrix product once, attention by the pairs that its pattern
lets see each other.
"""

from dataclasses import dataclass

import torch
from torch import nn

from malmoi.model import Layout, Network, count_parameters, parse_pattern
from malmoi.model.heads import POOLED_HEADS
from malmoi.training.recipe import Recipe

MAX_COUNTED_QUERIES = 4096  # evenly spaced queries whose keys are counted in longer contexts


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
    """A backward pass takes each product twice more: for the slope of its input and of its
    weight.
    """
    phases = [(length, length * share) for length, share in recipe.phases]
    tokens = sum(weight for _, weight in phases)
    layers = sum(weight * _layers(network, length) for length, weight in phases) / tokens
    heads = sum(weight * _heads(network, recipe, length) for length, weight in phases) / tokens
    around = heads + 2.0 * _matrices(network.trunk.embed.project)
    return Flops(
        6.0 * count_parameters(network),
        3 * (layers + around),
        layers if recipe.train.gradient_checkpointing else 0.0,
    )


def _layers(network: Network, length: int) -> float:
    """One token forward through all blocks: its products with the weights, and q·k and p·v with
    the keys it sees.
    """
    c = network.config
    seen = [keys_seen(text, c.heads, length) for text in c.attention]
    keys = sum(seen[i % len(seen)] for i in range(c.depth))
    return (
        2.0 * c.depth * _matrices(network.trunk.blocks[0]) + 4.0 * c.heads * c.size_per_head * keys
    )


def _heads(network: Network, recipe: Recipe, length: int) -> float:
    """One token's share of the heads: all of them speak of every token, of the masked ones, or
    of the sequence.
    """
    total = 0.0
    for name, head in network.heads.items():
        shares = {"lm": 1.0, "generator": 1.0, "detect": 1.0, "mlm": recipe.data.mask_rate}
        share = shares.get(name, 1 / length)
        pooler = network.pooler if name in POOLED_HEADS else None
        total += 2.0 * share * (_matrices(head) + (0 if pooler is None else _matrices(pooler)))
    return total


def keys_seen(text: str, heads: int, length: int) -> float:
    """How many keys a query sees, on average over queries and heads."""
    queries = torch.linspace(0, length - 1, min(length, MAX_COUNTED_QUERIES)).round().long()
    keys = torch.arange(length)[None]
    document = torch.zeros(1, length, dtype=torch.long)
    seen = 0.0
    for some in queries.split(256):
        layout = Layout(
            1, len(some), length, query_positions=some[None], key_positions=keys,
            query_documents=document[:, : len(some)], key_documents=document,
        )  # fmt: skip
        seen += (
            parse_pattern(text, heads)
            .mask(layout)
            .expand(-1, -1, len(some), length)
            .float()
            .mean((0, 1))
            .sum()
            .item()
        )
    return seen / len(queries)


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


# How many tokens a language model should see for its size: two laws, which disagree


@dataclass(frozen=True)
class Optimal:
    """Tokens that the laws give this model, and what the later one would do with the same FLOPs."""

    kaplan: float
    hoffmann: float
    same_parameters: float
    same_tokens: float


def optimal(blocks: int, parameters: int, flops: float) -> Optimal:
    """Kaplan counts the weights without embeddings, Hoffmann all; 6·N·20·N = C gives the size
    for C FLOPs.
    """
    size = (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5
    return Optimal(
        kaplan_tokens(blocks), TOKENS_PER_PARAMETER * parameters, size, TOKENS_PER_PARAMETER * size
    )


TOKENS_PER_PARAMETER = 20  # tokens a parameter: Hoffmann et al. 2022 table 3, as it is usually put


def kaplan_tokens(weights: float) -> float:
    """Kaplan et al. 2020 table 6: N = 1.3e9·C^0.73 and D = 2e10·C^0.27, C in PF-days; here by N.
    GPT-3 followed it.
    """
    return 2e10 * float((weights / 1.3e9) ** (0.27 / 0.73))
