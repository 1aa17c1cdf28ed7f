"""Objectives that add and scale, and those of pre-training: `mlm() + nsp()`.

A term is a *sum* of losses over labels and the name of those labels; the trainer divides by their
number in the whole step, so that micro-batches, several processes and padding change nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model import Network
from malmoi.model.heads import Generator, LMHead, VocabularyHead
from malmoi.system.machine import per_device
from malmoi.system.plugins import Registry
from malmoi.training.data.loader import IGNORE_LABEL

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
        """Text whose masks the generator filled, without gradient (Clark et al. 2020 §3.1).

        Those that the network fills itself stay.
        """
        generator = cast(Generator, network.heads["generator"])
        tokens, slots, labels = batch["tokens"], batch["mlm_slots"], batch["mlm_labels"]
        masked = generator.trunk(tokens, **inputs)
        with torch.no_grad():
            scores = generator.head(masked.flatten(0, 1)[slots]).float()
            drawn = torch.multinomial(scores.softmax(-1), 1)[:, 0]
            here = labels != IGNORE_LABEL
            if "own_labels" in batch:
                here = here & (batch["own_labels"] == IGNORE_LABEL)
            own = tokens.flatten()[slots]
            original = tokens.flatten().index_put((slots,), torch.where(here, labels, own))
            filled = original.index_put((slots,), torch.where(here, drawn, own))
        replaced = (filled != original).view_as(tokens)
        hidden = network.hidden(filled.view_as(tokens), **inputs)
        return cls(network, hidden, batch, masked, replaced)

    def at_masks(self, head: str) -> Tensor:
        """The hidden states that this head reads of the tokens to predict [M, D]."""
        states = self.masked if head == "generator" else self.hidden
        assert states is not None
        return states.flatten(0, 1)[self.batch["mlm_slots"]]

    def scores(self, head: str) -> Tensor:
        keep, firsts = self.batch.get("keep"), self.batch.get("firsts")
        return self.network.read(head, self.hidden, keep, None, firsts)


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
        return judged_tokens(batch).sum()


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
        """The loss to minimise, and each term's mean; `counts` are the step's labels."""
        weighted: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for term in self.terms:
            if term.labels in done.batch:
                mean = term.total(done) / counts[term.labels]
                weighted.append(term.weight * mean)
                metrics[term.metric_name] = metrics.get(term.metric_name, 0) + mean.detach()
        return torch.stack(weighted).sum(), metrics


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


def judged_tokens(batch: TensorBatch) -> Tensor:
    """The real tokens of which the network says whether they were replaced [B, T]: no masks."""
    real = real_tokens(batch)
    if "own_labels" not in batch:
        return real
    own = batch["own_labels"] != IGNORE_LABEL
    return real & ~torch.zeros_like(real.flatten()).index_put((batch["mlm_slots"],), own).view_as(
        real
    )


def lm(smoothing: float = 0.0, weights: str = "") -> Objective:
    """GPT-1 eq. 1: Σ −log P(u_i | u_1 … u_{i−1}), with labels that the batch has shifted by one.

    Smoothed in training only (Vaswani et al. 2017 §5.4); `weights` names weights in the batch.
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


def mlm(head_name: str = "mlm", labels: str = "mlm_labels", name: str = "mlm") -> Objective:
    """Devlin et al. §3.1, task 1: the original of each masked token, only at those slots."""

    def total(done: ForwardPass) -> Tensor:
        head = done.network.heads[head_name]
        head = head.head if isinstance(head, Generator) else head
        features = head.features(done.at_masks(head_name))  # type: ignore[operator]
        return linear_cross_entropy(features, head, done.batch[labels])  # type: ignore[arg-type]

    return Objective((Term(head_name, labels, total, name=name),))


def both(causal_share: float = 0.5) -> Objective:
    """Next and masked tokens, each by its share of the rows (Charpentier & Samuel 2024 §2)."""
    return causal_share * lm() + (1 - causal_share) * mlm("lm")


def nsp() -> Objective:
    """Devlin et al. §3.1, task 2: does B follow A? With swapped segments, ALBERT's order task."""

    def total(done: ForwardPass) -> Tensor:
        scores, labels = done.scores("nsp").float(), done.batch["nsp_labels"]
        return F.cross_entropy(scores, labels, ignore_index=IGNORE_LABEL, reduction="sum")

    return Objective((Term("nsp", "nsp_labels", total),))


DETECTION_WEIGHT = 50.0  # λ of Clark et al. 2020 eq. 4
DETECTION_BESIDE_MLM = 10.0  # 50 fills worse and learns no more (docs/lab.md)


def detection() -> Objective:
    """Clark et al. 2020 eq. 3: which tokens did the generator replace? Over all but masks."""

    def total(done: ForwardPass) -> Tensor:
        assert done.replaced is not None
        scores = done.scores("detect").float()
        losses = F.binary_cross_entropy_with_logits(scores, done.replaced.float(), reduction="none")
        return losses.masked_fill(~judged_tokens(done.batch), 0.0).sum()

    return Objective((Term("detect", "tokens", total),))


def mlm_and_detection() -> Objective:
    """The network fills some masks and detects what a generator wrote into the others."""
    filling = mlm(labels="own_labels") + mlm("generator", name="generator")
    return filling + DETECTION_BESIDE_MLM * detection()


OBJECTIVES: Registry[Callable[..., Objective]] = Registry(
    "objective",
    {
        "lm": lm,
        "bilm": bilm,
        "both": both,
        "translation": lm,  # of the target, given the source
        "mlm": mlm,
        "electra": lambda: mlm("generator") + DETECTION_WEIGHT * detection(),
        "mlm+rtd": mlm_and_detection,
        "mlm+nsp": lambda: mlm() + nsp(),
        "mlm+sop": lambda: mlm() + nsp(),  # the same head; pairs are swapped instead of drawn
    },
)


