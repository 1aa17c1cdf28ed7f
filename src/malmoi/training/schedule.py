"""The learning rate as a share of its peak, by the share of the budget used."""

import math
from collections.abc import Callable
from typing import Protocol

from malmoi.system.plugins import Registry

# share of the expected updates: 45 steps with a warm-up of 100 would never reach half their rate
MOST_WARMUP = 0.1
INVERSE_SQRT = "inverse_sqrt"  # the one schedule without an end: by steps, not by progress


class RateSettings(Protocol):
    """The settings of a learning rate; those of training are these."""

    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def floor(self) -> float: ...
    @property
    def cooldown(self) -> float: ...
    @property
    def decay_until(self) -> float: ...


# (progress after the warm-up in [0, 1], settings) → [floor, 1]
Schedule = Callable[[float, RateSettings], float]


def linear_decay(progress: float, c: RateSettings) -> float:
    """BERT and GPT-1's fine-tuning: linear decay."""
    return 1 - (1 - c.floor) * progress


def cosine_decay(progress: float, c: RateSettings) -> float:
    """GPT-1 §4.1, GPT-3 appendix B: half a cosine down to the floor."""
    return c.floor + (1 - c.floor) * (1 + math.cos(math.pi * progress)) / 2


def wsd(progress: float, c: RateSettings) -> float:
    """Warm-up, stable, decay: flat, then straight down in the last `cooldown` of the budget."""
    return 1 - (1 - c.floor) * max(0.0, 1 - (1 - progress) / c.cooldown)


def constant_rate(progress: float, c: RateSettings) -> float:
    return 1.0


def inverse_sqrt(step: int, warmup: float) -> float:
    """Vaswani et al. 2017 eq. 3, as a share of its peak, which is reached after the warm-up."""
    return min(step / warmup, math.sqrt(warmup / step))


SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    {"linear": linear_decay, "cosine": cosine_decay, "wsd": wsd, "constant": constant_rate},
)


def warmup_steps(c: RateSettings, expected: int) -> float:
    """Warm-up steps: the recipe's, but at most a tenth of the expected updates."""
    return min(c.warmup_steps, max(1.0, MOST_WARMUP * expected)) if expected else c.warmup_steps


def rate_at(step: int, progress: float, c: RateSettings, expected: int = 0) -> float:
    """The learning rate's share of its peak at this step: warm-up, then the schedule.

    The warm-up is a share of the budget with a minimum of steps. `expected` updates fit into the
    budget (0: not known). If that estimate was too high, the used share of the budget ends the
    warm-up instead of the count of steps.
    """
    steps = warmup_steps(c, expected)
    if c.schedule == INVERSE_SQRT:  # by steps alone: it has no end
        # post-norm does not bear the whole rate after a warm-up that a small budget shortened
        peak = math.sqrt(steps / c.warmup_steps) if c.warmup_steps else 1.0
        return peak * inverse_sqrt(step + 1, max(1.0, steps))
    share = steps / expected if expected else 0.0
    warm = min(
        1.0,
        max((step + 1) / steps, progress / share if share else 0.0) if steps else 1.0,
        (progress + 1e-9) / c.warmup if c.warmup else 1.0,
    )
    start = max(c.warmup, share)
    after = max(0.0, progress - start) / max(1e-9, c.decay_until - start)
    return max(warm, 1e-3) * SCHEDULES[c.schedule](min(1.0, after), c)
