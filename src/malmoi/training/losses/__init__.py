"""Training objectives: losses of one forward pass that can be added and scaled."""

from malmoi.training.data.loader import IGNORE_LABEL
from malmoi.training.losses.base import (
    OBJECTIVES,
    ForwardPass,
    Objective,
    Term,
    both,
    count_labels,
    lm,
    mlm,
    nsp,
    objective,
)

__all__ = [
    "IGNORE_LABEL", "OBJECTIVES", "ForwardPass", "Objective", "Term", "both", "count_labels",
    "lm", "mlm", "nsp", "objective",
]  # fmt: skip