def objective(name: str, *settings: float) -> Objective:
    """An objective by name; `both` and `translation` have a setting."""
    return OBJECTIVES.find(name)(*settings)


# ------------------------------------------------------------------ linear cross-entropy

# logits held at once; on a CPU they should fit in its cache
MAX_LOGITS = {"cuda": 1 << 29, "cpu": 1 << 22}
# a vocabulary that is not a multiple of this misses the GPU's fast matrix product
VOCAB_MULTIPLE = 128


def linear_cross_entropy(
    features: Tensor,
    head: VocabularyHead,
    labels: Tensor,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Σ −log softmax(features Wᵀ + b)[label] over labels that are not IGNORE, by their weights.

    With `smoothing` ε a label has the probability 1 − ε, and all share ε (Szegedy et al. 2016 §7).
    """
    x = features.flatten(0, -2)
    y = labels.flatten()
    kept = y != IGNORE_LABEL if weights is None else weights.flatten() * (y != IGNORE_LABEL)
    weight = head.weight
    bias = head.bias
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x = x.to(kind)
        weight = weight.to(kind)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _forward_only(Shape(head.cap, smoothing), x, weight, bias, y, kept)
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
    return apply(Shape(head.cap, smoothing), x, weight, bias, y, kept)


class Shape(NamedTuple):
    """What changes the plain cross-entropy: a cap on the logits, and label smoothing."""

    cap: float = 0.0
    smoothing: float = 0.0


def _forward_only(
    shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor
) -> Tensor:
    total = x.new_zeros((), dtype=torch.float32)
    how: Any = dict(ignore_index=IGNORE_LABEL, reduction="none", label_smoothing=shape.smoothing)
    size = _rows(x, weight)
    for rows, labels, share in zip(x.split(size), y.split(size), kept.split(size), strict=True):
        logits = F.linear(rows, weight).float()
        logits = logits if bias is None else logits + bias
        logits = shape.cap * torch.tanh(logits / shape.cap) if shape.cap else logits
        losses = F.cross_entropy(logits, labels, **how)
        total = total + (losses * share).sum()
    return total


def _rows(x: Tensor, weight: Tensor) -> int:
    return max(1, per_device(MAX_LOGITS, x.device.type) // weight.size(0))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, *tensors: Any) -> Tensor:
        x, weight, bias, y, kept = tensors
        padded = F.pad(weight, (0, 0, 0, -weight.size(0) % VOCAB_MULTIPLE)) if x.is_cuda else weight
        dx = torch.empty_like(x)
        dw = torch.zeros_like(padded, dtype=torch.float32)
        db = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        total: Tensor = x.new_zeros((), dtype=torch.float32)
        size = _rows(x, weight)
        piece = _fused() if x.is_cuda else _in_place
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            logits = F.linear(x[part], padded)
            loss, slope = piece(logits, bias, y[part], kept[part], weight.size(0), shape)
            total += loss
            slope = slope.to(x.dtype)
            dx[part] = slope @ padded
            dw += slope.T @ x[part]
            if db is not None:
                db += slope[:, : weight.size(0)].sum(0, dtype=torch.float32)
        ctx.save_for_backward(dx, dw[: weight.size(0)].to(weight.dtype), db)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        slopes = (None if d is None else d * grad.to(d.dtype) for d in ctx.saved_tensors)
        return None, *slopes, None, None


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiles `_piece` only: torch 2.11 compiles the Function around it to zero gradients."""
    return torch.compile(_piece)


def _piece(
    logits: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor, vocab: int, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Loss of some rows and its gradient by the logits, ignoring vocabulary padding."""
    cap, smoothing = shape
    z = logits.float()
    if bias is not None:
        z = z + F.pad(bias, (0, logits.size(1) - vocab))
    squash = torch.tanh(z / cap) if cap else None
    z = cap * squash if squash is not None else z
    mean = z[:, :vocab].mean(-1) if smoothing else 0.0
    if logits.size(1) != vocab:
        z = z.masked_fill(torch.arange(logits.size(1), device=z.device) >= vocab, float("-inf"))
    at = y.clamp(min=0)[:, None]
    log_sum = z.logsumexp(-1, keepdim=True)
    # cross-entropy with the target (1 − ε) · label + ε / V
    wanted = (1 - smoothing) * z.gather(1, at).squeeze(1) + smoothing * mean
    loss = log_sum.squeeze(1) - wanted
    slope = (z - log_sum).exp()
    columns = torch.arange(z.size(1), device=z.device)
    slope = slope - (1 - smoothing) * (columns == at).to(slope.dtype)
    if smoothing:
        slope = slope - smoothing / vocab * (columns < vocab).to(slope.dtype)
    slope = slope * kept[:, None]
    if squash is not None:
        slope = slope * (1 - squash.square())
    # rounded here, so that the compiler never writes the fp32 gradient to memory
    return (loss * kept).sum(), slope.to(logits.dtype)


def _in_place(
    logits: Tensor, bias: Tensor | None, y: Tensor, kept: Tensor, vocab: int, shape: Shape
) -> tuple[Tensor, Tensor]:
    """The same without a compiler: in place, with as few passes over the logits as possible."""
    if bias is not None or any(shape):
        return _piece(logits, bias, y, kept, vocab, shape)
    slope = F.log_softmax(logits, -1, dtype=torch.float32)
    at = y.clamp(min=0)[:, None]
    loss = -(slope.gather(1, at).squeeze(1) * kept).sum()
    slope.exp_().scatter_add_(1, at, torch.full_like(at, -1.0, dtype=slope.dtype))
    return loss, slope if bool((kept == 1).all()) else slope.mul_(kept[:, None])
