"""Loss spikes: the trainer rolls back to its last saved state and skips the data since."""

import math

from malmoi.training.state import Position

SPIKE_DEVIATIONS = 8.0  # standard deviations above the running mean, and …
SPIKE_NATS = 1.0  # … at least this much
SPIKE_WARMUP_STEPS = 100  # before this step the loss falls too fast to tell


def is_spike(p: Position, loss: float, phase: int) -> bool:
    """Whether the loss is not finite or far above the phase's running mean; if not, updates it."""
    # Losses of another length do not compare: BERT's jumps when it goes from 128 to 512 tokens.
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
