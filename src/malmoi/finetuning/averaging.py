"""The mean of the weights of several runs, if they belong together (Wortsman et al. 2022).

Runs that start from the same weights mostly end in one basin of the loss, where the mean is better
than each. A run that diverged, or ended in another basin, shows in the rows that all have learnt.
"""

import logging
import random
from collections.abc import Sequence

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.evaluate import predict_and_score
from malmoi.finetuning.task_data import FinetuneData
from malmoi.messages import msg
from malmoi.metrics import goodness

logger = logging.getLogger(__name__)
FIT_ROWS = 100  # training rows
WORST_FIT = 0.1  # of the first run's metric: if the mean loses more, the runs are apart


def mean_if_it_fits(work: FinetuneData, runs: Sequence[Checkpoint]) -> tuple[Checkpoint, int]:
    """The mean of the runs, or the first alone; returns also how many runs the result has.

    Runs that do not fit the training rows themselves, since they diverged, are left out.
    """
    first, *others = runs
    if not others:
        return first, 1
    fit = _fit(work, first)
    least = fit - WORST_FIT * abs(fit)
    members = [first, *(run for run in others if _fit(work, run) >= least)]
    if len(members) == 1:
        return first, 1
    alone = {name: tensor.clone() for name, tensor in first.network.state_dict().items()}
    if _fit(work, mean_weights(members)) >= least:
        return first, len(members)
    first.network.load_state_dict(alone)
    logger.warning(
        msg(
            "The mean of {members} runs does not fit the training rows, as each of them does: "
            "the first run is kept alone.",
            members=len(members),
        )
    )
    return first, 1


def mean_weights(runs: Sequence[Checkpoint]) -> Checkpoint:
    """The first model with the mean of the weights of all."""
    states = [run.network.state_dict() for run in runs]
    mean = {
        name: torch.stack([state[name].to(tensor) for state in states]).mean(0)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in states[0].items()
    }
    runs[0].network.load_state_dict(mean)
    return runs[0]


def _fit(work: FinetuneData, checkpoint: Checkpoint) -> float:
    rows = random.Random(0).sample(work.train, min(FIT_ROWS, len(work.train)))
    found = predict_and_score(work.task, rows, work.predictor(checkpoint)).metrics
    return goodness(work.primary_metric, found[work.primary_metric])
