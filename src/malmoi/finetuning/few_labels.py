"""Few labels: a linear head, contrasted sentence vectors, or label words without any training.

n rows, D width of a text's vector, N labels, F folds, P prompts.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.errors import require_that
from malmoi.evaluation.evaluate import score_examples
from malmoi.evaluation.features import ExamplePrediction, FeatureView, Outcome, TrainingItem
from malmoi.evaluation.kinds import CLASSIFICATION, encode_examples, head_kind
from malmoi.evaluation.task import Example
from malmoi.finetuning.candidates import Comparison, Gain
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.task_data import MAX_FEW_ROWS, FinetuneData, hold_out
from malmoi.finetuning.task_network import build_task_network, task_facts, task_verbalizer
from malmoi.finetuning.trainer import FinetuneTrainer
from malmoi.inference import Model, predict
from malmoi.inference.predict import Predictor, Verbalizer
from malmoi.inference.predictors import LABEL_SET, NUMBER, ONE_LABEL, TaskHead
from malmoi.inference.zero_shot import descriptions, prompt_language
from malmoi.interpret.probe import fit_linear
from malmoi.messages import logger
from malmoi.model import Network
from malmoi.model.heads import LinearHead
from malmoi.system.optimizers import lean
from malmoi.training.losses import ForwardPass, Objective
from malmoi.training.losses.base import Term

# ------------------------------------------------------------------ a linear head, solved for

Loss = Callable[[Tensor, Tensor], Tensor]  # of scores [n, N] and labels
Fit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # vectors, labels → weight, bias
LOSSES: Mapping[TaskHead, Loss] = {
    ONE_LABEL: F.cross_entropy,
    LABEL_SET: F.binary_cross_entropy_with_logits,
    NUMBER: lambda scores, labels: F.mse_loss(scores[:, 0], labels),
}
# × |W|² beside the sum of the losses, on vectors of mean length 1
LAYERS = "all"  # their means: better than those of the last four, or of the last (docs/lab.md)
RIDGES = (10.0, 3.0, 1.0, 0.3, 0.1)
FOLDS = 5
MAX_RIDGE_ROWS = 1000  # more change no choice
TINY = 1e-12


def rows_by_label(work: FinetuneData, most: int, seed: int = 0) -> FinetuneData:
    """At most so many training rows to compare candidates on, so that folds have all labels."""
    rows = work.train
    rows = hold_out(work.task, rows, most, seed)[1] if len(rows) > most else rows
    return replace(work, held=tuple(sorted(rows, key=lambda row: str(row.label))))


def frozen_model(work: FinetuneData, settings: FinetuneConfig) -> Checkpoint:
    """The frozen model with a new layer on the means of all layers."""
    frozen = replace(settings, features=LAYERS, tune_features=True, lm=0.0, layers_transferred=None)
    checkpoint = build_task_network(work.start, work.task, work.labels, frozen)
    checkpoint.network.to(work.device)
    return checkpoint


def item_vectors(network: Network, items: Sequence[TrainingItem]) -> Tensor:
    """A pooled vector per item [n, D]: the sum of its rows, as a pair in both orders is read."""
    vectors = (
        predict.pool_texts(network, [row for item in items for row in item.rows]).float().cpu()
    )
    return vectors.view(len(items), -1, vectors.size(-1)).sum(1)


def fit_head(
    network: Network, x: Tensor, y: Tensor, loss: Loss = F.cross_entropy, ridge: float | None = None
) -> None:
    """Sets the classify head to the one with the least loss; cross-validation chooses the ridge.

    Vectors are scaled by their mean length, so that the penalty does not depend on the encoder's
    scale; to choose it they are centred too, since some encoders have one large vector in all.
    """
    classes = cast(LinearHead, network.heads["classify"]).linear.out_features
    middle = x.mean(0) * (ridge is None)
    x, axes = _scaled(x - middle)
    if ridge is None:
        ridge = _best_ridge(x[:MAX_RIDGE_ROWS], y[:MAX_RIDGE_ROWS], classes, loss) / len(x)
    weight, bias = fit_linear(x, y, classes, ridge, loss)
    weight = axes.T @ weight
    set_head(network, weight, bias - middle @ weight)


@torch.no_grad()
def set_head(network: Network, weight: Tensor, bias: Tensor) -> None:
    """Makes x W + b the scores of the classify head, but for a bias that it lacks."""
    head = cast(LinearHead, network.heads["classify"]).linear
    head.weight.copy_(weight.T)
    if head.bias is not None:
        head.bias.copy_(bias)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of mean length 1 in axes of the space that they span, and these axes, scaled too."""
    scale = 1 / x.norm(dim=1).mean().clamp(min=TINY)
    rows, width = x.shape
    axes = torch.linalg.svd(x, full_matrices=False).Vh if rows < width else torch.eye(width).to(x)
    return x @ axes.T * scale, axes * scale


