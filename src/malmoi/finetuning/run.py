"""One run of a fine-tuning: with its settings to the end, or as a trial of a search.

A run without a budget starts with a linear layer on the frozen model's vectors. Held-out rows tell
in the end whether it or the fine-tuned model is kept.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.evaluation.evaluate import predict_and_score
from malmoi.evaluation.features import FeatureView, Outcome, TrainingItem
from malmoi.evaluation.kinds import encode_examples, head_kind
from malmoi.evaluation.task import metric_names
from malmoi.finetuning import few_labels, results
from malmoi.finetuning.candidates import Comparison, Gain, Rival, Tried, held_out_score, paired_gain
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.few_labels import ContrastiveTrainer
from malmoi.finetuning.frozen_features import cached_states
from malmoi.finetuning.own_cosines import after_own_cosines
from malmoi.finetuning.results import FinishedRun
from malmoi.finetuning.task_data import FinetuneData, classes_in, describe_run
from malmoi.finetuning.task_network import build_task_network, verbalizer_items
from malmoi.finetuning.trainer import LM_WEIGHTS, FinetuneTrainer
from malmoi.finetuning.unlabelled import learn_clouds
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import NUMBER
from malmoi.messages import logger, measured, msg, plural
from malmoi.metrics import goodness
from malmoi.model import Network
from malmoi.system.progress import part_of
from malmoi.tokenizer import TokenRow
from malmoi.training.loss_module import LossModule
from malmoi.training.losses import Objective, lm
from malmoi.training.losses.task import answer_loss
from malmoi.training.signals import Stopped, StopSignals

READ_SECONDS = 25.0  # of the training rows
JUDGE_SECONDS = 8.0  # of the held-out rows, and of the evaluation rows
MIN_JUDGED_ROWS = 32
CHUNK_ROWS = 16  # read between two looks at the clock
TRAINED_PER_READ = 3.0  # time of a token in training beside one that is only read
MIN_EPOCHS = 2  # of rows that are cut to fewer tokens rather than seen less often
LENGTHS = (384, 256, 192, 128, 96, 64)
FROZEN = "frozen"  # the candidate's name
FOLDS = 3  # of rows that are too few to hold some out
FOLD_TIME = 2 / 3  # share of the time limit that they may take: each learns from two thirds


def first_answer(work: FinetuneData, settings: FinetuneConfig, out: Path) -> tuple[Rival, Tried]:
    """The frozen model with a head that is solved for; a resumed run has it already."""
    comparison = Comparison(work, out / "train_state")
    folder = comparison.out / "trials" / FROZEN
    if FROZEN not in comparison.known:
        _try_frozen(work, settings, comparison, (out, folder))
    tried = comparison.known[FROZEN]
    places = _places(len(work.held), tried.per_row)
    score = held_out_score(work)

    def beats(outcome: Outcome) -> bool:
        value = tried.value
        return value is not None and score(outcome, places) < goodness(work.primary_metric, value)

    return Rival("the frozen model", folder, beats), tried


def _try_frozen(
    work: FinetuneData, settings: FinetuneConfig, comparison: Comparison, folders: Sequence[Path]
) -> None:
    """Fits the head on what is read in half a minute, saves the model at once and evaluates it."""
    began = time.monotonic()
    checkpoint = few_labels.frozen_model(work, settings)
    try:
        with StopSignals() as stop, work.computing(settings):
            read, per_row = _solve(work, checkpoint, stop)
            for place in folders:
                write_checkpoint(checkpoint, place)
            stop.check()
            outcome = _judge(work, checkpoint, per_row, read)
            comparison.add(FROZEN, outcome, began, per_row=per_row)
        stop.check()
    except Stopped:
        logger.info("The best model so far is in {out}.", out=folders[0])
        raise


def fitting_length(tried: Tried, settings: FinetuneConfig, items: Sequence[TrainingItem]) -> int:
    """Tokens to which training rows are cut, so that the time holds two epochs; 0: all."""
    if settings.length or not settings.max_minutes:
        return 0
    tokens = sum(item.length for item in items)
    second = tried.per_row * len(items) / tokens  # of reading a token
    most = 60 * settings.max_minutes / (MIN_EPOCHS * TRAINED_PER_READ * second)
    if tokens <= most:
        return 0
    cut = {length: sum(min(length, item.length) for item in items) for length in LENGTHS}
    return next((length for length in LENGTHS if cut[length] <= most), LENGTHS[-1])


def tuning_gain(work: FinetuneData, settings: FinetuneConfig, out: Path) -> Gain:
    """How much better the fine-tuned model is than the frozen one on rows that neither learnt from.

    Both predict one fold after another, until the fine-tuned model is not ahead.
    """
    logger.info("Too few rows to hold some out: cross-validation compares the two models.")
    rows = sorted(work.train, key=lambda row: str(row.label))  # so that folds have all labels alike
    parts = [tuple(rows[number::FOLDS]) for number in range(min(FOLDS, len(rows)))]
    limit = FOLD_TIME * 60 * settings.max_minutes / FOLDS or math.inf
    frozen, tuned = Outcome({}, [], []), Outcome({}, [], [])
    for number, part in enumerate(parts):
        rest = tuple(row for i, row in enumerate(rows) if i % FOLDS != number)
        fold = replace(work, train=rest, held=part)
        frozen = _together(frozen, _frozen_outcome(fold, settings))
        folder = out / "train_state" / "trials" / f"fold-{number}"
        tuned = _together(tuned, run_trial(fold, settings, folder, limit).outcome)
        held = tuple(row for some in parts[: number + 1] for row in some)
        gain = _compared(replace(work, held=held), frozen, tuned)
        if gain.value <= 0:
            break
    return gain


def _frozen_outcome(work: FinetuneData, settings: FinetuneConfig) -> Outcome:
    checkpoint = few_labels.frozen_model(work, settings)
    with StopSignals() as stop, work.computing(settings):
        _solve(work, checkpoint, stop)
        outcome = results.judge_held_out(work, Predictor.of(checkpoint))
    stop.check()
    return outcome


def _compared(work: FinetuneData, frozen: Outcome, tuned: Outcome) -> Gain:
    """The fine-tuned model's gain on the rows held out so far; says both scores and the choice."""
    score = held_out_score(work)
    gain = paired_gain(score, frozen, tuned)
    measure = work.primary_metric
    every = range(len(work.held))
    better = "the next rows are compared"
    if len(every) == len(work.train):
        better = "all rows are fine-tuned on next"
    logger.info(
        "{measure} on {rows} that neither learnt from: {frozen:.3f} frozen, {tuned:.3f} "
        "fine-tuned, a difference of {gain}; {taken}.",
        measure=measure.replace("_", " "),
        rows=plural(len(every), "row"),
        frozen=goodness(measure, score(frozen, every)),
        tuned=goodness(measure, score(tuned, every)),
        gain=gain,
        taken=msg(better if gain.value > 0 else "the frozen model is the result"),
    )
    return gain


