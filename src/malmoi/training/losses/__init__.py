"""Training objectives: losses of one forward pass that can be added and scaled."""

from malmoi.training.losses.base import IGNORE_LABEL, ForwardPass, Objective, Term, count_labels
from malmoi.training.losses.language import OBJECTIVES, both, lm, mlm, nsp, objective

__all__ = ["IGNORE_LABEL", "OBJECTIVES", "ForwardPass", "Objective", "Term", "count_labels"]
__all__ += ["both", "lm", "mlm", "nsp", "objective"]
