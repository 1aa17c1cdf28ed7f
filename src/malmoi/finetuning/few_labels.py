"""Few labels: contrast sentence vectors by label, then fit a logistic head (SetFit).

Tunstall et al. 2022. A batch of n rows has n(n − 1)/2 pairs, so one forward pass of the rows serves
them all. B rows of a batch, N classes, D width.
"""

import logging
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.errors import UsageError
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.kinds import CLASSIFICATION, encode_examples, head_kind
from malmoi.evaluation.task import Example
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.linear_head import fit_head, item_vectors
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.trainer import FinetuneTrainer
from malmoi.inference.predict import Predictor
from malmoi.inference.zero_shot import descriptions
from malmoi.messages import msg
from malmoi.model import Network
from malmoi.training.losses import ForwardPass, Objective
from malmoi.training.losses.base import Term

logger = logging.getLogger(__name__)

MAX_ROWS = 200  # more rows are fine-tuned in the usual way
# measured with 16 phrases of SST-2 (docs/lab.md)
CONTRAST_DEFAULTS = {"lr": 1e-4, "epochs": 12.0, "batch": 32}


def choose_contrast(
    work: FinetuneData, settings: FinetuneConfig, given: Set[str]
) -> FinetuneConfig:
    """Adds a contrastive stage to the settings if there are few rows.

    Automatic for classification with at most `MAX_ROWS` rows by a fully trained sentence encoder;
    `contrastive` turns it on or off. Explicit options are kept.
    """
    fits = head_kind(work.task) is CLASSIFICATION and work.start.sentence is not None
    if settings.contrastive and not fits:
        raise UsageError(
            "contrastive needs a classification task and a sentence encoder: a folder that "
            "sentence-transformers or malmoi finetune similarity wrote."
        )
    whole = settings.trains_all and not settings.from_scratch
    chosen = settings.contrastive is None and fits and whole and has_few_rows(work)
    if not settings.contrastive and not chosen:
        return replace(settings, contrastive=False)
    if chosen:
        logger.info(
            msg(
                "Only {train} training rows: using contrastive learning on sentence vectors "
                "and a logistic layer, as in SetFit (--set contrastive=false for plain "
                "fine-tuning).",
                train=len(work.train),
            )
        )
    unset = {name: value for name, value in CONTRAST_DEFAULTS.items() if name not in given}
    return settings.override({**unset, "contrastive": True, "frozen_first": False})


def has_few_rows(work: FinetuneData) -> bool:
    """Whether the rows are so few that the usual way would learn little, and no teacher helps."""
    several = len({row.label for row in work.train}) > 1
    return several and len(work.train) <= MAX_ROWS and not work.teaching


def label_name_items(work: FinetuneData, reading: Predictor) -> list[TrainingItem]:
    """Two extra rows for each label whose name is a word (docs/lab.md)."""
    rows = []
    for label in work.labels:
        word = work.task.answers.get(label, label)
        if has_letters(word):
            texts = (word, *descriptions(word, {label: word}, None))
            rows += [Example(text, label=label) for text in texts]
    return encode_examples(work.task, rows, FeatureView.of(reading, work.labels))


def has_letters(word: str) -> bool:
    return any(letter.isalpha() for letter in word)


def contrast_loss() -> Objective:
    """Squared distance of each pair's cosine from 1 (same label) or 0 (SetFit §3.1).

    Pairs with equal and with different labels count half each, whatever the number of classes.
    """

    def total(done: ForwardPass) -> Tensor:
        labels = done.batch["labels"]
        vectors: Tensor = done.network.pooler(done.hidden, done.batch.get("keep"))  # type: ignore[misc]
        vectors = F.normalize(vectors.float(), dim=-1)
        same = labels[:, None] == labels[None]
        error = (vectors @ vectors.T - same.float()).square()
        alike = same.float().fill_diagonal_(0)
        apart = (~same).float()
        parts = [(error * pairs).sum() / pairs.sum().clamp(min=1) for pairs in (alike, apart)]
        # the trainer divides by the number of labels in a batch
        return 0.5 * (parts[0] + parts[1]) * len(labels)

    return Objective((Term("classify", "labels", total, name="contrast", divisible=False),))


class ContrastiveTrainer(FinetuneTrainer):
    """Contrasts the rows, then fits the logistic head on the resulting vectors."""

    def settle(self) -> None:
        super().settle()
        fit_logistic_head(self.network, self.items)


def fit_logistic_head(network: Network, items: Sequence[TrainingItem]) -> None:
    """Fits the classify head on pooled vectors: Σ cross-entropy + ½‖W‖² (C = 1)."""
    labels = torch.tensor([item.label for item in items])
    fit_head(network, item_vectors(network, items).double(), labels, ridge=0.5 / len(items))
