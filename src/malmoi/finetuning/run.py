"""One run of a fine-tuning: with its settings to the end, or as a trial of a search."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from malmoi.checkpoint import Checkpoint, read_checkpoint
from malmoi.checkpoint.folder import SentencePooling
from malmoi.evaluation.evaluate import judge, judge_held_out, predict_and_score
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.kinds import encode_examples, head_kind
from malmoi.evaluation.predictions import Outcome
from malmoi.evaluation.task import metric_names
from malmoi.finetuning.batches import LM_WEIGHTS
from malmoi.finetuning.candidates import Fitted
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.few_labels import ContrastiveTrainer, contrast_loss, label_name_items
from malmoi.finetuning.first_answer import FirstAnswer, first_answer, start_solved
from malmoi.finetuning.frozen_features import cached_states
from malmoi.finetuning.label_prompts import prompted_model
from malmoi.finetuning.report import write_task_report
from malmoi.finetuning.results import (
    FinishedRun,
    complete_run,
    judged_run,
    load_finished,
    save_model,
)
from malmoi.finetuning.run_state import begin_run
from malmoi.finetuning.task_data import FinetuneData, classes_in, describe_run
from malmoi.finetuning.task_network import build_task_network
from malmoi.finetuning.trainer import FinetuneTrainer
from malmoi.finetuning.verbalizer_loss import verbalizer_items, verbalizer_loss
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import NUMBER
from malmoi.messages import measured, msg, plural
from malmoi.model import Network
from malmoi.tokenizer import TokenRow
from malmoi.training.loss_module import LossModule
from malmoi.training.losses import Objective, lm
from malmoi.training.losses.distil import consistent
from malmoi.training.signals import Stopped

logger = logging.getLogger(__name__)
MAX_BASELINE_ROWS = 100  # rows evaluated before fine-tuning
MIN_TRIAL_SECONDS = 0.1
EVALUATED_PER_TRAINED = 2.0  # rows evaluated while one is trained on: about three, to be safe


def run_once(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool = False
) -> FinishedRun:
    """Trains to the end and evaluates; a run with label words is only evaluated."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = _new_model(work, settings)  # refuses settings before the folder records them
    if begin_run(out, work.record(settings), overwrite=overwrite):
        return load_finished(work, settings, out)
    if work.words is not None:
        logger.info(work.protocol.describe())
        return complete_run(work, judged_run(work, settings, checkpoint, 0), out)
    reading = work.predictor(checkpoint)
    items = _items(work, reading)
    if settings.contrastive:
        items = [*items, *label_name_items(work, reading)]
    describe_run(work.as_trained(checkpoint), settings, checkpoint.network, items)
    first = first_answer(work, settings, out) if settings.frozen_first else None
    if first is not None:
        whole = items
        items = _cut_to_fit(work, settings, first, reading, whole)
        share = sum(item.length for item in items) / sum(item.length for item in whole)
        if first.hurries(settings, share):
            checkpoint = _new_model(work, replace(settings, layers_transferred=None))
            start_solved(work, settings, checkpoint, out)
    return _Run(work, settings, out, checkpoint, first).train(items)


def _cut_to_fit(
    work: FinetuneData,
    settings: FinetuneConfig,
    first: FirstAnswer,
    reading: Predictor,
    items: list[TrainingItem],
) -> list[TrainingItem]:
    """The training rows, cut to fewer tokens if the time holds too few epochs of whole ones."""
    length = first.fitting_length(settings, items)
    if not length:
        return items
    logger.info(
        msg(
            "Training rows are cut to {length} tokens, so that {minutes} hold about two epochs; "
            "--length {full} trains on whole rows.",
            length=length,
            minutes=plural(settings.max_minutes, "minute"),
            full=reading.max_tokens,
        )
    )
    return _items(work, replace(reading, length=length))


