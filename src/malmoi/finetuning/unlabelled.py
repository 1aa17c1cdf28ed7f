"""Rows without labels: they teach by where they lie, or by what teachers say of them.

Few labels: the frozen model's vectors of a label's rows are one cloud, a Gaussian in a few
directions whose covariance all labels share, fitted to all rows (EM, Dempster et al. 1977). More
labels: networks fine-tuned on the labelled rows teach a new one on all rows (Hinton et al. 2015,
Xie et al. 2020). n rows, D width of a text's vector, N labels.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint import Checkpoint, read_checkpoint
from malmoi.evaluation.features import Outcome
from malmoi.evaluation.kinds import CLASSIFICATION, encode_examples, head_kind
from malmoi.evaluation.task import Example
from malmoi.finetuning import few_labels
from malmoi.finetuning.candidates import Comparison, Gain, Rival, held_out_score, paired_gain
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.few_labels import Fit
from malmoi.finetuning.results import judge_held_out
from malmoi.finetuning.task_data import MAX_FEW_ROWS, FinetuneData
from malmoi.finetuning.task_network import build_task_network
from malmoi.inference import Model
from malmoi.inference.predict import word_logprobs
from malmoi.inference.zero_shot import label_scores
from malmoi.interpret.probe import fit_linear
from malmoi.messages import logger
from malmoi.system.machine import per_device
from malmoi.training.losses.distil import Distillation

# ------------------------------------------------------------------ clouds

DIRECTIONS = 16  # of the vectors' spread: more are noise (docs/lab.md)
PER_LABEL = 2  # directions, if there are many labels
EM_STEPS = 5  # further ones drift from the labels to whatever divides the texts best
LABELLED_SHARE = 0.05  # weight of all labelled rows, of that of the others
SHARPNESS = 1.5  # of the first guess, whose scores have a spread of 1
RIDGE = 0.05  # of the layer that guesses first: C = 10
SHRINKAGE = 1e-3  # of the covariance towards equal spread
BALANCING = 20
SHARE_STEPS = 50  # of EM for the share of rows that have a label of a set
SEEN_BEFORE = 0.01  # weight of the usual share in it, beside all rows
SHARE_ROUNDS = 3  # once by the words' scores, then by the clouds' (docs/lab.md)
SHARED_RIDGE = 0.01
WORD_ROWS = 300  # whose labels are said by words, where there is no other guess: more are no better


def has_clouds(work: FinetuneData, settings: FinetuneConfig) -> bool:
    """Whether clouds tell more than fine-tuning: few labels, and vectors made to be compared.

    Those of other models tell more than the labels' names alone (docs/lab.md). Pairs of a sentence
    encoder have none: it compares two vectors, which no layer on one vector of both texts can.
    """
    encoder = work.start.sentence is not None
    if not work.unlabelled or (encoder and work.train[0].pair is not None):
        return False
    if settings.labels:
        return head_kind(work.task).text_labels
    return encoder and head_kind(work.task) is CLASSIFICATION and len(work.train) <= MAX_FEW_ROWS


def fit_clouds(
    x: Tensor,
    y: Tensor,
    names: Tensor,
    other: Tensor,
    said: Tensor | None = None,
    prior: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Fits the clouds to labelled vectors [n, D], a name's of each label [N, D], and others.

    `said` are the labels' scores of the first of the others: then these alone are the first guess.
    `prior` [N] are the labels' shares of all rows, otherwise those of the labelled ones.
    Returns W [D, N] and b [N]: log p of a row's labels is x W + b, but for a constant.
    """
    classes = len(names)
    middle = other.mean(0)
    named = names.any(1)  # others are 0
    x, names, other = x - middle, names - middle, other - middle
    scale = 1 / other.norm(dim=1).mean()
    x, names, other = x * scale, names * scale, other * scale
    if prior is None:
        prior = F.normalize((F.one_hot(y, classes).sum(0) + 1).double(), p=1, dim=0)
    known = torch.cat((x, names[named]))
    labels = torch.cat((y, torch.arange(classes)[named]))
    names = names if named.all() else names[:0]
    if said is None:
        guess = _first_guess(known, labels, names, other, prior)
    else:
        known, labels = known[:0], labels[:0]
        guess = F.pad(_balanced([said], prior), (0, 0, 0, len(other) - len(said)))
    axes = _directions(other, max(DIRECTIONS, PER_LABEL * classes))
    weight, bias = _em(known @ axes, labels, other @ axes, guess, prior)
    weight = axes @ weight * scale
    return weight, bias - middle @ weight