def _best_ridge(x: Tensor, y: Tensor, classes: int, loss: Loss) -> float:
    """The ridge with the fewest wrong labels in cross-validation, then with the least loss.

    By the loss alone, few rows would choose a layer that always says the most frequent label.
    """
    held = folds_by_label(y)

    def errors(ridge: float) -> tuple[int, float]:
        fit = partial(fit_linear, classes=classes, ridge=ridge / len(x), loss=loss)
        scores = held_out_scores(x, y, held, classes, fit)
        wrong = scores.argmax(1) != y if loss is F.cross_entropy else torch.zeros(())
        return int(wrong.sum()), float(loss(scores, y))

    return min(RIDGES, key=errors)


def folds_by_label(y: Tensor, count: int = FOLDS) -> Tensor:
    """The rows that each fold holds out [F, n]: all labels in each."""
    order = y.argsort(stable=True) if y.dim() == 1 else torch.arange(len(y))
    return order.argsort() % count == torch.arange(count)[:, None]


def cross_validated(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Scores of every row [n, N] by a layer that did not see it; the ridge is chosen on all."""
    x, _ = _scaled(x - x.mean(0))
    ridge = _best_ridge(x, y, classes, F.cross_entropy) / len(x)
    fit = partial(fit_linear, classes=classes, ridge=ridge)
    return held_out_scores(x, y, folds_by_label(y), classes, fit)


def held_out_scores(x: Tensor, y: Tensor, held: Tensor, classes: int, fit: Fit) -> Tensor:
    """Scores of every row [n, N] by the fit without its fold; `held` [F, n] are the folds' rows."""
    scores = torch.zeros(len(x), classes, dtype=x.dtype)
    for fold in held:
        if not fold.all():
            weight, bias = fit(x[~fold], y[~fold])
            scores[fold] = x[fold] @ weight + bias
    return scores


# ------------------------------------------------------------------ contrasted vectors (SetFit)

# measured with 16 phrases of SST-2 (docs/lab.md)
CONTRAST_DEFAULTS = {"lr": 1e-4, "epochs": 12.0, "batch": 32}


def choose_contrast(
    work: FinetuneData, settings: FinetuneConfig, given: Set[str]
) -> FinetuneConfig:
    """Adds a contrastive stage to the settings if there are few rows (Tunstall et al. 2022).

    Automatic for classes by a fully trained sentence encoder; `contrastive` turns it on or off.
    """
    fits = head_kind(work.task) is CLASSIFICATION and work.start.sentence is not None
    require_that(
        not settings.contrastive or fits,
        "contrastive needs a classification task and a sentence encoder's folder.",
    )
    whole = settings.trains_all and not settings.from_scratch and not settings.own_cosines
    chosen = settings.contrastive is None and fits and whole and has_few_rows(work)
    if not settings.contrastive and not chosen:
        return replace(settings, contrastive=False)
    if chosen:
        logger.info(
            "Only {train} training rows: contrasting sentence vectors and fitting a logistic "
            "layer, as in SetFit (--set contrastive=false for plain fine-tuning).",
            train=len(work.train),
        )
    unset = {name: value for name, value in CONTRAST_DEFAULTS.items() if name not in given}
    return settings.override({**unset, "contrastive": True, "frozen_first": False})


def has_few_rows(work: FinetuneData) -> bool:
    """Whether the rows are so few that the usual way would learn little, and no teacher helps."""
    several = len({row.label for row in work.train}) > 1
    return several and len(work.train) <= MAX_FEW_ROWS and not work.teaching


def label_name_items(work: FinetuneData, reading: Predictor) -> list[TrainingItem]:
    """Two extra rows for each label of a text whose name is a word (docs/lab.md)."""
    rows = []
    for label in work.labels:
        word = work.task.answers.get(label, label)
        if has_letters(word) and work.train[0].pair is None:
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


# ------------------------------------------------------------------ label words after a prompt

# all begin with the text, which is then read once for all of them
PROMPTS = {
    "en": ("{text}\nSentiment:", "{text}\nTopic:", "{text}\nCategory:", "{text}\nThis text is"),
    "ko": ("{text}\n감정:", "{text}\n주제:", "{text}\n분류:", "{text}\n한마디로"),
}
KEPT = 3  # prompts whose scores are averaged: with few rows the single best is often luck
MAX_COMPARED_ROWS = 64  # more cost time and change no choice
FIRST_ROWS = 16  # after which words that lose are dropped
MAX_FOLDS = 8
FIT_STEPS = 100  # of L-BFGS, which converges long before
# options that do not ask for training
NEUTRAL = frozenset(
    {"prompt", "seed", "metric", "holdout", "skip_bad", "track", "precision", "max_minutes"}
)


def choose_prompt(
    work: FinetuneData, settings: FinetuneConfig, given: Set[str], out: Path
) -> tuple[FinetuneData, FinetuneConfig]:
    """Adds the calibrated label words to use instead of training, if there are few rows.

    Automatic for a language model if no option asks for training; `prompt` turns it on or off.
    """
    fits = _can_prompt(work, settings)
    neutral = NEUTRAL | ({"best", "minutes"} if settings.best else set())
    few = has_few_rows(work) and given <= neutral
    wanted = fits and few if settings.prompt is None else settings.prompt
    words = _compare(work, settings, out) if wanted else None
    return replace(work, words=words), replace(settings, prompt=words is not None)


def _can_prompt(work: FinetuneData, settings: FinetuneConfig) -> bool:
    """Whether the labels have words and the model can score them; if asked for, it must be."""
    network = work.start.network
    classes = head_kind(work.task) is CLASSIFICATION and len({e.label for e in work.train}) > 1
    able = classes and not network.config.both_ways and bool({"lm", "mlm"} & set(network.heads))
    words = [work.task.answers.get(label, label) for label in work.labels]
    named = all(map(has_letters, words)) and len({*words}) == len(words)
    require_that(
        not settings.prompt or able,
        "prompt needs several classes, and a GPT or a BERT with its masked-language head.",
    )
    require_that(
        not settings.prompt or named,
        "prompt needs labels that are different words; these are {words}.",
        words=", ".join(words),
    )
    return able and named


def prompted_model(work: FinetuneData, words: Verbalizer) -> Checkpoint:
    """The language model as it is, with the label words in its folder."""
    # lists, as in the folder
    extra = task_facts(work.task) | {"words": json.loads(json.dumps(asdict(words)))}
    work.start.network.to(work.device).eval()
    return replace(work.start, labels=work.labels, extra=extra, sentence=None)


# ------------------------------------------------------------------ the comparison


def _compare(work: FinetuneData, settings: FinetuneConfig, out: Path) -> Verbalizer | None:
    """The mean of the best prompts; None if a new layer, which is yet to learn more, is as good.

    None, too, if the words are not clearly better than the most frequent label.
    """
    work = rows_by_label(work, MAX_COMPARED_ROWS, settings.seed)
    prompts = _prompts(work)
    logger.info(
        "Only {train} training rows: comparing label words after {candidates} prompts "
        "with a new layer by cross-validation (--set prompt=false for fine-tuning).",
        train=len(work.train),
        candidates=len(prompts),
    )
    work.start.network.to(work.device).eval()
    few = replace(work, held=work.held[:: -(-len(work.held) // FIRST_ROWS)])
    # words that lose on a few rows already are dropped
    twice = settings.prompt is None and len(work.held) > FIRST_ROWS
    for some in (few, work) if twice else (work,):
        words, (mean_gain, layer_gain) = _try_all(some, prompts, Comparison(some, out))
        if settings.prompt is None and (not mean_gain.clear or layer_gain.value >= 0):
            logger.info("A new layer is trained.")
            return None
    logger.info(
        "Label words after {prompts}: nothing needs to be trained.",
        prompts=", ".join(repr(one.prompt) for one in (words, *words.also)),
    )
    return words


def _try_all(
    work: FinetuneData, prompts: Sequence[Verbalizer], comparison: Comparison
) -> tuple[Verbalizer, tuple[Gain, Gain]]:
    """The mean of the best prompts; its gain over the usual label, and a new layer's over it."""
    labels = torch.tensor([work.labels.index(row.label) for row in work.held])
    began = time.monotonic()

    def compared(name: str, scores: Tensor, first: Outcome | None = None) -> Outcome:
        outcome = label_outcome(work, scores)
        comparison.add(name, outcome, began, first)
        return outcome

    most = F.one_hot(labels.mode().values, len(work.labels)).expand(len(labels), -1)
    usual = compared("the most frequent label", most.log())
    folds = _folds(labels)
    found = fit_calibration(*_prompt_scores(work, prompts), labels, folds)
    for one, scores in zip(prompts, found.held_out, strict=True):
        compared(repr(one.prompt), scores, usual)
    order = found.losses(labels).argsort(stable=True)[:KEPT].tolist()
    scores = found.held_out.log_softmax(-1)[order].mean(0)
    mean = compared("the mean of the best three", scores, usual)
    began = time.monotonic()
    layer = compared("a new layer", _layer_scores(work, labels, folds), usual)
    best, *others = (
        replace(prompts[i], bias=tuple(found.bias[i].tolist()), scale=float(found.scale[i]))
        for i in order
    )
    gains = (comparison.gain(usual, mean), comparison.gain(mean, layer))
    return replace(best, also=tuple(others)), gains


def _prompts(work: FinetuneData) -> list[Verbalizer]:
    own = task_verbalizer(work.task, work.labels)
    forms: tuple[str, ...] = PROMPTS[prompt_language(" ".join(row.text for row in work.held))]
    if any(row.pair is not None for row in work.held):
        forms = tuple(form.replace("{text}", "{text}\n{pair}") for form in forms)
    return [replace(own, prompt=form) for form in dict.fromkeys((own.prompt, *forms))]


def _prompt_scores(work: FinetuneData, prompts: Sequence[Verbalizer]) -> tuple[Tensor, Tensor]:
    """log P of the words after each prompt [P, n, N], and content-free biases [P, N]."""
    start = work.start
    rows = len(work.held)
    texts = [
        *((row.text, row.pair or "") for row in work.held),
        *((one, one) for one in predict.CONTENT_FREE),
    ]
    found = predict.prompt_logprobs(
        start.network, start.required_tokenizer, prompts, texts, "finetune"
    )
    logs = found.transpose(0, 1).contiguous().double().log_softmax(-1)
    return logs[:, :rows], torch.stack([predict.content_free_bias(one) for one in logs[:, rows:]])


def _folds(labels: Tensor) -> Tensor:
    """Which rows each fold holds out [F, n]; the last fold holds out none.

    A row of each label at a time: without a row of one label, the others look too frequent.
    """
    count = max(2, min(len(labels) // len(labels.unique()), MAX_FOLDS))
    return F.pad(folds_by_label(labels, count), (0, 0, 0, 1))


@dataclass(frozen=True)
class Calibration:
    """Fits on all rows, and the scores of every row by the fit without it."""

    scale: Tensor  # [P]
    bias: Tensor  # [P, N]
    held_out: Tensor  # [P, n, N]

    def losses(self, labels: Tensor) -> Tensor:
        """Log-loss of the held-out scores [P]."""
        right = labels.expand(len(self.scale), -1)[..., None]
        return -self.held_out.log_softmax(-1).gather(-1, right).mean((1, 2))


def fit_calibration(logs: Tensor, prior: Tensor, labels: Tensor, held: Tensor) -> Calibration:
    """Fits scale · log p + bias of each prompt by cross-entropy, in every fold at once.

    The penalty ½(ln² scale + ‖bias − content-free bias‖²) makes the content-free calibration
    the answer where rows are few.
    """
    prompts, rows, _ = logs.shape
    folds = len(held)
    powers = torch.zeros(prompts, folds, dtype=logs.dtype, requires_grad=True)
    bias = prior[:, None].repeat(1, folds, 1).requires_grad_()
    optimizer = lean(torch.optim.LBFGS)(
        [powers, bias], max_iter=FIT_STEPS, line_search_fn="strong_wolfe"
    )
    target = labels.expand(prompts, folds, rows)[..., None]

    def scores() -> Tensor:
        return powers.exp()[..., None, None] * logs[:, None] + bias[:, :, None]

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = -scores().log_softmax(-1).gather(-1, target)[..., 0]
        penalty = powers.square().sum() + (bias - prior[:, None]).square().sum()
        loss = losses.masked_fill(held, 0).sum() + 0.5 * penalty
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        own = held.int().argmax(0)  # the fold that holds a row out
        held_out = scores()[:, own, torch.arange(rows)]
    return Calibration(powers.detach()[:, -1].exp(), bias.detach()[:, -1], held_out)


def _layer_scores(work: FinetuneData, labels: Tensor, folds: Tensor) -> Tensor:
    """Held-out scores [n, N] of a logistic layer on the frozen model's vectors."""
    texts = ["\n".join(row.texts) for row in work.held]
    vectors = torch.from_numpy(Model(work.start).embed(texts, truncate=True)).double()
    vectors = vectors / vectors.norm(dim=1).mean()
    classes = len(work.labels)
    fit = partial(fit_linear, classes=classes, ridge=0.5 / len(labels))
    return held_out_scores(vectors, labels, folds[:-1], classes, fit)


def label_outcome(work: FinetuneData, scores: Tensor) -> Outcome:
    """The labels of the held-out rows with the highest scores [n, N]."""
    said = []
    for chances in scores.softmax(-1):
        by_label = dict(zip(work.labels, chances.tolist(), strict=True))
        best = max(by_label, key=by_label.__getitem__)
        said.append(ExamplePrediction(best, by_label[best], by_label))
    gold = [row.label for row in work.held]
    return Outcome(score_examples(work.task, work.held, gold, said, work.labels), gold, said)
