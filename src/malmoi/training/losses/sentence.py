"""Objectives of sentence encoders: scored pairs, and pairs or triplets ranked within a batch.

B examples, K texts of each (anchor, positive, negatives), R rows of the batch, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model.heads import pool_tokens
from malmoi.training.losses.base import ForwardPass, Objective, Term

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

    Positives with the same label are the same text, and no negatives of one another. The same
    sentence as its own positive differs by dropout alone (SimCSE, Gao et al. 2021 eq. 1).
    """

    def total(done: ForwardPass) -> Tensor:
        places = done.batch["places"]
        vectors = _vectors(done, tokens)
        negatives = places[:, 2:].flatten()
        candidates = torch.cat((places[:, 1], negatives.clamp(min=0)))
        scores = RANKING_SCALE * vectors[places[:, 0]] @ vectors[candidates].T
        labels = done.batch["labels"]
        same = (labels[:, None] == labels[None]).fill_diagonal_(False)  # noqa: FBT003  # torch's
        absent = (negatives < 0).expand(len(places), -1)
        hidden = torch.cat((same, absent), 1)
        own = torch.arange(len(places), device=scores.device)
        return F.cross_entropy(scores.masked_fill(hidden, float("-inf")), own, reduction="sum")

    return Objective((Term("", "labels", total, name="ranking", divisible=False),))
