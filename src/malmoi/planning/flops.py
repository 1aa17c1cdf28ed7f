"""FLOPs of a run: every matrix product, and attention over the pairs its pattern allows."""

from dataclasses import dataclass

import torch
from torch import nn

from malmoi.model import Layout, Network, count_parameters, parse_pattern
from malmoi.model.heads import POOLED_HEADS
from malmoi.training.recipe import Recipe

MAX_COUNTED_QUERIES = 4096  # longer contexts are sampled at this many evenly spaced queries


@dataclass(frozen=True)
class Flops:
    """FLOPs per training token, averaged over the phases."""

    rule: float  # 6 per weight (Kaplan et al. 2020 §2.1): what papers report
    exact: float  # every product, forward and backward
    again: float  # recomputed by gradient checkpointing; 0 without

    @property
    def done(self) -> float:
        """FLOPs that the hardware executes."""
        return self.exact + self.again


def flops(network: Network, recipe: Recipe) -> Flops:
    """Counts the FLOPs of a recipe; a backward pass costs twice the forward pass.

    Each product is differentiated with respect to its input and its weight.
    """
    phases = [(length, length * share) for length, share in recipe.phases]
    tokens = sum(weight for _, weight in phases)
    layers = sum(weight * _layers(network, length) for length, weight in phases) / tokens
    heads = sum(weight * _heads(network, recipe, length) for length, weight in phases) / tokens
    around = heads + 2.0 * _matrices(network.trunk.embed.project)
    c = recipe.train
    recomputed = c.gradient_checkpointing and c.checkpointing_keeps == "inputs"
    return Flops(
        6.0 * count_parameters(network), 3 * (layers + around), layers if recomputed else 0.0
    )


def _layers(network: Network, length: int) -> float:
    """Forward FLOPs of a token through all blocks: weights, and q·k and p·v with visible keys."""
    c = network.config
    products = 2.0 * c.depth * _matrices(network.trunk.blocks[0])
    if c.mixer != "attention":
        return products
    seen = [keys_seen(text, c.heads, length) for text in c.attention]
    keys = sum(seen[i % len(seen)] for i in range(c.depth))
    return products + 4.0 * c.heads * c.size_per_head * keys


def _heads(network: Network, recipe: Recipe, length: int) -> float:
    """A token's share of the heads, which run on every token, masked tokens or the sequence."""
    total = 0.0
    for name, head in network.heads.items():
        shares = {"lm": 1.0, "generator": 1.0, "detect": 1.0, "mlm": recipe.data.mask_rate}
        share = shares.get(name, 1 / length)
        pooler = network.pooler if name in POOLED_HEADS else None
        total += 2.0 * share * (_matrices(head) + (0 if pooler is None else _matrices(pooler)))
    return total


def keys_seen(text: str, heads: int, length: int) -> float:
    """Keys that a query sees, on average over queries and heads."""
    queries = torch.linspace(0, length - 1, min(length, MAX_COUNTED_QUERIES)).round().long()
    keys = torch.arange(length)[None]
    document = torch.zeros(1, length, dtype=torch.long)
    seen = 0.0
    for some in queries.split(256):
        layout = Layout(
            1, len(some), length, query_positions=some[None], key_positions=keys,
            query_documents=document[:, : len(some)], key_documents=document,
        )  # fmt: skip
        mask = parse_pattern(text, heads).mask(layout).expand(-1, -1, len(some), length)
        seen += mask.float().mean((0, 1)).sum().item()
    return seen / len(queries)


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


# Compute-optimal tokens for a model's size: two laws, which disagree


@dataclass(frozen=True)
class Optimal:
    """Optimal tokens for this model by both laws, and Hoffmann's model for the same FLOPs."""

    kaplan: float
    hoffmann: float
    same_parameters: float
    same_tokens: float


def optimal(blocks: int, parameters: int, flops: float) -> Optimal:
    """Kaplan counts weights without embeddings, Hoffmann all; 6·N·20·N = C gives N for C FLOPs."""
    size = (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5
    hoffmann, same = (TOKENS_PER_PARAMETER * count for count in (parameters, size))
    return Optimal(kaplan_tokens(blocks), hoffmann, size, same)


TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 table 3, as commonly rounded


def kaplan_tokens(weights: float) -> float:
    """Kaplan et al. 2020 table 6, solved for N; GPT-3 followed it.

    N = 1.3e9·C^0.73 and D = 2e10·C^0.27, C in PF-days.
    """
    return 2e10 * float((weights / 1.3e9) ** (0.27 / 0.73))
