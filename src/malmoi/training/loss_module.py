"""Forward pass and loss as one module, which DDP, FSDP2 and torch.compile wrap; validation."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from malmoi.model import Network
from malmoi.model.recurrent import SegmentMemory
from malmoi.training.device import Execution, uncompiled
from malmoi.training.feed import PhaseFeed
from malmoi.training.losses import IGNORE_LABEL, ForwardPass, Objective
from malmoi.training.losses.base import judged_tokens
from malmoi.training.parallel import reshard
from malmoi.training.recipe import TrainConfig

MAX_BATCH_TOKENS = 8192  # tokens per batch
MAX_VALID_BATCHES = 64


class LossModule(nn.Module):
    def __init__(self, network: Network, objective: Objective) -> None:
        super().__init__()
        self.network = network
        self.objective = objective
        # what rows of contiguous text remember, in training and in validation: by their first row
        self.memories: dict[tuple[bool, int], SegmentMemory] = {}

    def _with_memory(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if "stretch" not in batch:
            return batch
        key = (self.training, batch["stretch"].row)
        memory = self.memories.setdefault(key, SegmentMemory(self.network.config.memory))
        if not batch["stretch"].segment:
            memory.clear()
        return {**batch, "cache": memory}

    def memory_tensors(self) -> dict[str, Tensor]:
        """What training remembers, by name, to be saved."""
        return {
            f"memory.{row}.{layer}": states
            for (training, row), memory in self.memories.items()
            for layer, states in (memory.coming or memory.past).items()
            if training
        }

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the saved memory and discards any other."""
        self.memories = {}
        for name, states in tensors.items():
            kind, *numbers = name.split(".")
            if kind == "memory":
                row, layer = map(int, numbers)
                fresh = SegmentMemory(self.network.config.memory)
                memory = self.memories.setdefault((True, row), fresh)
                memory.past[layer] = states.to(self.network.device)

    def forward(
        self, batch: Mapping[str, Any], counts: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's share of the step's loss, and each head's own loss."""
        return self.objective(ForwardPass.of(self.network, self._with_memory(batch)), counts)

    @torch.no_grad()
    def measure(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns validation sums by head: loss, correct predictions (if cheap) and labels."""
        done = ForwardPass.of(self.network, self._with_memory(batch))
        sums = {}
        terms = [term for term in self.objective.terms if term.labels in batch]
        for term in terms:
            sums[f"{term.metric_name}_loss"] = _widest(term.total(done))
            sums[f"{term.metric_name}_count"] = _widest(term.count(batch))
            if term.labels in ("mlm_labels", "own_labels"):
                scores = self.network.heads[term.head](done.at_masks(term.head))
                sums[f"{term.metric_name}_right"] = _right(scores, batch[term.labels])
        if done.replaced is not None:
            found = (done.scores("detect") > 0) == done.replaced
            sums["detect_right"] = _widest((found & judged_tokens(batch)).sum())
        if "nsp_labels" in batch and "nsp" in self.network.heads:
            sums["nsp_right"] = _right(done.scores("nsp"), batch["nsp_labels"])
        return sums


def add_by_name(totals: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds numbers to those of the same names; a new name begins with its number."""
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def _right(scores: Tensor, labels: Tensor) -> Tensor:
    return _widest(((scores.argmax(-1) == labels) & (labels != IGNORE_LABEL)).sum())


def _widest(total: Tensor) -> Tensor:
    """A sum in the widest type the device has: Apple GPUs have no float64."""
    return total.float() if total.device.type == "mps" else total.double()


def guessing_loss(objective: Objective, frequency_loss: float) -> float:
    """The loss of a model that ignores its input: token frequencies, and halves for yes or no."""
    known = dict.fromkeys(("nsp", "detect"), math.log(2))
    return sum(term.weight * known.get(term.head, frequency_loss) for term in objective.terms)


def summarize_validation(
    sums: Mapping[str, float], weights: Mapping[str, float]
) -> dict[str, float]:
    """Turns validation sums into metrics: loss, accuracy of each head, perplexity of an lm."""
    heads = [name.removesuffix("_loss") for name in sums if name.endswith("_loss")]
    means = {head: sums[f"{head}_loss"] / max(1.0, sums[f"{head}_count"]) for head in heads}
    metrics = {"valid_loss": sum(weights[head] * mean for head, mean in means.items())}
    if len(heads) > 1:
        metrics |= {f"{head}_loss": mean for head, mean in means.items()}
    metrics |= {
        f"{head}_accuracy": sums[f"{head}_right"] / max(1.0, sums[f"{head}_count"])
        for head in heads
        if f"{head}_right" in sums
    }
    if "lm" in means:
        metrics["perplexity"] = float(torch.tensor(means["lm"]).exp())
    return metrics


@torch.no_grad()
def validate(
    loss_module: LossModule, valid: PhaseFeed, config: TrainConfig, execution: Execution
) -> dict[str, float]:
    """The loss and each head's metrics on held-out text, the same batches every time."""
    sums: dict[str, Tensor] = {}
    size = valid.rows or max(1, min(config.batch, valid.epoch, MAX_BATCH_TOKENS // valid.length))
    wanted = config.valid_batches * config.batch // size
    for i in range(max(1, min(wanted, valid.epoch // size, MAX_VALID_BATCHES))):
        for micro in valid.of_each_kind(i * size, size, execution.device):
            with execution.computing(), uncompiled():
                add_by_name(sums, loss_module.measure(micro.tensors))
    reshard(loss_module)
    weights = {term.metric_name: term.weight for term in loss_module.objective.terms}
    return summarize_validation({name: float(value) for name, value in sums.items()}, weights)
