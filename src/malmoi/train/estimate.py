"""What a run would take, before it starts: weights, tokens, memory, time on this machine."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from malmoi.model import Network, parameters
from malmoi.objectives import objective
from malmoi.objectives.linear_xent import PIECE
from malmoi.train.device import Machine, ceiling, choose, first_micro, flops_per_token
from malmoi.train.parallel import pick_device
from malmoi.train.recipe import Recipe
from malmoi.train.trainer import Budget

UTILISATION = 0.4  # of the measured ceiling: what a fair run reaches


@dataclass(frozen=True)
class Estimate:
    """Expectations; bytes and seconds are rough."""

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


def estimate(
    recipe: Recipe, *, tokenizer: Path | None = None, start: str | Path | None = None, device: str | None = None
) -> tuple[Recipe, Estimate]:
    """The recipe as far as it is known before the text is read, and what it would take; writes nothing."""
    recipe = _resolved(recipe, tokenizer, start)
    network = _hollow(recipe)
    machine = choose(pick_device(device), recipe.train)
    count, rate = parameters(network), ceiling(machine)
    steps, tokens, seconds = _budget(recipe, count, UTILISATION * rate)
    made = Estimate(
        parameters=count,
        steps=steps,
        tokens=tokens,
        seconds=seconds,
        weights=4 * count,
        gradients=4 * count,
        optimizer=_optimizer_bytes(network, recipe),
        activations=_activation_bytes(recipe, machine),
        ceiling=rate,
    )
    return recipe, made


def _resolved(recipe: Recipe, tokenizer: Path | None, start: str | Path | None) -> Recipe:
    if start is not None:
        from malmoi.checkpoint import read

        return replace(recipe, model=read(start).network.config).check()
    vocab = recipe.tokenizer.vocab
    if tokenizer is not None:
        from malmoi.tokenizer import Tokenizer

        vocab = Tokenizer.load(tokenizer).vocab_size
    return replace(recipe, model=replace(recipe.model, vocab=vocab))


def _hollow(recipe: Recipe) -> Network:
    """The network without memory for its weights."""
    with torch.device("meta"):
        return Network(recipe.model, dict.fromkeys(objective(recipe.objective).heads, 0))


def _budget(recipe: Recipe, count: int, speed: float) -> tuple[int, int, float]:
    """Steps, tokens and seconds of the budget at so many FLOP/s; a budget of minutes has no steps."""
    budget, length = Budget.of(recipe), sum(length * share for length, share in recipe.phases)
    per_token = flops_per_token(recipe.model, count, int(length))
    if not budget.steps:
        return 0, int(budget.seconds * speed / per_token), budget.seconds
    c = recipe.train
    grown = 1 - c.batch_ramp * (1 - (c.batch_start or c.batch) / c.batch) / 2
    tokens = math.ceil(budget.steps * c.batch * length * grown)
    return budget.steps, tokens, tokens * per_token / speed


def _optimizer_bytes(network: Network, recipe: Recipe) -> int:
    """Two fp32 moments a weight; Muon keeps one for the matrices of the blocks."""
    matrices = sum(p.numel() for p in network.trunk.blocks.parameters() if p.dim() == 2)
    return 8 * parameters(network) - (4 * matrices if recipe.train.optimizer == "muon" else 0)


def _activation_bytes(recipe: Recipe, machine: Machine) -> int:
    """What the backward pass keeps of one pass's tokens, and the logits of one piece."""
    config, c, length = recipe.model, recipe.train, max(length for length, _ in recipe.phases)
    micro = c.micro or first_micro(config, length, c.batch, machine.device)
    number = 2 if machine.half else 4
    layer = 2 * config.width if c.rematerialise else 20 * config.width + 3 * config.mlp_width
    piece = min(PIECE.get(machine.device.type, PIECE["cpu"]), micro * length * config.vocab)
    return micro * length * number * (config.depth * layer + 20 * config.width) + 12 * piece