def _first_guess(
    known: Tensor, labels: Tensor, names: Tensor, other: Tensor, prior: Tensor
) -> Tensor:
    """Chances of the labels [n, N], by a layer on the labelled rows and by the labels' names."""
    weight, bias = fit_linear(known, labels, len(prior), RIDGE / len(known))
    parts = [other @ weight + bias]
    if len(names):
        parts.append(other @ names.T)
    return _balanced(parts, prior)


def _balanced(parts: Sequence[Tensor], prior: Tensor) -> Tensor:
    """The chances by several scores, with as many rows of each label as the prior says."""
    scores = torch.stack([_spread_of_one(part) for part in parts]).sum(0) * SHARPNESS
    for _ in range(BALANCING):
        scores = scores + (prior / scores.softmax(-1).mean(0)).log()
    return scores.softmax(-1)


def _spread_of_one(scores: Tensor) -> Tensor:
    scores = scores - scores.mean(0)
    scores = scores - scores.mean(1, keepdim=True)
    return scores / (scores.std() * 2**0.5)


def _directions(x: Tensor, count: int) -> Tensor:
    """The directions in which vectors around 0 are spread the most [D, k]."""
    count = min(count, *x.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.pca_lowrank(x, count, center=False, niter=4)[2]


def _em(
    known: Tensor, labels: Tensor, other: Tensor, chances: Tensor, prior: Tensor
) -> tuple[Tensor, Tensor]:
    """Alternates between the clouds' shapes and each row's chances; returns [D, N] and [N]."""
    share = LABELLED_SHARE * len(other) / max(1, len(known))
    fixed = F.one_hot(labels, len(prior)).to(other) * share
    every = torch.cat((other, known))
    spread = every.var(0).mean() * SHRINKAGE * torch.eye(every.size(1)).to(every)
    for _ in range(EM_STEPS):
        weights = torch.cat((chances, fixed))
        means = weights.T @ every / weights.sum(0)[:, None]
        covariance = every.T @ (every * weights.sum(1, keepdim=True))
        covariance = covariance - means.T @ (means * weights.sum(0)[:, None])
        covariance = covariance / weights.sum() + spread
        weight = torch.linalg.solve(covariance, means.T)
        bias = prior.log() - 0.5 * (means * weight.T).sum(1)
        chances = (other @ weight + bias).softmax(-1)
    return weight, bias


def fit_guessed(other: Tensor, said: Tensor, prior: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fits the clouds to vectors by the labels' scores of the first of them alone."""
    names = other.new_zeros(said.size(1), other.size(1))
    return fit_clouds(other[:0], torch.zeros(0, dtype=torch.long), names, other, said, prior)


def learn_clouds(work: FinetuneData, settings: FinetuneConfig, out: Path) -> Checkpoint:
    """A layer on the frozen model that tells the clouds of labels or of label sets apart."""
    checkpoint = _reader(work, settings)
    checkpoint.network.eval()
    mixed = random.Random(0).sample(work.unlabelled, len(work.unlabelled))
    more = [replace(row, label=work.train[0].label) for row in mixed]  # which is not read
    with work.computing(settings):
        items = encode_examples(work.task, more, work.view(checkpoint))
        other = few_labels.item_vectors(checkpoint.network, items).double()
        length = other.norm(dim=1).mean()  # the layer reads vectors as long as they are
        other = F.normalize(other, dim=1)
        if head_kind(work.task) is CLASSIFICATION:
            weight, bias = _label_clouds(work, checkpoint, mixed, other, settings, out)
        else:
            weight, bias = _label_set_clouds(work, mixed, other)
    few_labels.set_head(checkpoint.network, weight / length, bias)
    return checkpoint


def _label_clouds(
    work: FinetuneData,
    checkpoint: Checkpoint,
    mixed: Sequence[Example],
    other: Tensor,
    settings: FinetuneConfig,
    out: Path,
) -> tuple[Tensor, Tensor]:
    """Clouds of labels, or a plain layer on the labelled rows if they clearly lose.

    If there are only names, a sentence encoder's clouds start from these, and another model's from
    what it says of some rows.
    """
    network = checkpoint.network
    rows = few_labels.rows_by_label(work, MAX_FEW_ROWS)
    held = encode_examples(work.task, rows.held, work.view(checkpoint))
    x = F.normalize(few_labels.item_vectors(network, held).double(), dim=1)
    names = torch.zeros(len(work.labels), x.size(1), dtype=x.dtype)
    for item in few_labels.label_name_items(work, work.predictor(checkpoint)):
        vector = few_labels.item_vectors(network, [item]).double()
        names[item.label] += F.normalize(vector, dim=1)[0]
    names = F.normalize(names, dim=1)
    y = torch.tensor([item.label for item in held])
    said = _word_scores(work, mixed[:WORD_ROWS]) if work.start.sentence is None else None
    if not settings.labels and _gain(rows, out, (x, y, names, other)).clear_loss:
        logger.info("Rows without labels do not help here: a layer on the labelled rows is kept.")
        return fit_linear(x, y, len(work.labels), RIDGE / len(x))
    return fit_clouds(x, y, names, other, said)


def _label_set_clouds(
    work: FinetuneData, mixed: Sequence[Example], other: Tensor
) -> tuple[Tensor, Tensor]:
    """For each label two clouds, of its rows and of the others: their log odds are its score.

    The label's words start them, and then twice the share of rows that the clouds themselves show.
    """
    said = _word_scores(work, mixed if work.start.sentence is not None else mixed[:WORD_ROWS])
    # What all vectors share takes the bias' place: whether a label holds then does not depend on
    # the vector's length, which in MiniLM has a spread of 26 % (micro F1 .60 → .66, docs/lab.md).
    square = other.T @ other + SHARED_RIDGE * len(other) * torch.eye(other.size(1)).double()
    shared = torch.linalg.solve(square, other.sum(0))
    weights = []
    for score in said.T:
        seen = score
        for _ in range(SHARE_ROUNDS):
            share = upper_share(seen, 1 / len(work.labels))
            prior = torch.tensor([1 - share, share]).double()
            both, biases = fit_guessed(other, torch.stack((-score, score), 1), prior)
            weight, bias = both[:, 1] - both[:, 0], biases[1] - biases[0]
            seen = other @ weight + bias
        weights.append(weight + bias * shared)
    return torch.stack(weights, 1), torch.zeros(len(weights)).double()


def upper_share(score: Tensor, usual: float) -> float:
    """The share of rows that have a label: of the upper of two Gaussians of its score, by EM.

    Both have one variance. A hundredth of the rows counts as seen before, with the usual share.
    """
    z = (score - score.mean()) / score.std().clamp(min=few_labels.TINY)
    share, middles, spread = usual, torch.tensor([-0.5, 1.5]).double(), 0.7
    for _ in range(SHARE_STEPS):
        prior = torch.tensor([1 - share, share]).log()
        chances = (prior - (z[:, None] - middles).square() / (2 * spread)).softmax(1)
        rows = chances.sum(0)
        middles = (chances * z[:, None]).sum(0) / rows
        spread = float((chances * (z[:, None] - middles).square()).sum()) / len(z)
        share = (float(rows[1]) / len(z) + SEEN_BEFORE * usual) / (1 + SEEN_BEFORE)
    return share


def _reader(work: FinetuneData, settings: FinetuneConfig) -> Checkpoint:
    """The frozen sentence encoder with a layer on its vector; else on the means of all layers."""
    if work.start.sentence is None:
        return few_labels.frozen_model(work, settings)
    plain = replace(settings, lm=0.0, layers_transferred=None, contrastive=True)
    checkpoint = build_task_network(work.start, work.task, work.labels, plain)
    checkpoint.network.to(work.device)
    return checkpoint


def _word_scores(work: FinetuneData, rows: Sequence[Example]) -> Tensor:
    """How well the labels' words fit each text, each label by itself [n, N].

    A BERT says them between the two texts of a pair: "A man sleeps? [MASK], he is awake" (Schick &
    Schütze 2021 §4).
    """
    model = Model(work.start)
    words = work.task.answers
    if rows[0].pair is not None and "mlm" in model.network.heads:
        return word_logprobs(
            model.network,
            model.tokenizer,
            [f"{row.text}?" for row in rows],
            [f" {word}" for word in words.values()],
            [f", {row.pair}" for row in rows],
        ).double()
    scores = label_scores(model, ["\n".join(row.texts) for row in rows], words)
    return scores.log_softmax(1) if head_kind(work.task).exclusive else scores


def _gain(work: FinetuneData, out: Path, vectors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Gain:
    """The clouds' gain over a layer on the labelled rows alone."""
    x, y, names, other = vectors
    classes = len(names)
    comparison = Comparison(work, out)
    fits: dict[str, Fit] = {
        "a new layer": partial(fit_linear, classes=classes, ridge=RIDGE / len(y)),
        "clouds of all rows": partial(fit_clouds, names=names, other=other),
    }
    outcomes: list[Outcome] = []
    for name, fit in fits.items():
        began = time.monotonic()
        scores = few_labels.held_out_scores(x, y, few_labels.folds_by_label(y), classes, fit)
        outcomes.append(few_labels.label_outcome(work, scores))
        comparison.add(name, outcomes[-1], began, outcomes[0] if outcomes[1:] else None)
    return comparison.gain(*outcomes)


# ------------------------------------------------------------------ teachers

TEACHERS = {"cpu": 1, "cuda": 3}
FOLDER = "teachers"


def teachers_settings(work: FinetuneData, settings: FinetuneConfig) -> FinetuneConfig:
    """The labelled rows' settings: one teacher on a processor, which starts from a frozen one."""
    count = settings.seeds if settings.seeds > 1 else per_device(TEACHERS, work.device.type)
    return replace(
        settings,
        seeds=count,
        minutes=settings.minutes / (count + 1),  # the student has as much
        frozen_first=settings.frozen_first and count == 1,
    )


def teachers_folders(settings: FinetuneConfig, out: Path) -> list[Path]:
    """Where the teachers with these settings are."""
    names = [f"seed-{one.seed}" for one in settings.variants()]
    return [out / FOLDER / name for name in names] if len(names) > 1 else [out / FOLDER]


def taught(work: FinetuneData, settings: FinetuneConfig, folders: Sequence[Path]) -> FinetuneData:
    """The data of a student: all rows, those without labels as the first teacher reads them.

    That teacher stays the result if its student is clearly worse on the held-out rows.
    """
    first, *others = (read_checkpoint(folder, device=work.device) for folder in folders)
    reading = work.predictor(first)
    with work.computing(settings):
        said = head_kind(work.task).predict(reading, work.unlabelled)
        held = judge_held_out(work, reading)
    labels = (tuple(one) if isinstance(one, list) else one for one in (s.prediction for s in said))
    rows = [replace(row, label=one) for row, one in zip(work.unlabelled, labels, strict=True)]

    def beats(outcome: Outcome) -> bool:
        return bool(held.said) and paired_gain(held_out_score(work), held, outcome).clear_loss

    return replace(
        work,
        train=(*work.train, *rows),
        unlabelled=(),
        teaching=Distillation(first.network, others=tuple(one.network for one in others)),
        rival=Rival("the teacher", folders[0], beats),
    )
