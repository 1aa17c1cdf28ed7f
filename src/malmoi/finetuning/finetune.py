"""Fine-tunes a pre-trained model on labelled rows and writes the result to a folder."""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from malmoi.adapters import check_target, is_adapter, read_with_adapter
from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError
from malmoi.evaluation.evaluate import judge, judge_held_out, predict_and_score
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.kinds import by_metric, encode_examples, head_kind
from malmoi.evaluation.predictions import Outcome
from malmoi.evaluation.task import Task, metric_names
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.config import FinetuneConfig, finetune_config
from malmoi.finetuning.defaults import apply_defaults
from malmoi.finetuning.few_labels import (
    ContrastiveTrainer,
    choose_contrast,
    contrast_loss,
    label_name_items,
)
from malmoi.finetuning.frozen_features import cached_states
from malmoi.finetuning.label_prompts import choose_prompt, prompted_model
from malmoi.finetuning.protocol import Protocol
from malmoi.finetuning.report import write_task_report
from malmoi.finetuning.results import (
    FinishedRun,
    best_run,
    complete_run,
    load_finished,
    log_spread,
    save_model,
    write_results,
)
from malmoi.finetuning.run_state import begin_run
from malmoi.finetuning.search import RECORD, Search, TrialLimit, TrialRun, greedy_soup
from malmoi.finetuning.task_data import FinetuneData, classes_in, describe_run, load_data
from malmoi.finetuning.task_network import build_task_network
from malmoi.finetuning.trainer import FinetuneTrainer
from malmoi.finetuning.verbalizer_loss import verbalizer_items, verbalizer_loss
from malmoi.inference import Model
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import NUMBER
from malmoi.inference.verbalizer import Verbalizer
from malmoi.model import Network
from malmoi.system.files import folder_lock
from malmoi.system.language import plural
from malmoi.system.result import Result
from malmoi.text.rows import RowSource
from malmoi.tokenizer import TokenRow
from malmoi.training.loss_module import LossModule
from malmoi.training.losses import Objective, lm
from malmoi.training.losses.distil import consistent
from malmoi.training.parallel import join_process_group
from malmoi.training.signals import Stopped
from malmoi.training.trackers import check_trackers

logger = logging.getLogger(__name__)
MAX_BASELINE_ROWS = 100  # rows evaluated before fine-tuning
MIN_TRIAL_SECONDS = 0.1
EVALUATED_PER_TRAINED = 2.0  # rows evaluated while one is trained on: about three, to be safe


@dataclass(frozen=True, repr=False)
class FinetuneResult(Result):
    """A finished fine-tuning: metrics on the evaluation rows and of each run, and the model."""

    metrics: dict[str, float]
    runs: tuple[dict[str, float], ...]
    out: Path
    model: Model
    steps: int  # updates of the run that was kept
    protocol: Protocol  # numbers of training, selection and evaluation rows


def run_finetuning(
    model: str | Path | Model,
    task: str | Task,
    data: RowSource,
    out: str | Path,
    dev: RowSource | None = None,
    **options: Any,
) -> FinetuneResult:
    """Fine-tunes a BERT or a GPT on a task; transformers can open the resulting folder.

    `data` is the training rows: files, a folder with train and dev files, or a table in memory.
    `dev` is only for evaluation; without it a tenth of the rows is held out. Everything that is
    selected is selected on training rows. Options are `device`, `overwrite`, and fields of
    `FinetuneConfig`: epochs=3, lr=2e-5, freeze=True, lm=0.5, seeds=5… A GPT starts from GPT-1's
    defaults, other models from BERT's. The same call on the same folder resumes an unfinished run;
    a finished one is not repeated unless `overwrite` is set.
    """
    began = time.monotonic()
    device = options.pop("device", None)
    overwrite = bool(options.pop("overwrite", False))
    start = model.checkpoint if isinstance(model, Model) else read_with_adapter(model)
    chosen = named_task(task) if isinstance(task, str) else task
    kind = head_kind(chosen)
    gpt = _is_gpt(start.network)
    settings = finetune_config(options, gpt=gpt, defaults=kind.defaults)
    check_trackers(settings.track)
    chosen = by_metric(chosen, settings.metric)
    out = Path(out)
    start = _checked(start, settings, out, reads=not kind.writes)
    work = load_data(chosen, data, dev, settings, start, join_process_group(device).device)
    work = replace(work, began=began)
    settings, words = choose_prompt(work, settings, options, out)
    if words is not None:
        work = replace(work, words=words)
    settings = choose_contrast(work, settings, options)
    given = {name for name, value in options.items() if value is not None}
    settings = apply_defaults(settings, given, work, gpt=gpt)
    return run_all(work, settings, out, overwrite=overwrite)


