"""Validation on held-out text, with the same batches every time."""

import torch
from torch import Tensor

from malmoi.training.device import Execution
from malmoi.training.feed import PhaseFeed
from malmoi.training.loss_module import LossModule, summarize_validation
from malmoi.training.parallel import reshard
from malmoi.training.recipe import TrainConfig

MAX_BATCH_TOKENS = 8192  # tokens per batch
MAX_VALID_BATCHES = 64


@torch.no_grad()
def validate(
    loss_module: LossModule, valid: PhaseFeed, config: TrainConfig, execution: Execution
) -> dict[str, float]:
    """Returns the loss and each head's metrics, weighted as in the objective."""
    sums: dict[str, Tensor] = {}
    limit = max(1, min(config.batch, valid.epoch, MAX_BATCH_TOKENS // valid.length))
    size = valid.rows or limit
    wanted = config.valid_batches * config.batch // size
    for i in range(max(1, min(wanted, valid.epoch // size, MAX_VALID_BATCHES))):
        for micro in valid.of_each_kind(i * size, size, execution.device):
            with execution.computing(), torch.compiler.set_stance("force_eager"):
                for name, value in loss_module.measure(micro.tensors).items():
                    sums[name] = sums[name] + value if name in sums else value
    reshard(loss_module)
    weights = {term.metric_name: term.weight for term in loss_module.objective.terms}
    return summarize_validation({name: float(value) for name, value in sums.items()}, weights)
