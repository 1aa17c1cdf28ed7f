"""Objectives that add and scale, and those of pre-training: `mlm() + nsp()`.

A term is a *sum* of losses over labels and the name of those labels; the trainer divides by their
number in the whole step, so that micro-batches, several processes and padding change nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model import Network
from malmoi.model.heads import Generator, LMHead
from malmoi.system.plugins import Registry
from malmoi.training.data.loader import IGNORE_LABEL
from malmoi.training.losses.linear_xent import linear_cross_entropy

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


def lm(smoothing: float = 0.0, weights: str = "") -> Objective:
    """GPT-1 eq. 1: Σ −log P(u_i | u_1 … u_{i−1}), with labels that the batch has shifted by one.

    Labels are smoothed in training only (Vaswani et al. 2017 §5.4). `weights` names the batch's
    weights of its labels.
    """

    def total(done: ForwardPass) -> Tensor:
        head = cast(LMHead, done.network.heads["lm"])
        smooth = smoothing if done.network.training else 0.0
        features = head.features(done.hidden)
        labels, counted = done.batch["lm_labels"], done.batch.get(weights)
        return linear_cross_entropy(features, head, labels, smooth, counted)

    return Objective((Term("lm", "lm_labels", total, weights=weights),))


def bilm() -> Objective:
    """Peters et al. 2018 §3.1: each token from those before it, and from those after it."""

    def backward(done: ForwardPass) -> Tensor:
        head = cast(LMHead, done.network.heads["lm"])
        tokens = done.batch["tokens"]
        features = head.backward_features(done.hidden[:, 1:])
        # a row has one token less to predict this way, and is divided by the labels of the other
        scale = tokens.size(1) / (tokens.size(1) - 1)
        return scale * linear_cross_entropy(features, head, tokens[:, :-1])

    return lm() + Objective((Term("lm", "lm_labels", backward, name="backward_lm"),))


def mlm(head_name: str = "mlm") -> Objective:
    """Devlin et al. §3.1, task 1: the original of each masked token, only at those slots."""

    def total(done: ForwardPass) -> Tensor:
        head = done.network.heads[head_name]
        head = head.head if isinstance(head, Generator) else head
        return linear_cross_entropy(head.features(done.at_masks), head, done.batch["mlm_labels"])  # type: ignore[operator, arg-type]

    return Objective((Term(head_name, "mlm_labels", total, name="mlm"),))


def both(causal_share: float = 0.5) -> Objective:
    """Next tokens of causal rows and masked tokens of bidirectional rows through one head.

    Charpentier & Samuel 2024 §2: each loss is weighted by its share of the rows.
    """
    return causal_share * lm() + (1 - causal_share) * mlm("lm")


def nsp() -> Objective:
    """Devlin et al. §3.1, task 2: does B follow A? With swapped segments, ALBERT's order task."""

    def total(done: ForwardPass) -> Tensor:
        labels = done.batch["nsp_labels"]
        return F.cross_entropy(
            done.scores("nsp").float(), labels, ignore_index=IGNORE_LABEL, reduction="sum"
        )

    return Objective((Term("nsp", "nsp_labels", total),))


DETECTION_WEIGHT = 50.0  # λ of Clark et al. 2020 eq. 4


def detection() -> Objective:
    """Clark et al. 2020 eq. 3: which tokens did the generator replace? Over all tokens."""

    def total(done: ForwardPass) -> Tensor:
        assert done.replaced is not None
        scores = done.scores("detect").float()
        losses = F.binary_cross_entropy_with_logits(scores, done.replaced.float(), reduction="none")
        return losses.masked_fill(~real_tokens(done.batch), 0.0).sum()

    return Objective((Term("detect", "tokens", total),))


OBJECTIVES: Registry[Callable[..., Objective]] = Registry(
    "objective",
    {
        "lm": lm,
        "bilm": bilm,
        "both": both,
        "translation": lm,  # of the target, given the source
        "span": lm,
        "mlm": mlm,
        "electra": lambda: mlm("generator") + DETECTION_WEIGHT * detection(),
        "mlm+nsp": lambda: mlm() + nsp(),
        "mlm+sop": lambda: mlm() + nsp(),  # the same head; pairs are swapped instead of drawn
    },
)


def objective(name: str, *settings: float) -> Objective:
    """An objective by name; `both` and `translation` have a setting."""
    return OBJECTIVES.find(name)(*settings)
