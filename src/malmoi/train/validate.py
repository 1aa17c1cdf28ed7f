"""What a network is worth on text that is held out: the same batches every time."""

import torch
from torch import Tensor

from malmoi.train.device import Execution
from malmoi.train.feed import Feed
from malmoi.train.judge import Judge, summarise
from malmoi.train.parallel import settle
from malmoi.train.recipe import TrainConfig

MOST_TOKENS = 8192  # of a batch
MOST_BATCHES = 64


@torch.no_grad()
def validate(judge: Judge, valid: Feed, config: TrainConfig, execution: Execution) -> dict[str, float]:
    """The loss, and each head's measures, as the objective of the judge weighs them."""
    sums: dict[str, Tensor] = {}
    size = max(1, min(config.batch, valid.epoch, MOST_TOKENS // valid.length))
    wanted = config.valid_batches * config.batch // size
    for i in range(max(1, min(wanted, valid.epoch // size, MOST_BATCHES))):
        batch = valid.micro(i * size, size, execution.device).tensors
        with execution.computing(), torch.compiler.set_stance("force_eager"):
            for name, value in judge.measure(batch).items():
                sums[name] = sums[name] + value if name in sums else value
    settle(judge)
    weights = {term.told: term.weight for term in judge.objective.terms}
    return summarise({name: float(value) for name, value in sums.items()}, weights)
