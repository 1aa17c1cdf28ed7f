"""Objectives add and scale: `mlm() + nsp()`, `classify() + 0.5 * lm()`. One operator, one training
step.

A term is a *sum* of losses over labels and the name of those labels; the trainer divides by how
many there are in the whole step, so that micro-batches, several processes and padding change
nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from malmoi.model import Network
from malmoi.model.heads import Generator

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
    masked: Tensor | None = None  # what a generator made of the masked tokens [B, T, D]
    replaced: Tensor | None = None  # which tokens are no longer the text's own [B, T]

    @classmethod
    def of(cls, network: Network, batch: TensorBatch) -> "ForwardPass":
        inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
        if "generator" in network.heads:
            return cls._of_electra(network, batch, inputs)
        masked = network.config.both_ways and "mlm_labels" in batch
        reading = network.masked() if masked else network
        return cls(network, reading.hidden(batch["tokens"], **inputs), batch)

    @classmethod
    def _of_electra(
        cls, network: Network, batch: TensorBatch, inputs: TensorBatch
    ) -> "ForwardPass":
        """The generator fills the masks, and the network reads what it drew (Clark et al. 2020 eq.
        1 and §3.1: no gradient goes through the draw).
        """
        generator = cast(Generator, network.heads["generator"])
        tokens, slots, labels = batch["tokens"], batch["mlm_slots"], batch["mlm_labels"]
        masked = generator.trunk(tokens, **inputs)
        with torch.no_grad():
            scores = generator.head(masked.flatten(0, 1)[slots]).float()
            drawn = torch.multinomial(scores.softmax(-1), 1)[:, 0]
            here = labels != IGNORE_LABEL
            own = tokens.flatten()[slots]
            original = tokens.flatten().index_put((slots,), torch.where(here, labels, own))
            filled = original.index_put((slots,), torch.where(here, drawn, own))
        replaced = (filled != original).view_as(tokens)
        hidden = network.hidden(filled.view_as(tokens), **inputs)
        return cls(network, hidden, batch, masked, replaced)

    @property
    def at_masks(self) -> Tensor:
        """The hidden states of the tokens that are to be predicted [M, D]."""
        states = self.hidden if self.masked is None else self.masked
        return states.flatten(0, 1)[self.batch["mlm_slots"]]

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
    name: str = ""  # the name of its loss; default: its head's

    @property
    def metric_name(self) -> str:
        return self.name or self.head

    def count(self, batch: TensorBatch) -> Tensor:
        """The number of labels in a batch, or of tokens that are not padding."""
        if self.labels != "tokens":
            return (batch[self.labels] != IGNORE_LABEL).sum()
        return real_tokens(batch).sum()


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
    return {term.labels: term.count(batch) for term in objective.terms if term.labels in batch}


def real_tokens(batch: TensorBatch) -> Tensor:
    """Which tokens of a batch are no padding [B, T]; a packed row ends with a document of it."""
    if "keep" in batch:
        return batch["keep"].bool()
    if "bounds" in batch:
        return batch["documents"] < len(batch["firsts"])
    return torch.ones_like(batch["tokens"], dtype=torch.bool)
