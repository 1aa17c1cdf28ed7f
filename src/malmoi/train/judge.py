"""The pass of a training step as one module: the network runs, the objective judges. DDP, FSDP2 and compile wrap it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from malmoi.model import Network
from malmoi.objectives import IGNORE, Objective, Pass


class Judge(nn.Module):
    def __init__(self, network: Network, objective: Objective) -> None:
        super().__init__()
        self.network, self.objective = network, objective

    def forward(self, batch: Mapping[str, Any], counts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch as its part of the whole step, and each head's own."""
        return self.objective(Pass.of(self.network, batch), counts)

    @torch.no_grad()
    def measure(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Sums for validation: of each head its loss, how many were right (where that is cheap), and the labels."""
        done, sums = Pass.of(self.network, batch), {}
        for term in self.objective.terms:
            sums[f"{term.told}_loss"] = _widest(term.total(done))
            sums[f"{term.told}_count"] = _widest((batch[term.labels] != IGNORE).sum())
        if "mlm_labels" in batch:
            chosen = done.hidden.flatten(0, 1)[batch["mlm_slots"]]
            sums["mlm_right"] = _right(self.network.heads["mlm"](chosen), batch["mlm_labels"])
        if "nsp_labels" in batch and "nsp" in self.network.heads:
            sums["nsp_right"] = _right(done.scores("nsp"), batch["nsp_labels"])
        return sums


def _right(scores: Tensor, labels: Tensor) -> Tensor:
    return _widest(((scores.argmax(-1) == labels) & (labels != IGNORE)).sum())


def _widest(total: Tensor) -> Tensor:
    """A sum that others are added to, in as many bits as the device has: an Apple GPU knows no doubles."""
    return total.float() if total.device.type == "mps" else total.double()


def guessing_loss(objective: Objective, vocab: int) -> float:
    """The loss of a model that takes every token for equally likely, and every next sentence."""
    return sum(term.weight * math.log(2 if term.head == "nsp" else vocab) for term in objective.terms)


def summarise(sums: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Validation sums as metrics: the loss, each head's accuracy, a language model's perplexity."""
    heads = [name.removesuffix("_loss") for name in sums if name.endswith("_loss")]
    means = {head: sums[f"{head}_loss"] / max(1.0, sums[f"{head}_count"]) for head in heads}
    metrics = {"valid_loss": sum(weights[head] * mean for head, mean in means.items())}
    if len(heads) > 1:
        metrics |= {f"{head}_loss": mean for head, mean in means.items()}
    for head in heads:
        if f"{head}_right" in sums:
            metrics[f"{head}_accuracy"] = sums[f"{head}_right"] / max(1.0, sums[f"{head}_count"])
    if "lm" in means:
        metrics["perplexity"] = float(torch.tensor(means["lm"]).exp())
    return metrics
