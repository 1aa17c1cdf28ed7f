"""Few labels and a language model: label words after a prompt, calibrated, without training.

Cross-validation on the training rows compares prompts with one another and with a new layer.
P prompts, n rows, N labels, F folds.
"""

import json
import logging
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import CLASSIFICATION, head_kind
from malmoi.evaluation.task import Example
from malmoi.finetuning.candidates import Gain, read_rows
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.few_labels import has_few_rows, has_letters
from malmoi.finetuning.linear_head import held_out_scores
from malmoi.finetuning.protocol import hold_out
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.task_network import task_facts
from malmoi.finetuning.verbalizer_loss import task_verbalizer
from malmoi.inference import Model
from malmoi.inference.predict import verbalizer_of
from malmoi.inference.verbalizer import CONTENT_FREE, Verbalizer, content_free_bias, word_logprobs
from malmoi.inference.zero_shot import prompt_language
from malmoi.messages import msg
from malmoi.system.files import write_text
from malmoi.system.progress import tracked
from malmoi.system.untrusted import JsonObject, read_object

logger = logging.getLogger(__name__)

RECORD = "comparison.json"
# all begin with the text, which is then read once for all of them
PROMPTS = {
    "en": ("{text}\nSentiment:", "{text}\nTopic:", "{text}\nCategory:", "{text}\nThis text is"),
    "ko": ("{text}\n감정:", "{text}\n주제:", "{text}\n분류:", "{text}\n한마디로"),
}
KEPT = 3  # prompts whose scores are averaged: with few rows the single best is often luck
MEAN_OF_BEST = f"the mean of the best {KEPT}"
NEW_LAYER = "a new layer"  # its stand-in is a logistic layer on the frozen vectors
MAX_COMPARED_ROWS = 64  # more cost time and change no choice
MAX_FOLDS = 8
FIT_STEPS = 100  # of L-BFGS, which converges long before
# options that do not ask for training
NEUTRAL = frozenset(
    {"prompt", "seed", "metric", "holdout", "skip_bad", "track", "precision", "max_minutes"}
)


@dataclass(frozen=True)
class Compared:
    """One way to classify, cross-validated on the training rows."""

    way: str
    accuracy: float
    log_loss: float

    @property
    def table_row(self) -> tuple[str, ...]:
        return (self.way, f"{self.accuracy:.1%}", f"{self.log_loss:.3f}")


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
    words = (_read_choice(out, work) or _compare(work, settings, out)) if wanted else None
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
    rows = _compared_rows(work, settings.seed)
    candidates = _candidates(work, rows)
    logger.info(
        msg(
            "Only {train} training rows: comparing label words after {candidates} prompts "
            "with a new layer by cross-validation (--set prompt=false for fine-tuning).",
            train=len(work.train),
            candidates=len(candidates),
        )
    )
    labels = torch.tensor([work.labels.index(row.label) for row in rows])
    held = _folds(len(rows), len(set(labels.tolist())))
    work.start.network.to(work.device).eval()
    fitted = fit_calibration(*_prompt_scores(work, candidates, rows), labels, held)
    scores = fitted.held_out.log_softmax(-1)
    found = [_compared(repr(w.prompt), s, labels) for w, s in zip(candidates, scores, strict=True)]
    order = sorted(range(len(found)), key=lambda i: found[i].log_loss)[:KEPT]
    mean = scores[order].mean(0)
    layer = _layer_scores(work, rows, labels, held)
    found += [_compared(MEAN_OF_BEST, mean, labels), _compared(NEW_LAYER, layer, labels)]
    trains = settings.prompt is None and _layer_is_better(mean, layer, labels)
    chosen = [
        replace(candidates[i], bias=tuple(fitted.bias[i].tolist()), scale=float(fitted.scale[i]))
        for i in order
    ]
    words = None if trains else replace(chosen[0], also=tuple(chosen[1:]))
    _write_comparison(out, work, found, words)
    kept = found[-1] if trains else found[-2]
    said = msg(
        "accuracy {accuracy:.1%}, log-loss {log_loss:.3f}",
        accuracy=kept.accuracy,
        log_loss=kept.log_loss,
    )
    if trains:
        logger.info(
            msg(
                "Training a new layer: {said} in cross-validation on {rows} rows.",
                said=said,
                rows=len(rows),
            )
        )
    else:
        prompts = ", ".join(repr(one.prompt) for one in chosen)
        logger.info(
            msg(
                "Label words after {prompts}: {said} in cross-validation on {rows} rows; "
                "nothing needs to be trained.",
                prompts=prompts,
                said=said,
                rows=len(rows),
            )
        )
    return words


