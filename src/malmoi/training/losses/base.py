"""Objectives add and scale: `mlm() + nsp()`, `classify() + 0.5 * lm()`. One operator, one training
step.

A term is a *sum* of losses over labels and the name of those labels; the trainer divides by how
many there are in the whole step, so that micro-batches, several processes and padding change
nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from malmoi.model import Network

IGNORE_LABEL = -100  # the label of what is not judged
# of a batch, beside its tokens
MODEL_INPUTS = ("segments", "keep", "positions", "documents", "bounds")
TensorBatch = Mapping[str, Tensor]


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: the hidden states, and the network whose heads read them."""

    network: Network
    hidden: Tensor  # [B, T, D]
    batch: TensorBatch

    @classmethod
    def of(cls, network: Network, batch: TensorBatch) -> "ForwardPass":
        inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
        masked = network.config.both_ways and "mlm_labels" in batch
        reading = network.masked() if masked else network
        return cls(network, reading.hidden(batch["tokens"], **inputs), batch)

    def scores(self, head: str) -> Tensor:
        return self.network.read(
            head, self.hidden, self.batch.get("keep"), None, self.batch.get("firsts")
        )


@dataclass(frozen=True)
class Term:
    """One loss: its head, the labels it is counted by, and the sum of it over a pass."""

    head: str
    labels: str
    total: Callable[[ForwardPass], Tensor]
    weight: float = 1.0
    name: str = ""  # what its loss is told as; none: as its head

    @property
    def metric_name(self) -> str:
        return self.name or self.head


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms over the same pass."""

    terms: tuple[Term, ...]

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(term.head for term in self.terms))

    def __add__(self, other: "Objective") -> "Objective":
        return Objective(self.terms + other.terms)

    def __rmul__(self, weight: float) -> "Objective":
        return Objective(tuple(replace(term, weight=weight * term.weight) for term in self.terms))

    def __call__(
        self, done: ForwardPass, counts: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimise, and each term's own mean loss. `counts` says how many labels
        there are in all; a pass may hold the labels of some terms only.
        """
        terms = [term for term in self.terms if term.labels in done.batch]
        means = [term.total(done) / counts[term.labels] for term in terms]
        loss = torch.stack(
            [term.weight * mean for term, mean in zip(terms, means, strict=True)]
        ).sum()
        told: dict[str, Tensor] = {}
        for term, mean in zip(terms, means, strict=True):
            told[term.metric_name] = told.get(term.metric_name, 0) + mean.detach()
        return loss, told


def count_labels(objective: Objective, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How many labels of each kind a batch holds."""
    kinds = [term.labels for term in objective.terms if term.labels in batch]
    return {kind: (batch[kind] != IGNORE_LABEL).sum() for kind in kinds}