@dataclass(frozen=True)
class _Run:
    """A run from its first step to its result."""

    work: FinetuneData
    settings: FinetuneConfig
    out: Path
    checkpoint: Checkpoint  # to be trained
    first: FirstAnswer | None  # what it is compared with

    @cached_property
    def reading(self) -> Predictor:
        return self.work.predictor(self.checkpoint)

    def train(self, items: Sequence[TrainingItem]) -> FinishedRun:
        work = self.work
        untuned = _untuned(work, self.settings, self.reading)
        network = self.checkpoint.network
        with self.left_usable(), cached_states(network, lambda: _rows(work, self.reading, items)):
            trainer = self.trainer(items)
            trainer.fit()
            run = self._judged(trainer)
        done = replace(run.outcome, metrics={**run.outcome.metrics, **untuned})
        return complete_run(work, replace(run, outcome=done), self.out)

    def trainer(self, items: Sequence[TrainingItem]) -> FinetuneTrainer:
        settings = self.settings
        words = verbalizer_loss(items) if self.reading.words else None
        module = LossModule(self.checkpoint.network, make_objective(self.work, settings, words))
        make = ContrastiveTrainer if settings.contrastive else FinetuneTrainer
        # the logistic layer is fitted at the end: before that there is nothing to evaluate
        watch = self.watch if self.work.held and not settings.contrastive else None
        return make(module, items, settings, self.out, watch, self.work.primary_metric)

    def watch(self) -> Outcome:
        """Evaluates the held-out rows, and keeps the folder at the best model so far."""
        outcome = judge_held_out(self.work.task, self.work, self.reading)
        if self.first is not None and not self.first.beats(outcome):
            self._save()
        return outcome

    def _save(self) -> None:
        save_model(self.work, self.settings, self.checkpoint, self.out)

    @contextmanager
    def left_usable(self) -> Iterator[None]:
        """Leaves the best model so far in the folder if a signal stops the run."""
        try:
            yield
        except Stopped:
            if self.first is None:
                self._save()
            write_task_report(self.out, self.work, self.settings)
            logger.info(msg("The best model so far is in {out}.", out=self.out))
            raise

    def _judged(self, trainer: FinetuneTrainer) -> FinishedRun:
        """The better one of the trained and the frozen model, evaluated."""
        work = self.work
        trainer.explain_limit()
        held = trainer.outcome(self.watch) if work.held else None
        if self.first is not None and held is not None and self.first.beats(held):
            rows = plural(len(self.first.places), "held-out row")
            logger.info(msg("The frozen model is better on {rows}: it is the result.", rows=rows))
            trainer.log.close()
            frozen = read_checkpoint(self.first.folder, device=work.device)
            return judged_run(work, self.settings, frozen, trainer.state.step)
        if self.first is not None and held is None:
            self._save()  # reading the evaluation rows may take long
        chosen = None if held is None else held.chosen
        done = trainer.judge(lambda: judge(work.task, work, self.reading, chosen))
        selected = {} if held is None else held.metrics
        return FinishedRun(self.settings, self.checkpoint, done, trainer.state.step, selected)


def _new_model(work: FinetuneData, settings: FinetuneConfig) -> Checkpoint:
    if work.words is not None:
        return prompted_model(work, work.words)
    checkpoint = build_task_network(work.start, work.task, work.labels, settings)
    _start_at_mean(work, checkpoint.network)
    checkpoint.network.to(work.device)
    return checkpoint