def _compared_rows(work: FinetuneData, seed: int) -> list[Example]:
    """Some training rows, sorted so that folds have all labels alike."""
    rows: Sequence[Example] = work.train
    if len(rows) > MAX_COMPARED_ROWS:
        rows = hold_out(work.task, rows, MAX_COMPARED_ROWS, seed)[1]
    return sorted(rows, key=lambda row: str(row.label))


def _layer_is_better(words: Tensor, layer: Tensor, labels: Tensor) -> bool:
    """Whether the layer is clearly better, or the words are no better than the usual label."""
    by_words, by_layer = ((one.argmax(-1) == labels).double() for one in (words, layer))
    share = float(labels.bincount().max()) / len(labels)
    error = (share * (1 - share) / len(labels)) ** 0.5
    informed = Gain(float(by_words.mean()) - share, error).clear
    return not informed or Gain.of_rows(by_layer - by_words).clear


def _candidates(work: FinetuneData, rows: Sequence[Example]) -> list[Verbalizer]:
    own = task_verbalizer(work.task, work.labels)
    language = prompt_language(" ".join(row.text for row in rows))
    forms: tuple[str, ...] = PROMPTS[language]
    if any(row.pair is not None for row in rows):
        forms = tuple(form.replace("{text}", "{text}\n{pair}") for form in forms)
    return [replace(own, prompt=form) for form in dict.fromkeys((own.prompt, *forms))]


def _prompt_scores(
    work: FinetuneData, candidates: Sequence[Verbalizer], rows: Sequence[Example]
) -> tuple[Tensor, Tensor]:
    """log P of the words after each prompt [P, n, N], and content-free biases [P, N]."""
    start = work.start
    texts = [(row.text, row.pair or "") for row in rows]
    texts += [(one, one) for one in CONTENT_FREE]
    found = []
    said = candidates[0].said
    # one text at a time: its prompts share its tokens
    for [i] in tracked(([i] for i in range(len(texts))), "finetune", len(texts)):
        queries = [words.query(*texts[i]) for words in candidates]
        found.append(word_logprobs(start.network, start.required_tokenizer, queries, said))
    logs = torch.stack(found, 1).double().log_softmax(-1)
    return logs[:, : len(rows)], torch.stack([content_free_bias(c) for c in logs[:, len(rows) :]])


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


def _layer_scores(
    work: FinetuneData, rows: Sequence[Example], labels: Tensor, held: Tensor
) -> Tensor:
    """Held-out scores [n, N] of a logistic layer on the frozen model's vectors."""
    texts = ["\n".join(row.texts) for row in rows]
    vectors = torch.from_numpy(Model(work.start).embed(texts, truncate=True)).double()
    vectors = vectors / vectors.norm(dim=1).mean()
    return held_out_scores(vectors, labels, held[:-1], len(work.labels), 0.5 / len(rows))


def _compared(way: str, scores: Tensor, labels: Tensor) -> Compared:
    right = (scores.argmax(-1) == labels).double()
    return Compared(way, float(right.mean()), float(F.cross_entropy(scores, labels)))


# ------------------------------------------------------------------ comparison.json


def _write_comparison(
    out: Path, work: FinetuneData, found: Sequence[Compared], words: Verbalizer | None
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "of": work.model_name,
        "compared": [asdict(one) for one in found],
        "words": None if words is None else asdict(words),
    }
    write_text(out / RECORD, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def read_comparison(out: Path) -> list[Compared]:
    """The ways that were compared in a folder; none if nothing was."""
    return [Compared(**row) for row in read_rows(out / RECORD, "compared")]


def _read_choice(out: Path, work: FinetuneData) -> Verbalizer | None:
    """The label words that an earlier call chose for the same model and rows, if one did."""
    if not (out / RECORD).is_file():
        return None
    found = JsonObject(read_object(out / RECORD), str(out / RECORD))
    if found.get("of") != work.model_name or found.get("words") is None:
        return None
    return verbalizer_of(found.object("words"), len(work.labels))