def _together(one: Outcome, other: Outcome) -> Outcome:
    return Outcome({}, [*one.labels, *other.labels], [*one.said, *other.said])


def _solve(work: FinetuneData, checkpoint: Checkpoint, stop: StopSignals) -> tuple[int, float]:
    """Fits the head on rows that `READ_SECONDS` hold; returns their number, and seconds for one."""
    items = work.items(work.view(checkpoint))
    items = random.Random(0).sample(items, len(items))
    parts: list[Tensor] = []
    checkpoint.network.eval()
    began = time.monotonic()
    for start in range(0, len(items), CHUNK_ROWS):
        with part_of("predict", start, len(items)):
            parts.append(
                few_labels.item_vectors(checkpoint.network, items[start : start + CHUNK_ROWS])
            )
        if stop.number or time.monotonic() - began > READ_SECONDS:
            break
    seconds = time.monotonic() - began
    vectors = torch.cat(parts)
    labels = torch.tensor([item.label for item in items[: len(vectors)]])
    few_labels.fit_head(
        checkpoint.network, vectors, labels, few_labels.LOSSES[head_kind(work.task).output]
    )
    return len(vectors), seconds / len(vectors)


def _judge(work: FinetuneData, checkpoint: Checkpoint, per_row: float, read: int) -> Outcome:
    """Evaluates it on some held-out rows and evaluation rows; says the result of the latter."""
    reading = Predictor.of(checkpoint)
    some = replace(
        work,
        held=tuple(work.held[i] for i in _places(len(work.held), per_row)),
        dev=tuple(work.dev[i] for i in _places(len(work.dev), per_row)),
    )
    measure = work.primary_metric
    held = results.judge_held_out(some, reading)
    metrics = results.judge(some, reading, held.chosen).metrics
    score = f"{measure.replace('_', ' ')} {metrics[measure]:.4g}"
    logger.info(
        "After {monotonic:.0f} s: {score} on {rows} with the model frozen, by a linear "
        "layer that learnt from {read:,} of {rows2}.",
        monotonic=time.monotonic() - work.began,
        score=score,
        rows=plural(len(some.dev), "evaluation row"),
        read=read,
        rows2=plural(len(work.train), "row"),
    )
    return held


