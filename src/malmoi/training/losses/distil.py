"""Distillation: a student learns a teacher's scores (Hinton et al. 2015, Sanh et al. 2019).

B examples, T tokens, K choices, N classes, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from malmoi.errors import require_that
from malmoi.model import Network
from malmoi.model.heads import VocabularyHead
from malmoi.system.machine import per_device
from malmoi.training.data.loader import IGNORE_LABEL
from malmoi.training.losses.base import ForwardPass, Objective, Term

# scores of one network held at a time; about ten arrays of that size exist at once
MAX_SCORES = {"cuda": 1 << 26, "cpu": 1 << 22}
# the score of impossible choices: probability 0, but finite, so that 0 · log 0 is not NaN
MASKED_SCORE = -1e9


# (student, teacher, temperature) → the sum over the labels
Divergence = Callable[[ForwardPass, ForwardPass, float], Tensor]


class Distiller(NamedTuple):
    """A comparison with the teacher: a head's scores wherever there is a label."""

    head: str
    labels: str
    apart: Divergence


@dataclass(frozen=True)
class Distillation:
    """The teachers, untrained and unsaved, the temperature, and the weights of their losses."""

    teacher: Network
    soft: float = 0.5
    temperature: float = 2.0
    # weight of the cosine loss between the last hidden states
    cosine: float = 0.0
    others: tuple[Network, ...] = ()

    @property
    def teachers(self) -> tuple[Network, ...]:
        return (self.teacher, *self.others)

    def __post_init__(self) -> None:
        require_that(
            0 < self.soft <= 1,
            "soft is a share of the loss: above 0 and at most 1, not {soft:g}.",
            soft=self.soft,
        )
        require_that(
            self.temperature > 0,
            "The temperature must be positive, not {temperature:g}.",
            temperature=self.temperature,
        )
        for teacher in self.teachers:
            teacher.eval().requires_grad_(requires_grad=False)

    def add_to(self, hard: Objective, distiller: Distiller) -> Objective:
        """Returns (1 − soft) · the labels' loss + soft · the teacher's."""
        return (1 - self.soft) * hard + self.soft * distillation_loss(self, distiller)

    def add_to_text(self, hard: Objective) -> Objective:
        """`add_to` for each term of an objective on text: next tokens, masked ones, or both."""
        total = (1 - self.soft) * hard
        for term in hard.terms:
            name = f"{term.metric_name}_distil" if len(hard.terms) > 1 else "distil"
            soft = distillation_loss(self, text_distiller(term.head, term.labels), name)
            total += self.soft * (term.weight * soft)
        return total


def distillation_loss(
    distillation: Distillation, distiller: Distiller, name: str = "distil"
) -> Objective:
    """T² · KL(teacher ‖ student) wherever there is a label.

    With `cosine`, and equal widths, also the mean of 1 − cos of the last hidden states.
    """
    head, labels, apart = distiller

    def of_one(done: ForwardPass, teacher: Network) -> Tensor:
        with torch.no_grad():
            taught = ForwardPass.of(teacher, done.batch)
        found = apart(done, taught, distillation.temperature)
        if distillation.cosine and taught.hidden.size(-1) == done.hidden.size(-1):
            count = (done.batch[labels] != IGNORE_LABEL).sum()  # the sum is divided by it later
            found = found + distillation.cosine * count * hidden_state_loss(done, taught)
        return found

    def total(done: ForwardPass) -> Tensor:
        # but for a constant, the mean of the divergences is that from the teachers' mean
        return torch.stack([of_one(done, teacher) for teacher in distillation.teachers]).mean(0)

    return Objective((Term(head, labels, total, name=name),))


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² Σ p log(p / q) of scores [..., N] at temperature T (Hinton et al. 2015 §2)."""
    log_q = F.log_softmax(student.float().clamp(min=MASKED_SCORE) / temperature, -1)
    log_p = F.log_softmax(teacher.float().clamp(min=MASKED_SCORE) / temperature, -1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def hidden_state_loss(done: ForwardPass, taught: ForwardPass) -> Tensor:
    """1 − cos of the last hidden states, averaged over tokens (Sanh et al. 2019 §2)."""
    apart = 1 - F.cosine_similarity(done.hidden.float(), taught.hidden.float(), dim=-1)
    keep = done.batch.get("keep")
    return apart.mean() if keep is None else (apart * keep).sum() / keep.sum()


# ------------------------------------------------------------------ what is compared, of each kind


def compare_scores(
    read: Callable[[ForwardPass], Tensor],
    apart: Callable[[Tensor, Tensor, float], Tensor] = divergence,
) -> Divergence:
    """The distance of two networks' scores, summed over the labels."""

    def total(done: ForwardPass, taught: ForwardPass, temperature: float) -> Tensor:
        with torch.no_grad():
            target = read(taught)
        found = apart(read(done), target, temperature)
        return (found * (done.batch["labels"] != IGNORE_LABEL)).sum()

    return total


def squared_distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Squared error of two scores [B, 1]; a number has no temperature."""
    return (student - teacher).square().squeeze(-1)


def binary_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL of each label independently [B, N], its sigmoid softened by T."""
    ours, theirs = (torch.stack((x, torch.zeros_like(x)), -1) for x in (student, teacher))
    return divergence(ours, theirs, temperature)


def _vocabulary_divergence(
    head: str, labels_name: str, chosen: Callable[[ForwardPass], Tensor]
) -> Divergence:
    """Sums over chunks of rows; scores are recomputed in the backward pass, never all held."""

    def apart(done: ForwardPass, taught: ForwardPass, temperature: float) -> Tensor:
        ours, theirs = (cast(VocabularyHead, one.network.heads[head]) for one in (done, taught))
        labels = done.batch[labels_name].flatten()
        x = ours.features(chosen(done))
        with torch.no_grad():
            y = theirs.features(chosen(taught))

        def piece(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                target = theirs.scores(y)
            found = divergence(ours.scores(x), target, temperature)
            return (found * (labels != IGNORE_LABEL)).sum()

        rows = max(1, per_device(MAX_SCORES, x.device.type) // ours.weight.size(0))
        pieces = zip(x.split(rows), y.split(rows), labels.split(rows), strict=True)
        how: Any = dict(use_reentrant=False, preserve_rng_state=False)
        return torch.stack([checkpoint(piece, *some, **how) for some in pieces]).sum()

    return apart


TAUGHT = "taught_labels"  # of a language model that learns from its own mean
PREDICTING_STATES: dict[str, Callable[[ForwardPass], Tensor]] = {
    "lm_labels": lambda done: done.hidden.flatten(0, 1),
    "mlm_labels": lambda done: done.at_masks("mlm"),
    TAUGHT: lambda done: done.hidden.flatten(0, 1),
}


def text_distiller(head: str, labels: str) -> Distiller:
    """Compares a vocabulary head's scores of next tokens (lm_labels) or masked ones."""
    return Distiller(head, labels, _vocabulary_divergence(head, labels, PREDICTING_STATES[labels]))


def own_teacher_loss(mean: Network) -> Objective:
    """KL(the mean of the own weights ‖ the network), where a batch says what is taught."""
    taught = Distillation(mean, soft=1.0, temperature=1.0)
    return distillation_loss(taught, text_distiller("lm", TAUGHT), "own_teacher")