def run_all(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool = False
) -> FinetuneResult:
    """Runs all variants of the settings, and writes the selected one to the folder."""
    measure = work.primary_metric
    variants = settings.variants()
    folders = [out] if len(variants) == 1 else [out / _called(settings, v) for v in variants]
    with folder_lock(out):
        if settings.best and work.held and work.words is None:
            runs = [_search(work, settings, out, overwrite=overwrite)]
        else:
            runs = [
                _run(work, v, folder, overwrite=overwrite)
                for v, folder in zip(variants, folders, strict=True)
            ]
        kept = best_run(runs, measure, select=settings.grid)
        if len(runs) > 1:
            save_model(work, settings, kept.checkpoint, out)
            log_spread(measure, runs)
        write_results(work, kept, runs, out)
    every = tuple(run.outcome.metrics for run in runs)
    if is_adapter(out):
        usable = read_with_adapter(out, device=work.device)
    else:  # with its folder, which knows the task and its columns
        usable = replace(kept.checkpoint, source=out.absolute())
    return FinetuneResult(
        kept.outcome.metrics, every, out, Model(usable), kept.steps, work.protocol
    )


def _called(settings: FinetuneConfig, v: FinetuneConfig) -> str:
    return f"lr{v.lr:g}-batch{v.batch}-epochs{v.epochs:g}" if settings.grid else f"seed-{v.seed}"


def _is_gpt(network: Network) -> bool:
    """Whether GPT-1's defaults apply.

    An untied language head would have to be saved with the task's head, and transformers has no
    such model.
    """
    c = network.config
    return "lm" in network.heads and c.pool == "last" and c.tied and not c.both_ways


def _checked(start: Checkpoint, settings: FinetuneConfig, out: Path, *, reads: bool) -> Checkpoint:
    if start.network.config.both_ways and reads and not settings.lm and not settings.words:
        start = replace(start, network=start.network.masked())  # a label depends on the whole text
    _ = start.required_tokenizer
    start.network.require_one_text("Fine-tuning")
    if start.network.trunk.has_soft_tokens:
        raise UsageError(
            "This model is a soft prompt or a prefix on a base model; fine-tune the base itself."
        )
    if settings.adapter.kind != "none":
        check_target(out)
        if start.source is None or is_adapter(start.source):
            raise UsageError(
                "An adapter needs its base in a folder; save this model first and use that folder."
            )
    return start


# ------------------------------------------------------------------ one run


def _record(work: FinetuneData, settings: FinetuneConfig) -> dict[str, Any]:
    values = settings.to_dict()
    values.pop("track")  # a resumed run may be tracked elsewhere
    return {"task": work.task.name, **values, "of": work.model_name, **work.taught}


def _run(
    work: FinetuneData,
    settings: FinetuneConfig,
    out: Path,
    *,
    overwrite: bool = False,
) -> FinishedRun:
    if work.words is not None:
        return _run_prompt(work, settings, work.words, out, overwrite=overwrite)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = _new_model(work, settings)  # refuses settings before the folder records them
    record = _record(work, settings)
    if begin_run(out, record, overwrite=overwrite):
        return load_finished(work, settings, out)
    reading = _reading(work, checkpoint)
    items = _items(work, reading)
    if settings.contrastive:
        items = [*items, *label_name_items(work, reading)]
    describe_run(work, settings, checkpoint.network, items)

    def evaluate() -> Outcome:
        return judge_held_out(work.task, work, reading)

    untuned = _untuned(work, settings, reading)
    objective = make_objective(work, settings, verbalizer_loss(items) if reading.words else None)
    loss_module = LossModule(checkpoint.network, objective)
    with cached_states(checkpoint.network, lambda: _rows(work, reading, items)):
        make = ContrastiveTrainer if settings.contrastive else FinetuneTrainer
        # the logistic layer is fitted at the end: before that there is nothing to evaluate
        watch = evaluate if work.held and not settings.contrastive else None
        trainer = make(loss_module, items, settings, out, watch, work.primary_metric)
        trainer.fit()
        if not trainer.stopped:
            held = trainer.outcome(evaluate) if work.held else None
            chosen = None if held is None else held.chosen
            done = trainer.judge(lambda: judge(work.task, work, reading, chosen))
            done = replace(done, metrics={**done.metrics, **untuned})
    _raise_if_stopped(trainer, work, settings, checkpoint)
    selected = {} if held is None else held.metrics
    run = FinishedRun(settings, checkpoint, done, trainer.step, selected)
    return complete_run(work, run, record, out)


def _new_model(work: FinetuneData, settings: FinetuneConfig) -> Checkpoint:
    checkpoint = build_task_network(work.start, work.task, work.labels, settings)
    _start_at_mean(work, checkpoint.network)
    checkpoint.network.to(work.device)
    return checkpoint


def _raise_if_stopped(
    trainer: FinetuneTrainer, work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint
) -> None:
    """Saves the model of a run that a signal stopped, and lets the signal take effect."""
    if not trainer.stopped:
        return
    out = trainer.out
    save_model(work, settings, checkpoint, out)
    write_task_report(out, work, settings)
    where = f"the model so far is in {out}, run the same command to resume"
    logger.info(f"Stopped at step {trainer.step:,} and saved: {where}.")
    raise Stopped(trainer.stopped)