def _places(count: int, per_row: float) -> list[int]:
    """The numbers of some of so many rows, at random: as many as are evaluated in time."""
    return random.Random(0).sample(
        range(count), min(count, max(MIN_JUDGED_ROWS, round(JUDGE_SECONDS / per_row)))
    )


MAX_BASELINE_ROWS = 100  # rows evaluated before fine-tuning
MIN_TRIAL_SECONDS = 0.1


def run_once(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool = False
) -> FinishedRun:
    """Trains to the end and evaluates; a run with label words is only evaluated."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = _new_model(work, settings)  # refuses settings before the folder records them
    if results.begin_run(out, work.record(settings), overwrite=overwrite):
        return results.load_finished(work, settings, out)
    if work.words is not None or work.unlabelled:
        logger.info(work.protocol.describe())
        checkpoint = learn_clouds(work, settings, out) if work.unlabelled else checkpoint
        return results.complete_run(work, results.judged_run(work, settings, checkpoint, 0), out)
    if settings.own_cosines:
        work = after_own_cosines(work, settings, out, run_trial)
        checkpoint = _new_model(work, settings)
    reading = work.predictor(checkpoint)
    items = _items(work, reading)
    if settings.contrastive:
        items = [*items, *few_labels.label_name_items(work, reading)]
    describe_run(work.as_trained(checkpoint), settings, checkpoint.network, items)
    rival = work.rival
    limit = settings.max_minutes
    if settings.frozen_first:
        rival, tried = first_answer(work, settings, out)
        items = _cut_to_fit(work, settings, tried, reading, items)
        if not work.held and not settings.minutes and len(work.train) > 1:
            if tuning_gain(work, settings, out).value <= 0:
                frozen = read_checkpoint(rival.folder, device=work.device)
                return results.complete_run(
                    work, results.judged_run(work, settings, frozen, 0), out
                )
            limit *= 1 - FOLD_TIME
    return _Run(work, settings, out, checkpoint, rival, limit).train(items)


def _cut_to_fit(
    work: FinetuneData,
    settings: FinetuneConfig,
    tried: Tried,
    reading: Predictor,
    items: list[TrainingItem],
) -> list[TrainingItem]:
    """The training rows, cut to fewer tokens if the time holds too few epochs of whole ones."""
    length = fitting_length(tried, settings, items)
    if not length:
        return items
    logger.info(
        "Training rows are cut to {length} tokens, so that {minutes} hold about two epochs; "
        "--length {full} trains on whole rows.",
        length=length,
        minutes=plural(settings.max_minutes, "minute"),
        full=reading.max_tokens,
    )
    return _items(work, replace(reading, length=length))


@dataclass(frozen=True)
class _Run:
    """A run from its first step to its result."""

    work: FinetuneData
    settings: FinetuneConfig
    out: Path
    checkpoint: Checkpoint  # to be trained
    rival: Rival | None  # what it is compared with
    limit: float  # in minutes; 0: none

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
        return results.complete_run(work, replace(run, outcome=done), self.out)

    def trainer(self, items: Sequence[TrainingItem]) -> FinetuneTrainer:
        settings = self.settings
        objective = make_objective(self.work, settings, words=self.reading.words is not None)
        module = LossModule(self.checkpoint.network, objective)
        make = ContrastiveTrainer if settings.contrastive else FinetuneTrainer
        settings = replace(settings, max_minutes=self.limit)
        # the logistic layer is fitted at the end: before that there is nothing to evaluate
        watch = self.watch if self.work.held and not settings.contrastive else None
        return make(module, items, settings, self.out, watch, self.work.primary_metric)

    def watch(self) -> Outcome:
        """Evaluates the held-out rows, and keeps the folder at the best model so far."""
        outcome = results.judge_held_out(self.work, self.reading)
        if self.rival is not None and not self.rival.beats(outcome):
            self._save()
        return outcome

    def _save(self) -> None:
        results.save_model(self.work, self.settings, self.checkpoint, self.out)

    @contextmanager
    def left_usable(self) -> Iterator[None]:
        """Leaves the best model so far in the folder if a signal stops the run."""
        try:
            yield
        except Stopped:
            if self.rival is None:
                self._save()
            results.write_task_report(self.out, self.work, self.settings)
            logger.info("The best model so far is in {out}.", out=self.out)
            raise

    def _judged(self, trainer: FinetuneTrainer) -> FinishedRun:
        """The better one of the trained and the frozen model, evaluated."""
        work = self.work
        trainer.explain_limit()
        held = trainer.outcome(self.watch)
        if self.rival is not None and self.rival.beats(held):
            logger.info(
                "On held-out rows {rival} is better: it is the result.", rival=msg(self.rival.name)
            )
            trainer.log.close()
            frozen = read_checkpoint(self.rival.folder, device=work.device)
            return results.judged_run(work, self.settings, frozen, trainer.state.step)
        if self.rival is not None and work.held:
            logger.info(
                "On held-out rows the fine-tuned model is better than {rival}: it is the result.",
                rival=msg(self.rival.name),
            )
        done = trainer.judge(lambda: results.judge(work, self.reading, held.chosen))
        return results.calibrated(
            work,
            FinishedRun(self.settings, self.checkpoint, done, trainer.state.step, held.metrics),
        )


def _new_model(work: FinetuneData, settings: FinetuneConfig) -> Checkpoint:
    if work.words is not None:
        return few_labels.prompted_model(work, work.words)
    checkpoint = build_task_network(work.start, work.task, work.labels, settings)
    _start_at_mean(work, checkpoint.network)
    checkpoint.network.to(work.device)
    return checkpoint


def run_trial(
    work: FinetuneData, settings: FinetuneConfig, out: Path, seconds: float
) -> FinishedRun:
    """A run of so many seconds, evaluated on the held-out rows alone; an aborted one is resumed."""
    out.mkdir(parents=True, exist_ok=True)
    unjudged = replace(work, dev=work.held)
    if results.begin_run(out, work.record(settings), overwrite=False):
        return results.load_finished(unjudged, settings, out)
    if settings.own_cosines:
        work = after_own_cosines(work, settings, out, run_trial)
    trial = _Run(work, settings, out, _new_model(work, settings), None, settings.max_minutes)
    trainer = trial.trainer(_items(work, trial.reading))
    trainer.score = trainer.score if settings.patience else None  # it has no curve
    trainer.limit = max(seconds, MIN_TRIAL_SECONDS)
    trainer.fit()
    done = trainer.judge(trial.watch, "held out") if work.held else Outcome({}, [], [])
    trainer.log.close()
    step = trainer.state.step
    share = min(1.0, step / trainer.steps)
    run = FinishedRun(settings, trial.checkpoint, done, step, done.metrics, completed=share)
    return results.complete_run(unjudged, run, out)


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
    logger.info("Before fine-tuning: {shown}.", shown=measured(found))
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


def make_objective(work: FinetuneData, settings: FinetuneConfig, *, words: bool) -> Objective:
    """The loss of the task or the label words, plus λ times the LM loss (GPT-1 eq. 5)."""
    kind = head_kind(work.task)
    if settings.contrastive:
        return few_labels.contrast_loss()
    if kind.sentence_objective is not None:
        return kind.sentence_objective((work.start.sentence or SentencePooling()).tokens)
    weights = _weights(work) if settings.class_weights else None
    objective = answer_loss() if words else kind.objective(weights)
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
