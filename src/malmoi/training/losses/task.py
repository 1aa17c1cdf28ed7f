"""The objectives of fine-tuning: a label, a number, a tag for each word, an answer's span, a
choice.

B examples, R rows of the batch, K choices, T tokens, N classes.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.training.losses.base import IGNORE_LABEL, ForwardPass, Objective, Term


def pool_examples(done: ForwardPass) -> Tensor:
    """One vector an example [B, D]; where it was read in both orders, their sum (GPT-1 §3.3)."""
    vectors: Tensor = done.network.pooler(
        done.hidden, done.batch.get("keep"), done.batch.get("firsts")
    )  # type: ignore[misc]
    places = done.batch.get("places")
    return vectors if places is None else vectors[places].sum(1)


def _on_device(weights: Sequence[float] | None) -> Callable[[torch.device], Tensor | None]:
    """The weights of classes, sent to a device once: a recorded step cannot send them."""
    return cache(lambda device: None if weights is None else torch.tensor(weights, device=device))


def classification_loss(weights: Sequence[float] | None = None) -> Objective:
    """GPT-1 eq. 4, BERT §4.1: −log P(label); with weights, of each class."""
    rare = _on_device(weights)

    def total(done: ForwardPass) -> Tensor:
        scores = done.network.heads["classify"](pool_examples(done)).float()
        return F.cross_entropy(
            scores,
            done.batch["labels"],
            rare(scores.device),
            ignore_index=IGNORE_LABEL,
            reduction="sum",
        )

    return Objective((Term("classify", "labels", total),))


def regression_loss() -> Objective:
    """The squared error of one score."""

    def total(done: ForwardPass) -> Tensor:
        scores = done.network.heads["classify"](pool_examples(done)).float().squeeze(-1)
        return F.mse_loss(scores, done.batch["labels"], reduction="sum")

    return Objective((Term("classify", "labels", total),))


def tagging_loss(weights: Sequence[float] | None = None) -> Objective:
    """BERT §5.3: the label of each word, read off its first token; the others are not judged."""
    rare = _on_device(weights)

    def total(done: ForwardPass) -> Tensor:
        scores = done.scores("tag").float().flatten(0, 1)
        return F.cross_entropy(
            scores,
            done.batch["labels"].flatten(),
            rare(scores.device),
            ignore_index=IGNORE_LABEL,
            reduction="sum",
        )

    return Objective((Term("tag", "labels", total),))


def span_loss() -> Objective:
    """BERT §4.2: −log of the probabilities of the answer's first and of its last token,
    averaged.
    """

    def total(done: ForwardPass) -> Tensor:
        scores = done.scores("span").float()  # [B, T, 2]
        keep = done.batch.get("keep")
        if keep is not None:
            scores = scores.masked_fill(~keep[..., None], float("-inf"))
        return F.cross_entropy(
            scores, done.batch["labels"], ignore_index=IGNORE_LABEL, reduction="sum"
        )

    return Objective((Term("span", "labels", total),))


def choice_loss() -> Objective:
    """BERT §4.4, GPT-1 §3.3: each choice is read by itself and scored; softmax over the choices
    of an example.
    """

    def total(done: ForwardPass) -> Tensor:
        scores = group_choice_scores(done.scores("choice"), done.batch["places"])
        return F.cross_entropy(
            scores, done.batch["labels"], ignore_index=IGNORE_LABEL, reduction="sum"
        )

    return Objective((Term("choice", "labels", total),))


def group_choice_scores(scores: Tensor, places: Tensor) -> Tensor:
    """[R, 1] scores of rows as [B, K] scores of choices; a place of −1 is no choice at all."""
    return scores.float().squeeze(-1)[places.clamp(min=0)].masked_fill(places < 0, float("-inf"))
