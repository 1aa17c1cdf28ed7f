"""Fine-tuning objectives: label, several labels, number, tag per word, answer span, choice.

B examples, R rows of the batch, K choices, T tokens, N classes.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model.heads import pool_tokens
from malmoi.training.data.loader import IGNORE_LABEL
from malmoi.training.losses.base import ForwardPass, Objective, Term, linear_cross_entropy

ClassWeights = Sequence[float] | None  # one per class; rare classes can count more


# ------------------------------------------------------------------ scores of each kind


def class_scores(done: ForwardPass) -> Tensor:
    """Scores [B, N]; the vectors of an example read in both orders are summed (GPT-1 §3.3)."""
    vectors: Tensor = done.network.pooler(
        done.hidden, done.batch.get("keep"), done.batch.get("firsts")
    )  # type: ignore[misc]
    places = done.batch.get("places")
    pooled = vectors if places is None else vectors[places].sum(1)
    return cast(Tensor, done.network.heads["classify"](pooled)).float()


def tag_scores(done: ForwardPass) -> Tensor:
    """Scores [B, T, N]."""
    return done.scores("tag").float()


def span_scores(done: ForwardPass) -> Tensor:
    """Scores of every token as the first and the last of an answer [B, 2, T], padding masked."""
    scores = done.scores("span").float()
    keep = done.batch.get("keep")
    scores = scores if keep is None else scores.masked_fill(~keep[..., None], float("-inf"))
    return scores.transpose(1, 2)


def choice_scores(done: ForwardPass) -> Tensor:
    """Turns scores of rows [R, 1] into scores of choices [B, K]; position −1 means no choice."""
    scores = done.scores("choice").float().squeeze(-1)
    # without places, each example has one choice
    places = done.batch.get("places", torch.arange(len(scores), device=scores.device)[:, None])
    return scores[places.clamp(min=0)].masked_fill(places < 0, float("-inf"))


def answer_scores(done: ForwardPass) -> Tensor:
    """Scores of the tokens after each of an answer's slots [M, V]."""
    states = done.hidden.flatten(0, 1)[done.batch["slots"]]
    return cast(Tensor, done.network.heads["lm"](states)).float()


# ------------------------------------------------------------------ losses


def _cross_entropy(
    head: str, read: Callable[[ForwardPass], Tensor], weights: ClassWeights = None
) -> Objective:
    """−log P(label) for each label, over the last dimension of the scores."""
    on_device = _on_device(weights)

    def total(done: ForwardPass) -> Tensor:
        scores = read(done).flatten(0, -2)
        labels = done.batch["labels"].flatten()
        weight = on_device(scores.device)
        return F.cross_entropy(scores, labels, weight, ignore_index=IGNORE_LABEL, reduction="sum")

    return Objective((Term(head, "labels", total),))


def _on_device(weights: ClassWeights) -> Callable[[torch.device], Tensor | None]:
    """Moves class weights to a device once: a captured CUDA graph cannot copy from the host."""
    return cache(lambda device: None if weights is None else torch.tensor(weights, device=device))


# GPT-1 eq. 4, BERT §4.1
classification_loss = partial(_cross_entropy, "classify", class_scores)
# BERT §5.3: the label of each word, read off its first token; other tokens are ignored
tagging_loss = partial(_cross_entropy, "tag", tag_scores)


def span_loss(weights: ClassWeights = None) -> Objective:
    """BERT §4.2: the mean of the losses of the answer's first and last token."""
    return _cross_entropy("span", span_scores)


def choice_loss(weights: ClassWeights = None) -> Objective:
    """BERT §4.4, GPT-1 §3.3: choices are scored separately; softmax over those of an example."""
    return _cross_entropy("choice", choice_scores)


def multilabel_loss(weights: ClassWeights = None) -> Objective:
    """Binary cross-entropy of each label independently; weights apply to its positive examples."""
    on_device = _on_device(weights)

    def total(done: ForwardPass) -> Tensor:
        scores = class_scores(done)
        return F.binary_cross_entropy_with_logits(
            scores, done.batch["labels"], pos_weight=on_device(scores.device), reduction="sum"
        )

    return Objective((Term("classify", "labels", total),))


def regression_loss(weights: ClassWeights = None) -> Objective:
    """The squared error of one score."""

    def total(done: ForwardPass) -> Tensor:
        return F.mse_loss(class_scores(done).squeeze(-1), done.batch["labels"], reduction="sum")

    return Objective((Term("classify", "labels", total),))


def answer_loss(weights: ClassWeights = None) -> Objective:
    """−log P(answer | prompt), token by token; the prompt's own tokens are given, not learnt."""

    def total(done: ForwardPass) -> Tensor:
        head = done.network.heads["lm"]
        states = done.hidden.flatten(0, 1)[done.batch["slots"]]
        return linear_cross_entropy(head.features(states), head, done.batch["labels"])  # type: ignore[operator, arg-type]

    return Objective((Term("lm", "labels", total),))


# ------------------------------------------------------------------ sentence encoders

RANKING_SCALE = 20.0  # cosines are multiplied by it before the softmax


def _vectors(done: ForwardPass, tokens: str) -> Tensor:
    """Sentence vectors of length 1 [R, D]."""
    return F.normalize(pool_tokens(tokens, done.hidden, done.batch.get("keep")).float(), dim=-1)


def cosine_loss(tokens: str) -> Objective:
    """Squared distance of a pair's cosine from its score (Reimers & Gurevych 2019 §3)."""

    def total(done: ForwardPass) -> Tensor:
        vectors = _vectors(done, tokens)[done.batch["places"]]
        cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1)
        return F.mse_loss(cosines, done.batch["labels"].float(), reduction="sum")

    return Objective((Term("", "labels", total, name="cosine"),))


def ranking_loss(tokens: str) -> Objective:
    """−log P(positive | anchor) among all texts of the batch (Henderson et al. 2017 §4.4).

    Positives with the same label are the same text, and no negatives of one another.
    """

    def total(done: ForwardPass) -> Tensor:
        places = done.batch["places"]
        vectors = _vectors(done, tokens)
        negatives = places[:, 2:].flatten()
        candidates = torch.cat((places[:, 1], negatives.clamp(min=0)))
        scores = RANKING_SCALE * vectors[places[:, 0]] @ vectors[candidates].T
        labels = done.batch["labels"]
        same = (labels[:, None] == labels[None]).fill_diagonal_(False)  # noqa: FBT003  # torch's
        hidden = torch.cat((same, (negatives < 0).expand(len(places), -1)), 1)
        own = torch.arange(len(places), device=scores.device)
        return F.cross_entropy(scores.masked_fill(hidden, float("-inf")), own, reduction="sum")

    return Objective((Term("", "labels", total, name="ranking", divisible=False),))
