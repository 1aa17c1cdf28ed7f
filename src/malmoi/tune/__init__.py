"""Fine-tuning: a pre-trained network, a task, one new layer; and how well it then does."""

from malmoi.tune.evaluate import evaluate
from malmoi.tune.finetune import Result, finetune

__all__ = ["Result", "evaluate", "finetune"]
