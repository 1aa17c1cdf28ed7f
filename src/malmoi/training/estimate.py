"""Estimates a run before it starts: weights, tokens, memory, and time on this machine."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from malmoi.config import ModelConfig
from malmoi.model import Network, count_parameters
from malmoi.system.machine import per_device, pick_device
from malmoi.training.budget import Budget, steps_per_sample
from malmoi.training.device import choose_execution, first_micro, flops_per_token, measured_flops
from malmoi.training.losses import objective
from malmoi.training.losses.linear_xent import MAX_LOGITS
from malmoi.training.recipe import Recipe

# of an epoch where no text is known: BooksCorpus, 985M words (Zhu et al. 2015), at 1.2 tokens each
BOOKS_TOKENS = 1_180_000_000
EXPECTED_UTILISATION = 0.4  # of the measured peak: what a typical run reaches


@dataclass(frozen=True)
class Estimate:
    """Expected cost of a run; bytes and seconds are rough."""

    parameters: int
    steps: int  # 0: as many as the minutes allow
    tokens: int
    seconds: float
    weights: int  # bytes, as are the next three
    gradients: int
    optimizer: int
    activations: int
    ceiling: float  # FLOP/s of a matrix product, measured here

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory}


def estimate_run(
    recipe: Recipe,
    *,
    tokenizer: Path | None = None,
    start: str | Path | None = None,
    device: str | None = None,
) -> tuple[Recipe, Estimate]:
    """Estimates a recipe's cost before the text is read; writes nothing."""
    recipe = resolve_for_estimate(recipe, tokenizer, start)
    network = meta_network(recipe)
    execution = choose_execution(pick_device(device), recipe.train)
    count = count_parameters(network)
    rate = measured_flops(execution)
    per_token = flops_per_token(recipe.model, count, int(recipe.mean_length))
    steps, tokens, seconds = budget_of(recipe, per_token, EXPECTED_UTILISATION * rate)
    longest = max(length for length, _ in recipe.phases)
    micro = recipe.train.micro or first_micro(
        recipe.model, longest, recipe.train.batch, execution.device
    )
    made = Estimate(
        parameters=count,
        steps=steps,
        tokens=tokens,
        seconds=seconds,
        weights=4 * count,
        gradients=4 * count,
        optimizer=optimizer_bytes(network, recipe),
        activations=activation_bytes(
            recipe, micro, half=execution.half, device=execution.device.type
        ),
        ceiling=rate,
    )
    return recipe, made


def resolve_for_estimate(
    recipe: Recipe, tokenizer: Path | None = None, start: str | Path | None = None
) -> Recipe:
    """The recipe with the model of `start`, or with the vocabulary size of its tokenizer."""
    if start is not None:
        from malmoi.checkpoint import read_checkpoint

        return replace(recipe, model=read_checkpoint(start).network.config).check()
    vocab = recipe.tokenizer.vocab
    if tokenizer is not None:
        from malmoi.tokenizer import Tokenizer

        vocab = Tokenizer.load(tokenizer).vocab_size
    return replace(recipe, model=replace(recipe.model, vocab=vocab))


def meta_network(recipe: Recipe) -> Network:
    """Builds the network on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return Network(recipe.model, dict.fromkeys(objective(recipe.objective).heads, 0))


def exact_parameters(c: ModelConfig) -> int:
    """The weights as papers count them: an encoder's without the heads it is pre-trained with."""
    encoder = c.pool != "last"
    with torch.device("meta"):
        network = Network(c, {} if encoder else {"lm": 0}, pooler=encoder and c.pooler == "tanh")
    return count_parameters(network)


def budget_of(recipe: Recipe, per_token: float, speed: float) -> tuple[int, int, float]:
    """Steps, tokens and seconds of the budget at this speed; a budget in minutes has no steps."""
    length = recipe.mean_length
    budget = Budget.of(recipe, BOOKS_TOKENS / length)
    if not budget.steps:
        return 0, int(budget.seconds * speed / per_token), budget.seconds
    tokens = budget.tokens or math.ceil(budget.steps / steps_per_sample(recipe.train) * length)
    return budget.steps, tokens, tokens * per_token / speed


def optimizer_bytes(
    network: Network, recipe: Recipe, size: Callable[[torch.Tensor], int] = torch.Tensor.numel
) -> int:
    """Two fp32 moments per weight, one with Muon; `size` is the share of weights held here."""
    matrices = sum(size(p) for p in network.trunk.blocks.parameters() if p.dim() == 2)
    return 8 * sum(map(size, network.parameters())) - (
        4 * matrices if recipe.train.optimizer == "muon" else 0
    )


def activation_bytes(recipe: Recipe, micro: int, *, half: bool, device: str) -> int:
    """Bytes kept for the backward pass: activations, a chunk of logits, the head's gradient."""
    config = recipe.model
    length = max(length for length, _ in recipe.phases)
    number = 2 if half else 4
    whole = 20 * config.width + 3 * config.mlp_width
    if device == "cuda" and recipe.train.compile is not False:
        # the compiler recomputes what is cheap; fitted to BERT-base and GPT-2 on an H200
        whole = (19 * config.width + 4 * config.mlp_width) // 2
    layers = config.depth * whole
    if recipe.train.gradient_checkpointing:
        layers = config.depth * 2 * config.width + whole
    piece = min(per_device(MAX_LOGITS, device), micro * length * config.vocab)
    slope = (4 + number) * config.vocab * config.token_width
    return micro * length * number * (layers + 20 * config.width) + 2 * number * piece + slope
