"""Few labels and a language model: label words after a prompt, calibrated, without training.

Cross-validation on the training rows compares prompts with one another and with a new layer.
P prompts, n rows, N labels, F folds.
"""

import json
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.evaluate import score_examples
from malmoi.evaluation.kinds import CLASSIFICATION, head_kind
from malmoi.evaluation.predictions import ExamplePrediction, Outcome
from malmoi.finetuning.candidates import Candidate, Comparison, Fitted, compare_held_out
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.few_labels import has_few_rows, has_letters
from malmoi.finetuning.linear_head import held_out_scores
from malmoi.finetuning.protocol import Rows, hold_out
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.task_network import task_facts
from malmoi.finetuning.verbalizer_loss import task_verbalizer
from malmoi.inference import Model
from malmoi.inference.predict import CONTENT_FREE, Verbalizer, content_free_bias, word_logprobs
from malmoi.inference.zero_shot import prompt_language
from malmoi.messages import msg
from malmoi.system.progress import tracked

logger = logging.getLogger(__name__)

# all begin with the text, which is then read once for all of them
PROMPTS = {
    "en": ("{text}\nSentiment:", "{text}\nTopic:", "{text}\nCategory:", "{text}\nThis text is"),
    "ko": ("{text}\n감정:", "{text}\n주제:", "{text}\n분류:", "{text}\n한마디로"),
}
KEPT = 3  # prompts whose scores are averaged: with few rows the single best is often luck
USUAL_LABEL = "the most frequent label"
MEAN_OF_BEST = "the mean of the best three"
NEW_LAYER = "a new layer"  # its stand-in is a logistic layer on the frozen vectors
MAX_COMPARED_ROWS = 64  # more cost time and change no choice
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

    Automatic for classification with at most `MAX_ROWS` rows by a language model, if no option asks
    for training; `prompt` turns it on or off.
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
    if settings.prompt and not able:
        raise UsageError(
            "prompt needs a classification task with at least two labels, and a GPT or a BERT with "
            "its masked-language head."
        )
    if settings.prompt and not named:
        raise UsageError(
            "prompt needs labels that are different words, such as positive and negative; "
            "these are {words}.",
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
    """The mean of the best prompts by log-loss.

    None if a new layer is clearly better, or if the words are not clearly better than the most
    frequent label: then the model does not know them.
    """
    work = replace(work, held=_compared_rows(work, settings.seed))
    prompts = _prompts(work)
    logger.info(
        msg(
            "Only {train} training rows: comparing label words after {candidates} prompts "
            "with a new layer by cross-validation (--set prompt=false for fine-tuning).",
            train=len(work.train),
            candidates=len(prompts),
        )
    )
    work.start.network.to(work.device).eval()
    comparison = compare_held_out(work, out)
    words, (usual, mean, layer) = _try_all(work, prompts, comparison)
    informed = comparison.gain(usual, mean).clear
    if settings.prompt is None and (not informed or comparison.gain(mean, layer).clear):
        logger.info("A new layer is trained.")
        return None
    logger.info(
        msg(
            "Label words after {prompts}: nothing needs to be trained.",
            prompts=", ".join(repr(one.prompt) for one in (words, *words.also)),
        )
    )
    return words


def _try_all(
    work: FinetuneData, prompts: Sequence[Verbalizer], comparison: Comparison
) -> tuple[Verbalizer, tuple[Outcome, Outcome, Outcome]]:
    """The mean of the best prompts; and the outcomes of the usual label, that mean and a layer."""
    labels = torch.tensor([work.labels.index(row.label) for row in work.held])
    folds = _folds(len(labels), len(set(labels.tolist())))

    def run(name: str, scores: Callable[[], Tensor], first: Outcome | None = None) -> Outcome:
        def fit(folder: Path, seconds: float) -> Fitted:
            return Fitted(work.start, _outcome(work, scores()), steps=0)

        return comparison.run(Candidate(name, 0.0, fit), first)[1].outcome

    @cache  # one reading for all prompts
    def calibrated() -> Calibration:
        return fit_calibration(*_prompt_scores(work, prompts), labels, folds)

    most = F.one_hot(labels.mode().values, len(work.labels)).expand(len(labels), -1)
    usual = run(USUAL_LABEL, most.log)
    for i, one in enumerate(prompts):
        run(repr(one.prompt), partial(lambda i: calibrated().held_out[i], i), usual)
    found = calibrated()
    order = found.losses(labels).argsort(stable=True)[:KEPT].tolist()
    scores = found.held_out.log_softmax(-1)[order].mean(0)
    mean = run(MEAN_OF_BEST, lambda: scores, usual)
    layer = run(NEW_LAYER, lambda: _layer_scores(work, labels, folds), usual)
    best, *others = (
        replace(prompts[i], bias=tuple(found.bias[i].tolist()), scale=float(found.scale[i]))
        for i in order
    )
    return replace(best, also=tuple(others)), (usual, mean, layer)


def _compared_rows(work: FinetuneData, seed: int) -> Rows:
    """Some training rows, sorted so that folds have all labels alike."""
    rows = work.train
    if len(rows) > MAX_COMPARED_ROWS:
        rows = hold_out(work.task, rows, MAX_COMPARED_ROWS, seed)[1]
    return tuple(sorted(rows, key=lambda row: str(row.label)))


def _prompts(work: FinetuneData) -> list[Verbalizer]:
    own = task_verbalizer(work.task, work.labels)
    language = prompt_language(" ".join(row.text for row in work.held))
    forms: tuple[str, ...] = PROMPTS[language]
    if any(row.pair is not None for row in work.held):
        forms = tuple(form.replace("{text}", "{text}\n{pair}") for form in forms)
    return [replace(own, prompt=form) for form in dict.fromkeys((own.prompt, *forms))]


def _prompt_scores(work: FinetuneData, prompts: Sequence[Verbalizer]) -> tuple[Tensor, Tensor]:
    """log P of the words after each prompt [P, n, N], and content-free biases [P, N]."""
    start = work.start
    rows = len(work.held)
    texts = [(row.text, row.pair or "") for row in work.held]
    texts += [(one, one) for one in CONTENT_FREE]
    found = []
    said = prompts[0].said
    # one text at a time: its prompts share its tokens
    for [i] in tracked(([i] for i in range(len(texts))), "finetune", len(texts)):
        queries = [words.query(*texts[i]) for words in prompts]
        found.append(word_logprobs(start.network, start.required_tokenizer, queries, said))
    logs = torch.stack(found, 1).double().log_softmax(-1)
    return logs[:, :rows], torch.stack([content_free_bias(one) for one in logs[:, rows:]])


def _folds(rows: int, classes: int) -> Tensor:
    """Which rows each fold holds out [F, n]; the last fold holds out none.

    A row of each label at a time: without a row of one label, the others look too frequent.
    """
    count = max(2, min(rows // classes, MAX_FOLDS))
    held = torch.arange(rows)[None] % count == torch.arange(count)[:, None]
    return torch.cat((held, torch.zeros(1, rows, dtype=torch.bool)))


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
    optimizer = torch.optim.LBFGS([powers, bias], max_iter=FIT_STEPS, line_search_fn="strong_wolfe")
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
    return held_out_scores(vectors, labels, folds[:-1], len(work.labels), 0.5 / len(labels))


def _outcome(work: FinetuneData, scores: Tensor) -> Outcome:
    """The labels of the held-out rows with the highest scores [n, N]."""
    said = []
    for chances in scores.softmax(-1):
        by_label = dict(zip(work.labels, chances.tolist(), strict=True))
        best = max(by_label, key=by_label.__getitem__)
        said.append(ExamplePrediction(best, by_label[best], by_label))
    gold = [row.label for row in work.held]
    return Outcome(score_examples(work.task, work.held, gold, said, work.labels), gold, said)