def _run_trial(
    work: FinetuneData, settings: FinetuneConfig, out: Path, limit: TrialLimit
) -> TrialRun:
    """One run of a search, evaluated on the held-out rows alone; an aborted one is resumed."""
    out.mkdir(parents=True, exist_ok=True)
    record = _record(work, settings)
    unjudged = replace(work, dev=work.held)
    measure = work.primary_metric
    if begin_run(out, record, overwrite=False):
        known = load_finished(unjudged, settings, out)
        return TrialRun(known.checkpoint, known.held[measure], known.steps)
    checkpoint = _new_model(work, settings)
    reading = _reading(work, checkpoint)
    loss_module = LossModule(checkpoint.network, make_objective(work, settings))
    trainer = FinetuneTrainer(loss_module, _items(work, reading), settings, out, None, measure)
    trainer.limit = max(limit.seconds, MIN_TRIAL_SECONDS)
    trainer.fit()
    _raise_if_stopped(trainer, work, settings, checkpoint)
    trained = time.monotonic()
    completed = min(1.0, trainer.step / trainer.steps)
    if completed < 1 and not limit.judged_if_cut:
        row = trainer.clock.usual_step / settings.batch
        expected = len(work.held) * row / EVALUATED_PER_TRAINED
        return TrialRun(checkpoint, None, trainer.step, completed, expected)
    done = trainer.judge(lambda: judge_held_out(work.task, work, reading), "held out")
    run = FinishedRun(settings, checkpoint, done, trainer.step, done.metrics)
    complete_run(unjudged, run, record, out)
    after = time.monotonic() - trained
    return TrialRun(checkpoint, done.metrics[measure], trainer.step, completed, after)


def _run_prompt(
    work: FinetuneData, settings: FinetuneConfig, words: Verbalizer, out: Path, *, overwrite: bool
) -> FinishedRun:
    """Evaluates and saves a language model with calibrated label words; nothing is trained."""
    record = _record(work, settings)
    if begin_run(out, record, overwrite=overwrite):
        return load_finished(work, settings, out)
    checkpoint = prompted_model(work, words)
    reading = _reading(work, checkpoint)
    logger.info(work.protocol.describe())
    with work.computing(settings):
        held = judge_held_out(work.task, work, reading) if work.held else None
        done = judge(work.task, work, reading, None if held is None else held.chosen)
    selected = {} if held is None else held.metrics
    run = FinishedRun(settings, checkpoint, done, 0, selected)
    return complete_run(work, run, record, out)


def _search(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool
) -> FinishedRun:
    """Spends the time budget on trials and averages the best; only the result is evaluated."""
    out.mkdir(parents=True, exist_ok=True)
    record = _record(work, settings)
    if overwrite:
        shutil.rmtree(out / "trials", ignore_errors=True)
        (out / RECORD).unlink(missing_ok=True)
    if begin_run(out, record, overwrite=overwrite):
        return load_finished(work, settings, out)
    logger.info(work.protocol.describe())
    measure = work.primary_metric
    search = Search(
        settings,
        work.start.network.config.distinct,
        measure,
        out,
        partial(_run_trial, work),
        judged=len(work.dev) / len(work.held),
        setup=time.monotonic() - work.began,
    )
    runs = search.run()
    with work.computing(settings):
        checkpoint, members = greedy_soup(
            runs, measure, lambda one: judge_held_out(work.task, work, _reading(work, one))
        )
        held = judge_held_out(work.task, work, _reading(work, checkpoint))
        done = judge(work.task, work, _reading(work, checkpoint), held.chosen)
    logger.info(
        f"{len(search.trials)} trials in {search.spent:.0f} s: the mean of "
        f"{plural(members, 'run')} has {measure} "
        f"{held.metrics[measure]:.4f} on the held-out rows."
    )
    steps = sum(one.steps for one in runs)
    run = FinishedRun(settings, checkpoint, done, steps, held.metrics)
    complete_run(work, run, record, out)
    shutil.rmtree(out / "trials")
    return run


def _reading(work: FinetuneData, checkpoint: Checkpoint) -> Predictor:
    return replace(Predictor.of(checkpoint), encode=work.encode)


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
    logger.info(f"Before fine-tuning: {', '.join(f'{k} {v:.4g}' for k, v in found.items())}.")
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
    objective = objective + settings.lm * lm() if settings.lm else objective
    return objective if work.teaching is None else work.teaching.add_to(objective, kind.distil)


def _weights(work: FinetuneData) -> list[float]:
    """Class weights √(n / (N · count)), scaled so that their mean over the examples is 1.

    The root keeps frequent labels from losing more than rare ones gain.
    """
    counts = Counter(name for e in work.train for name in classes_in(work.task, e))
    roots = {name: (counts.total() / count) ** 0.5 for name, count in counts.items()}
    mean = sum(roots[name] * count for name, count in counts.items()) / counts.total()
    return [roots.get(name, mean) / mean for name in work.labels]
