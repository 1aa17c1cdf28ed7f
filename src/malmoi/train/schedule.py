"""The learning rate as a share of its peak, by how much of the budget is used. A schedule is one function."""

import math
from collections.abc import Callable

from malmoi.train.recipe import TrainConfig

Shape = Callable[[float, TrainConfig], float]  # (progress after the warm-up in [0, 1], settings) → [floor, 1]


def linear(progress: float, c: TrainConfig) -> float:
    """BERT and GPT-1's fine-tuning: straight down."""
    return 1 - (1 - c.floor) * progress


def cosine(progress: float, c: TrainConfig) -> float:
    """GPT-1 §4.1, GPT-3 appendix B: half a cosine down to the floor."""
    return c.floor + (1 - c.floor) * (1 + math.cos(math.pi * progress)) / 2


def wsd(progress: float, c: TrainConfig) -> float:
    """Warm-up, stable, decay: flat, then straight down in the last `cooldown` of the budget."""
    return 1 - (1 - c.floor) * max(0.0, 1 - (1 - progress) / c.cooldown)


def constant(progress: float, c: TrainConfig) -> float:
    return 1.0


SCHEDULES: dict[str, Shape] = {"linear": linear, "cosine": cosine, "wsd": wsd, "constant": constant}


def rate(step: int, progress: float, c: TrainConfig) -> float:
    """The rate's share at this step: up over the warm-up (a share of the budget, some steps at least), then down."""
    warm = min(
        1.0,
        (step + 1) / c.warmup_steps if c.warmup_steps else 1.0,
        (progress + 1e-9) / c.warmup if c.warmup else 1.0,
    )
    after = max(0.0, progress - c.warmup) / max(1e-9, 1 - c.warmup)
    return max(warm, 1e-3) * SCHEDULES[c.schedule](min(1.0, after), c)