def run_trial(work: FinetuneData, settings: FinetuneConfig, out: Path, seconds: float) -> Fitted:
    """One run of a search, evaluated on the held-out rows alone; an aborted one is resumed.

    After so many seconds of training it ends, its rate decayed by then.
    """
    out.mkdir(parents=True, exist_ok=True)
    unjudged = replace(work, dev=work.held)
    if begin_run(out, work.record(settings), overwrite=False):
        known = load_finished(unjudged, settings, out)
        return Fitted(known.checkpoint, known.outcome, known.steps)
    trial = _Run(work, settings, out, _new_model(work, settings), None)
    trainer = trial.trainer(_items(work, trial.reading))
    trainer.score = trainer.score if settings.patience else None  # it has no curve
    trainer.limit = max(seconds, MIN_TRIAL_SECONDS)
    with trial.left_usable():
        trainer.fit()
    done = trainer.judge(trial.watch, "held out") if work.held else Outcome({}, [], [])
    trainer.log.close()
    run = FinishedRun(settings, trial.checkpoint, done, trainer.state.step, done.metrics)
    complete_run(unjudged, run, out)
    per_row = trainer.clock.usual_step / settings.batch / EVALUATED_PER_TRAINED
    share = min(1.0, trainer.state.step / trainer.steps)
    return Fitted(trial.checkpoint, done, trainer.state.step, share, per_row)


def _start_at_mean(work: FinetuneData, network: Network) -> None:
    """Starts the bias of a regression head at the mean label, which training reaches slowly."""
    new = head_kind(work.task).output is NUMBER and work.start.labels != work.labels
    for name, bias in network.heads.named_parameters():
        if new and name == "classify.linear.bias":  # a GPT has none
            torch.nn.init.constant_(bias, sum(float(e.label) for e in work.train) / len(work.train))


def _untuned(work: FinetuneData, settings: FinetuneConfig, reading: Predictor) -> dict[str, float]:
    """Metrics before fine-tuning, for kinds that a pre-trained model can already do."""
    if not head_kind(work.task).in_context:
        return {}
    reading.network.eval()
    with work.computing(settings):
        found = predict_and_score(work.task, work.dev[:MAX_BASELINE_ROWS], reading).metrics
    reading.network.train()
    logger.info(msg("Before fine-tuning: {shown}.", shown=measured(found)))
    return {f"{name}_untuned": found[name] for name in metric_names(work.task)[:2]}


def _items(work: FinetuneData, reading: Predictor) -> list[TrainingItem]:
    if reading.words is not None:
        return verbalizer_items(work.train, reading, reading.words)
    return work.items(FeatureView.of(reading, work.labels))


def _rows(work: FinetuneData, reading: Predictor, items: Sequence[TrainingItem]) -> list[TokenRow]:
    """All rows used for training or evaluation."""
    judged = encode_examples(
        work.task, [*work.dev, *work.held], FeatureView.of(reading, work.labels)
    )
    return [row for item in (*items, *judged) for row in item.rows]


def make_objective(
    work: FinetuneData, settings: FinetuneConfig, words: Objective | None = None
) -> Objective:
    """The task's or verbalizer's loss plus, for GPT-1, λ times the LM loss: L3 = L2 + λ·L1 (eq. 5).

    With a teacher, the labels' loss is only a share of the total.
    """
    kind = head_kind(work.task)
    if settings.contrastive:
        return contrast_loss()
    if kind.sentence_objective is not None:
        return kind.sentence_objective((work.start.sentence or SentencePooling()).tokens)
    objective = words or kind.objective(_weights(work) if settings.class_weights else None)
    if settings.rdrop:
        objective = consistent(objective, kind.distil, settings.rdrop)
    if settings.lm:
        objective = objective + settings.lm * lm(weights=LM_WEIGHTS)
    return objective if work.teaching is None else work.teaching.add_to(objective, kind.distil)


def _weights(work: FinetuneData) -> list[float]:
    """Class weights √(n / (N · count)), scaled so that their mean over the examples is 1.

    The root keeps frequent labels from losing more than rare ones gain.
    """
    counts = Counter(name for e in work.train for name in classes_in(work.task, e))
    roots = {name: (counts.total() / count) ** 0.5 for name, count in counts.items()}
    mean = sum(roots[name] * count for name, count in counts.items()) / counts.total()
    return [roots.get(name, mean) / mean for name in work.labels]
