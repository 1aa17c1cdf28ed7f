"""What is minimised: objectives read scores off one pass of the network; they add and scale."""

from malmoi.training.losses.base import IGNORE_LABEL, ForwardPass, Objective, count_labels
from malmoi.training.losses.language import OBJECTIVES, both, lm, mlm, nsp, objective

__all__ = [
    "IGNORE_LABEL",
    "OBJECTIVES",
    "ForwardPass",
    "Objective",
    "both",
    "count_labels",
    "lm",
    "mlm",
    "nsp",
    "objective",
]
