"""A loss that leaps: the trainer goes back to its last saved state and skips what led there."""

import math

from malmoi.training.state import Position

SPIKE_DEVIATIONS = 8.0  # standard deviations above the running mean, and …
SPIKE_NATS = 1.0  # … so much at least
SPIKE_WARMUP_STEPS = 100  # steps: before that the loss falls too fast to judge


def is_spike(p: Position, loss: float, phase: int) -> bool:
    """NaN, infinity, or far above the phase's running mean; otherwise the mean moves on."""
    # longer samples are another measure: BERT's loss leaps where it goes from 128 to 512
    if p.phase != phase:
        p.phase = phase
        p.mean = 0.0
        p.spread = 0.0
    if not math.isfinite(loss):
        return True
    if (
        p.step > SPIKE_WARMUP_STEPS
        and p.mean
        and loss > p.mean + max(SPIKE_NATS, SPIKE_DEVIATIONS * p.spread**0.5)
    ):
        return True
    p.spread = 0.98 * p.spread + 0.02 * (loss - p.mean) ** 2 if p.mean else 0.0
    p.mean = 0.98 * p.mean + 0.02 * loss if p.mean else loss
    return False
