"""Distillation: a student learns what a teacher says of the same batch (Hinton et al. 2015, Sanh et al. 2019).

B examples, T tokens, K choices, N classes, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from malmoi.errors import UsageError
from malmoi.machine import per_device
from malmoi.model import Network
from malmoi.model.heads import VocabularyHead
from malmoi.objectives.base import IGNORE, Objective, Pass, Term
from malmoi.objectives.task import choice_scores, pooled

PIECE = {"cuda": 1 << 26, "cpu": 1 << 22}  # scores of one network at once; some ten arrays as large come with them
NEVER = -1e9  # the score of what cannot be chosen: its probability is 0, and 0 · log 0 stays a number


@dataclass(frozen=True)
class Teaching:
    """Who teaches, how softly, and for which share of the loss; the labels have the rest.

    The teacher is no part of the student: it does not learn, and nothing of it is saved.
    """

    teacher: Network
    soft: float = 0.5
    temperature: float = 2.0
    cosine: float = 0.0  # how much the angle between the last hidden states counts beside the scores

    def __post_init__(self) -> None:
        if not 0 < self.soft <= 1:
            raise UsageError(f"soft is a share of the loss, above 0 and up to 1, not {self.soft:g}.")
        if self.temperature <= 0:
            raise UsageError(f"The temperature must be positive, not {self.temperature:g}.")
        self.teacher.eval().requires_grad_(False)

    def beside(self, hard: Objective, kind: str) -> Objective:
        """(1 − soft) · the labels' loss + soft · the teacher's."""
        return (1 - self.soft) * hard + self.soft * distil(self, kind)


def distil(teaching: Teaching, kind: str) -> Objective:
    """T² · KL(teacher ‖ student) wherever there is a label of this kind: of a task, or lm, or mlm.

    With `cosine`, and widths that are equal, also 1 − cos of the last hidden states, averaged over the tokens.
    """
    head, labels, apart = APART[kind]

    def total(done: Pass) -> Tensor:
        with torch.no_grad():
            taught = Pass.of(teaching.teacher, done.batch)
        found = apart(done, taught, teaching.temperature)
        if teaching.cosine and taught.hidden.size(-1) == done.hidden.size(-1):
            count = (done.batch[labels] != IGNORE).sum()  # the sum will be divided by it
            found = found + teaching.cosine * count * angle(done, taught)
        return found

    return Objective((Term(head, labels, total, name="distil"),))


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² Σ p log(p / q) of scores [..., N] softened by T (Hinton et al. 2015 §2): the slope hardly depends on T."""
    log_q = F.log_softmax(student.float().clamp(min=NEVER) / temperature, -1)
    log_p = F.log_softmax(teacher.float().clamp(min=NEVER) / temperature, -1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def angle(done: Pass, taught: Pass) -> Tensor:
    """1 − cos of the last hidden states, averaged over the tokens that are not padding (Sanh et al. 2019 §2)."""
    apart = 1 - F.cosine_similarity(done.hidden.float(), taught.hidden.float(), dim=-1)
    keep = done.batch.get("keep")
    return apart.mean() if keep is None else (apart * keep).sum() / keep.sum()


# ------------------------------------------------------------------ what is compared, of each kind


def _classes(done: Pass) -> Tensor:
    return cast(Tensor, done.network.heads["classify"](pooled(done)))


def _tags(done: Pass) -> Tensor:
    return done.scores("tag")


def _ends(done: Pass) -> Tensor:
    """Scores of every token to be an answer's first, and its last [B, 2, T]."""
    scores, keep = done.scores("span"), done.batch.get("keep")
    scores = scores if keep is None else scores.masked_fill(~keep[..., None], float("-inf"))
    return scores.transpose(1, 2)


def _choices(done: Pass) -> Tensor:
    return choice_scores(done.scores("choice"), done.batch["places"])


Apart = Callable[[Pass, Pass, float], Tensor]  # student, teacher, temperature → the sum over the labels


def _scored(read: Callable[[Pass], Tensor]) -> Apart:
    def apart(done: Pass, taught: Pass, temperature: float) -> Tensor:
        with torch.no_grad():
            said = read(taught)
        return (divergence(read(done), said, temperature) * (done.batch["labels"] != IGNORE)).sum()

    return apart


def _numbers(done: Pass, taught: Pass, temperature: float) -> Tensor:
    """The squared distance of two numbers: there is nothing to soften."""
    with torch.no_grad():
        said = _classes(taught).float()
    return F.mse_loss(_classes(done).float(), said, reduction="sum")


def _next(done: Pass) -> tuple[Tensor, Tensor]:
    return done.hidden.flatten(0, 1), done.batch["lm_labels"].flatten()


def _masked(done: Pass) -> tuple[Tensor, Tensor]:
    return done.hidden.flatten(0, 1)[done.batch["mlm_slots"]], done.batch["mlm_labels"].flatten()


def _spoken(head: str, chosen: Callable[[Pass], tuple[Tensor, Tensor]]) -> Apart:
    """Over a vocabulary some rows at a time; their scores are made again on the way back, and never held all."""

    def apart(done: Pass, taught: Pass, temperature: float) -> Tensor:
        ours, theirs = (cast(VocabularyHead, one.network.heads[head]) for one in (done, taught))
        hidden, labels = chosen(done)
        x = ours.features(hidden)
        with torch.no_grad():
            y = theirs.features(chosen(taught)[0])

        def piece(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                said = theirs.scores(y)
            return (divergence(ours.scores(x), said, temperature) * (labels != IGNORE)).sum()

        rows = max(1, per_device(PIECE, x.device.type) // ours.weight.size(0))
        pieces = zip(x.split(rows), y.split(rows), labels.split(rows), strict=True)
        sums = [checkpoint(piece, *some, use_reentrant=False, preserve_rng_state=False) for some in pieces]
        return torch.stack(sums).sum()

    return apart


class _Kind(NamedTuple):
    head: str
    labels: str
    apart: Apart


APART = {
    "classification": _Kind("classify", "labels", _scored(_classes)),
    "regression": _Kind("classify", "labels", _numbers),
    "tagging": _Kind("tag", "labels", _scored(_tags)),
    "choice": _Kind("choice", "labels", _scored(_choices)),
    "answer": _Kind("span", "labels", _scored(_ends)),
    "lm": _Kind("lm", "lm_labels", _spoken("lm", _next)),
    "mlm": _Kind("mlm", "mlm_labels", _spoken("mlm", _masked)),
}
