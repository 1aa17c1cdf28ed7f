"""What is minimised: objectives read scores off one pass of the network; they add and scale."""

from malmoi.objectives.base import IGNORE, Objective, Pass, count_labels
from malmoi.objectives.language import OBJECTIVES, lm, mlm, nsp, objective

__all__ = ["IGNORE", "OBJECTIVES", "Objective", "Pass", "count_labels", "lm", "mlm", "nsp", "objective"]
