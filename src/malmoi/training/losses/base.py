"""Objectives that add and scale: `mlm() + nsp()`, `classify() + 0.5 * lm()`.

A term is a *sum* of losses over labels and the name of those labels; the trainer divides by their
number in the whole step, so that micro-batches, several processes and padding change nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from malmoi.model import Network
from malmoi.model.heads import Generator

IGNORE_LABEL = -100  # the label of positions without a loss
# optional inputs of a batch, besides its tokens
MODEL_INPUTS = (
    *("segments", "keep", "positions", "documents", "bounds"),
    *("source", "source_keep", "features"),  # of an encoder, or before the text
    "cache",  # the memory of earlier segments
)
TensorBatch = Mapping[str, Tensor]


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: the hidden states, and the network whose heads read them."""

    network: Network
    hidden: Tensor  # [B, T, D]
    batch: TensorBatch
    masked: Tensor | None = None  # the generator's hidden states at the masked tokens [B, T, D]
    replaced: Tensor | None = None  # which tokens the generator replaced [B, T]

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
        """Runs the network on text whose masks the generator filled.

        Clark et al. 2020 eq. 1 and §3.1: no gradient flows through the sampling.
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
        """The hidden states of the tokens to predict [M, D]."""
        states = self.hidden if self.masked is None else self.masked
        return states.flatten(0, 1)[self.batch["mlm_slots"]]

    def scores(self, head: str) -> Tensor:
        return self.network.read(
            head, self.hidden, self.batch.get("keep"), None, self.batch.get("firsts")
        )


@dataclass(frozen=True)
class Term:
    """One loss: its head, the labels that normalise it, and its sum over a pass."""

    head: str
    labels: str
    total: Callable[[ForwardPass], Tensor]
    weight: float = 1.0
    name: str = ""  # the metric's name; default: its head's
    weights: str = ""  # what each label counts, where not all count 1
    divisible: bool = True  # into passes over some of the rows; not if rows are compared

    @property
    def metric_name(self) -> str:
        return self.name or self.head

    def count(self, batch: TensorBatch) -> Tensor:
        """Counts the labels in a batch, or the tokens that are not padding."""
        if self.weights:
            return batch[self.weights].sum()
        if self.labels != "tokens":
            return (batch[self.labels] != IGNORE_LABEL).sum()
        return real_tokens(batch).sum()


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms over the same forward pass."""

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
        """Returns the loss to minimise, and each term's mean loss.

        `counts` are the labels of the whole step; a pass may hold labels of some terms only.
        """
        terms = [term for term in self.terms if term.labels in done.batch]
        means = [term.total(done) / counts[term.labels] for term in terms]
        loss = torch.stack(
            [term.weight * mean for term, mean in zip(terms, means, strict=True)]
        ).sum()
        metrics: dict[str, Tensor] = {}
        for term, mean in zip(terms, means, strict=True):
            metrics[term.metric_name] = metrics.get(term.metric_name, 0) + mean.detach()
        return loss, metrics


def count_labels(objective: Objective, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Counts the labels of each kind in a batch."""
    return {term.labels: term.count(batch) for term in objective.terms if term.labels in batch}


def real_tokens(batch: TensorBatch) -> Tensor:
    """Which tokens are not padding [B, T]; in a packed row, padding is the last document."""
    if "keep" in batch:
        return batch["keep"].bool()
    if "bounds" in batch:
        return batch["documents"] < len(batch["firsts"])
    return torch.ones_like(batch["tokens"], dtype=torch.bool)
