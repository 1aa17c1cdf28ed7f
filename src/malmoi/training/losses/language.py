"""The objectives of pre-training: next token, masked token, next sentence (and sentence order)."""

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from malmoi.model.heads import Generator, LMHead
from malmoi.system.plugins import Registry
from malmoi.training.losses.base import IGNORE_LABEL, ForwardPass, Objective, Term, real_tokens
from malmoi.training.losses.linear_xent import linear_cross_entropy


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
