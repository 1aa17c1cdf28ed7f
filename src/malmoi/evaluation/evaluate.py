"""Evaluation: a fine-tuned model by its predictions, others in context."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malmoi.checkpoint.folder import SentencePooling
from malmoi.errors import UsageError, nearest
from malmoi.evaluation.contamination import (
    FindOverlaps,
    contamination_report,
    item_texts,
    refuse_contamination,
)
from malmoi.evaluation.error_analysis import analyse_errors
from malmoi.evaluation.examples import load_examples, require_labels, unseen_labels
from malmoi.evaluation.in_context.lm_eval_tasks import evaluate_with_harness
from malmoi.evaluation.in_context.run import (
    InContextConfig,
    InContextResult,
    evaluate_in_context,
    limited_rows,
)
from malmoi.evaluation.kinds import HeadKind, head_kind, kind_of
from malmoi.evaluation.predictions import ExamplePrediction, Outcome
from malmoi.evaluation.task import Example, Task, metric_names
from malmoi.evaluation.tasks import named_task
from malmoi.evaluation.translation import evaluate_translation
from malmoi.inference import Model, load
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import SENTENCE, task_heads
from malmoi.messages import msg
from malmoi.metrics import METRICS, score_predictions
from malmoi.report.chart import Line, chart, standalone_svg
from malmoi.system.files import output_folder, write_json, write_text
from malmoi.text.rows import RowSource
from malmoi.tokenizer.extend import unknown_note

logger = logging.getLogger(__name__)
ALWAYS_ANSWER = float("inf")  # threshold of a model that never predicts "no answer"


def evaluate_model(
    model: str | Path | Model,
    task: str | Task,
    data: RowSource | None = None,
    *,
    device: str | None = None,
    skip_bad: bool = False,
    per_label: bool = False,
    **asking: Any,
) -> Any:
    """Evaluates a model on a task's files: {"accuracy": 0.91, …, "examples": 872}.

    A fine-tuned model is evaluated with its head. With `shots` (0, 1, K, "max") a GPT or a BERT is
    evaluated in context with that many examples, and every metric has a standard error; several
    numbers ("0,1,4") give a list. Other options are the fields of `InContextConfig`: train, seed,
    limit, score, template, reading; and out (a folder for the curve), harness ("lm-eval").
    `per_label` adds each label's precision, recall, F1 and support, the confusion matrix, the
    calibration, the worst mistakes and likely label errors. A model that translates is scored by
    BLEU on two files or a table; its options are `beams` and `limit`. `contamination` finds the
    items that are in the training text; clean and dirty ones are then scored too.
    """
    contamination: FindOverlaps | None = asking.pop("contamination", None)
    found = model if isinstance(model, Model) else load(model, device=device)
    if found.config.encoder_depth:
        refuse_contamination(contamination, "translations")
        return evaluate_translation(found, data, **asking)
    if isinstance(task, str) and task.endswith((".yaml", ".yml")):
        return evaluate_few_shot(found, Path(task), data, contamination=contamination, **asking)
    chosen = _by_vectors(named_task(task) if isinstance(task, str) else task, found)
    if in_context(chosen, found, asking):
        asking |= {"skip_bad": skip_bad, "contamination": contamination}
        return evaluate_few_shot(found, chosen, data, **asking)
    if data is None:
        raise UsageError(
            "The task {chosen} needs a file of rows: give it with --data (data=…).",
            chosen=chosen.name,
        )
    examples = _judged_rows(found, chosen, data, asking, skip_bad=skip_bad)
    reading = _with_vectors(chosen, Predictor.of(found.checkpoint))
    done = predict_and_score(chosen, examples, reading)
    facts: dict[str, Any] = {**done.metrics, "examples": len(examples)}
    if contamination is not None:
        overlaps = contamination([item_texts(example) for example in examples])
        facts["contamination"] = contamination_report(
            examples,
            overlaps,
            done.metrics,
            lambda some: predict_and_score(chosen, [examples[i] for i in some], reading).metrics,
        )
    if not per_label:
        return facts
    return facts | analyse_errors(chosen, found.labels, examples, done, reading.temperature)


def _judged_rows(
    model: Model, task: Task, data: RowSource, asking: Mapping[str, Any], *, skip_bad: bool
) -> Sequence[Example]:
    """The rows to evaluate on; logs what is odd about them."""
    loaded = load_examples(task, data, skip_bad=skip_bad)
    examples = limited_rows(loaded.rows, asking.get("limit"), asking.get("seed", 0))
    for note in (*loaded.notes, *unseen_labels(task, examples, model.labels)):
        logger.warning(note)
    if unknown := unknown_note(model.tokenizer, (t for e in examples for t in e.texts)):
        logger.warning(unknown)
    return examples


def _by_vectors(task: Task, model: Model) -> Task:
    """A task of numbers as a similarity, for a sentence encoder without a head for it."""
    kind = kind_of(task)
    if not isinstance(kind, HeadKind) or not kind.by_vectors or model.checkpoint.tokenizer is None:
        return task
    heads = task_heads(Predictor.of(model.checkpoint))
    able = SENTENCE in heads and kind.output not in heads
    return replace(task, kind=kind.by_vectors) if able else task


def _with_vectors(task: Task, reading: Predictor) -> Predictor:
    """Any encoder as a sentence encoder, if the task compares vectors."""
    if head_kind(task).sentence_objective is None or reading.sentence is not None:
        return reading
    if reading.network.config.pool == "last":
        raise UsageError(
            "{kind} needs a bidirectional model such as a BERT, not a GPT.", kind=task.kind
        )
    logger.info("This model is no sentence encoder: a text's vector is the mean of its tokens'.")
    return replace(reading, sentence=SentencePooling())


def in_context(task: Task, model: Model, options: Collection[str] = ()) -> bool:
    """Whether a model is evaluated in context: by an option, or without a head for the task."""
    kind = kind_of(task)
    if not isinstance(kind, HeadKind) or not {"limit", "seed"}.issuperset(options):
        return True
    return kind.in_context and kind.output not in task_heads(Predictor.of(model.checkpoint))


def predict_and_score(task: Task, examples: Sequence[Example], reading: Predictor) -> Outcome:
    """Predicts with the same functions as `Model.predict`, and computes the metrics."""
    check_task_fits(task, reading)
    require_labels(examples)
    kind = head_kind(task)
    gold = [kind.gold(example.label, reading.labels) for example in examples]
    predictions = kind.predict(reading, examples)
    metrics = score_examples(task, examples, gold, predictions, reading.labels)
    return Outcome(metrics, gold, predictions)


def score_examples(
    task: Task,
    examples: Sequence[Example],
    gold: Sequence[Any],
    said: Sequence[ExamplePrediction],
    labels: Sequence[str],
) -> dict[str, float]:
    """The task's metrics, and the kind's further ones, of predictions for examples."""
    return {**head_kind(task).measure(examples, said), **_measures(task, gold, said, labels)}


def _measures(
    task: Task, gold: Sequence[Any], said: Sequence[ExamplePrediction], labels: Sequence[str]
) -> dict[str, float]:
    """Computes metrics; macro averages cover all labels if an item may have several or none."""
    kind = head_kind(task)
    labels = labels if kind.text_labels and not kind.exclusive else ()
    names = [name for name in metric_names(task) if name in METRICS]
    return score_predictions(names, gold, [one.prediction for one in said], labels)


def check_task_fits(task: Task, reading: Predictor) -> None:
    """Raises an error if the model was not fine-tuned for this task."""
    kind = head_kind(task)
    if kind.output not in task_heads(reading):
        raise UsageError(
            "This model has no {head} head for {kind}, which the task {task} needs; fine-tune "
            "it first: malmoi finetune {task} --model … Or evaluate a GPT or a BERT in "
            "context: --shots 0.",
            head=kind.head,
            kind=task.kind,
            task=task.name,
        )
    if kind.text_labels and task.labels and set(task.labels) != set(reading.labels):
        ours = ", ".join(task.labels)
        theirs = ", ".join(reading.labels) or msg("none")
        raise UsageError(
            "The task {task} has the labels {ours}; this model was fine-tuned to predict {theirs}.",
            task=task.name,
            ours=ours,
            theirs=theirs,
        )


@dataclass(frozen=True)
class Split:
    """Examples for training, for evaluation only, and held out of training for selection."""

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    held: tuple[Example, ...] = ()
    label_thresholds: bool = False  # one per label, not one for all


def judge_held_out(task: Task, rows: Split, reading: Predictor) -> Outcome:
    """Evaluates the held-out rows; `chosen` are the thresholds or the temperature that fit them."""
    kind = head_kind(task)
    plain = predict_and_score(task, rows.held, _undecided(reading))
    if kind.choose is None or not (kind.calibrated or kind.thresholds(rows.train)):
        return plain
    chosen = kind.choose(plain, reading.labels, per_label=rows.label_thresholds)
    return _decided(task, plain, reading, chosen)


def judge(
    task: Task, rows: Split, reading: Predictor, chosen: Mapping[str, Any] | None = None
) -> Outcome:
    """Evaluates the judged rows, by default with the thresholds that fit the held-out rows."""
    kind = head_kind(task)
    if chosen is None and rows.held:
        chosen = judge_held_out(task, rows, reading).chosen
    elif chosen is None and kind.thresholds(rows.train):
        chosen = kind.unselected
    if not chosen:
        return predict_and_score(task, rows.dev, reading)
    return _decided(task, predict_and_score(task, rows.dev, _undecided(reading)), reading, chosen)


def _decided(task: Task, plain: Outcome, reading: Predictor, chosen: Mapping[str, Any]) -> Outcome:
    """An outcome with thresholds or a temperature applied; its metrics also undecided."""
    kind = head_kind(task)
    predictions = [kind.decide(one, chosen) for one in plain.said]
    if kind.calibrated:  # the same predictions, less or more certain
        return replace(plain, said=predictions, chosen=dict(chosen))
    metrics = _measures(task, plain.labels, predictions, reading.labels)
    without = {f"{name}_default_threshold": value for name, value in plain.metrics.items()}
    return Outcome({**metrics, **without}, plain.labels, predictions, dict(chosen))


def _undecided(reading: Predictor) -> Predictor:
    return replace(reading, threshold=ALWAYS_ANSWER, thresholds=(), temperature=1.0)


# ------------------------------------------------------------------ in context


def evaluate_few_shot(
    model: Model, task: Task | Path, data: RowSource | None, **asking: Any
) -> Any:
    """Metrics as a dictionary, or a list for several shot counts; a path is an lm-eval YAML."""
    out = asking.pop("out", None)
    find = asking.pop("contamination", None)
    harness = asking.pop("harness", None)
    settings = in_context_config(asking)
    if harness is not None:
        refuse_contamination(find, "lm-eval")
        return evaluate_with_harness(model, task, data, settings, harness)
    if isinstance(task, Path):
        raise UsageError(
            "{task} is a task of lm-evaluation-harness: add --harness lm-eval.", task=task
        )
    facts = [result.facts for result in few_shot_results(model, task, data, settings, out, find)]
    return facts[0] if len(facts) == 1 else facts


def in_context_config(asking: dict[str, Any]) -> InContextConfig:
    """A config from options by name; a misspelt name gets a suggestion."""
    for name in asking:
        if name not in InContextConfig.__dataclass_fields__:
            raise UsageError(
                "evaluate has no setting {name!r}.{hint}",
                name=name,
                hint=nearest(name, InContextConfig.__dataclass_fields__),
            )
    return InContextConfig(**{name: value for name, value in asking.items() if value is not None})


def few_shot_results(
    model: Model,
    task: Task,
    data: RowSource | None,
    asking: InContextConfig,
    out: str | Path | None = None,
    find: FindOverlaps | None = None,
) -> list[InContextResult]:
    """Evaluates, reports progress and notes, and writes the curve if there is a folder.

    `find` looks for the items in the training text; clean and dirty ones are then scored too.
    """
    found: list[InContextResult] = []
    for result in evaluate_in_context(model, task, data, asking):
        notes = {note for one in found for note in one.notes}
        for note in (note for note in result.notes if note not in notes):
            logger.warning(note)
        found.append(result)
    if find is not None:
        overlaps = find([item_texts(question.example) for question in found[0].questions])
        found = [result.with_contamination(overlaps) for result in found]
    if out is not None:
        write_curve(Path(out), found)
    return found


def write_curve(out: Path, found: Sequence[InContextResult]) -> None:
    """Writes curve.json and, from two points on, curve.svg: the first metric ± standard error."""
    facts = [{"task": one.task, **one.facts} for one in found]
    with output_folder(out) as place:
        write_json(place / "curve.json", facts)
        if len(found) < 2:
            return
        name = next(iter(found[0].verdict.measures))
        values = [one.verdict.measures[name] for one in found]
        points = [(one["shots"], value.mean) for one, value in zip(facts, values, strict=True)]
        line = Line(points, [value.standard_error for value in values])
        svg = chart({"mean": line}, "examples shown", f"{found[0].task}: {name}")
        write_text(place / "curve.svg", standalone_svg(svg))
