"""Evaluation: a fine-tuned model by its predictions, others in context."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError, ensure, require_known, require_that
from malmoi.evaluation.examples import NEEDS_FILE, load_examples, require_labels, unseen_labels
from malmoi.evaluation.features import ExamplePrediction, Outcome
from malmoi.evaluation.in_context.lm_eval_tasks import evaluate_with_harness
from malmoi.evaluation.in_context.run import (
    InContextConfig,
    InContextResult,
    evaluate_in_context,
    limited_rows,
)
from malmoi.evaluation.kinds import HeadKind, by_tags, head_kind, kind_of
from malmoi.evaluation.task import (
    Example,
    FindOverlaps,
    Task,
    contamination_report,
    item_texts,
    metric_names,
    refuse_contamination,
)
from malmoi.evaluation.tasks import named_task
from malmoi.inference import Model, load
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import SENTENCE, TAGS, task_heads
from malmoi.inference.translation import BEAMS
from malmoi.messages import joined, logger, msg
from malmoi.metrics import METRICS, score_predictions, texts
from malmoi.metrics.labels import (
    apply_temperature,
    calibration_bins,
    calibration_error,
    confusion,
    entity_scores,
    label_scores,
)
from malmoi.report.chart import Line, chart, standalone_svg
from malmoi.report.task_page import MAX_MISTAKES, MAX_SUSPECTS, is_correct, likely_label_errors
from malmoi.system.files import output_folder, write_json, write_text
from malmoi.text.pairs import read_pairs, split_pair
from malmoi.text.rows import RowSource
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.extend import unknown_note


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
    named = named_task(task) if isinstance(task, str) else task
    chosen = by_tags(_by_vectors(named, found), found.labels)
    if in_context(chosen, found, asking):
        asking |= {"skip_bad": skip_bad, "contamination": contamination}
        return evaluate_few_shot(found, chosen, data, **asking)
    if data is None:
        raise UsageError(NEEDS_FILE, task=chosen.name)
    examples = _judged_rows(found, chosen, data, asking, skip_bad=skip_bad)
    reading = _with_vectors(chosen, Predictor.of(found.checkpoint))
    done = predict_and_score(chosen, examples, reading)
    facts: dict[str, Any] = {**done.metrics, "examples": len(examples)}
    if contamination is not None:
        facts["contamination"] = contamination_report(
            examples,
            contamination([item_texts(example) for example in examples]),
            done.metrics,
            lambda some: predict_and_score(chosen, [examples[i] for i in some], reading).metrics,
        )
    if not per_label:
        return facts
    return facts | analyse_errors(
        chosen, found.labels, examples, done, found.checkpoint.extra.get("temperature", 1.0)
    )


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
    require_that(
        reading.network.config.pool != "last",
        "{kind} needs a bidirectional model such as a BERT, not a GPT.",
        kind=task.kind,
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
    return {**head_kind(task).measure(examples, said), **score_said(task, gold, said, labels)}


def score_said(
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
    require_that(
        kind.output in task_heads(reading),
        "This model has no {head} head for {kind}, which the task {task} needs; fine-tune "
        "it first: malmoi finetune {task} --model … Or evaluate a GPT or a BERT in "
        "context: --shots 0.",
        head=kind.head,
        kind=task.kind,
        task=task.name,
    )
    require_that(
        not kind.text_labels or not task.labels or set(task.labels) == set(reading.labels),
        "{task} has the labels {ours}; this model was fine-tuned to predict {theirs}.",
        task=task.name,
        ours=", ".join(task.labels),
        theirs=", ".join(reading.labels) or msg("none"),
    )


# ------------------------------------------------------------------ in context


def evaluate_few_shot(
    model: Model,
    task: Task | Path,
    data: RowSource | None,
    *,
    out: str | Path | None = None,
    contamination: FindOverlaps | None = None,
    harness: str | None = None,
    **asking: Any,
) -> Any:
    """Metrics as a dictionary, or a list for several shot counts; a path is an lm-eval YAML."""
    settings = in_context_config(asking)
    if harness is not None:
        refuse_contamination(contamination, "lm-eval")
        return evaluate_with_harness(model, task, data, settings, harness)
    if isinstance(task, Path):
        raise UsageError("{task} is a task of lm-eval: add --harness lm-eval.", task=task)
    results = few_shot_results(model, task, data, settings, out, contamination)
    facts = [result.facts for result in results]
    return facts[0] if len(facts) == 1 else facts


def in_context_config(asking: dict[str, Any]) -> InContextConfig:
    """A config from options by name; a misspelt name gets a suggestion."""
    known = InContextConfig.__dataclass_fields__
    for name in asking:
        require_known(name, known, "evaluate has no setting {name!r}.{hint}")
    return InContextConfig(**{name: value for name, value in asking.items() if value is not None})


def few_shot_results(
    model: Model,
    task: Task,
    data: RowSource | None,
    asking: InContextConfig,
    out: str | Path | None = None,
    find: FindOverlaps | None = None,
) -> list[InContextResult]:
    """Evaluates, notes what is odd, and writes the curve if there is a folder."""
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


# ------------------------------------------------------------------ translations

COLUMNS = ("source", "target")
# of BLEU as sacrebleu computes it: detokenized, cased text
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:malmoi"


def evaluate_translation(
    model: Model, data: Any, *, beams: int = BEAMS, limit: int | None = None
) -> dict[str, Any]:
    """{"bleu": 38.1, …} of two files aligned by line, or a table; a pair needs both sides."""
    require_that(data is not None, "Evaluation needs translations: two files, or two columns.")
    reader = read_pairs([data] if isinstance(data, str | Path) else list(data), COLUMNS)
    rows = [split_pair(document.text) for document in reader]
    ensure(not reader.problems, joined(" ", reader.describe()))
    ensure(rows, "{files} hold no sentence pairs.", files=" and ".join(reader.files))
    translations = model.translate([source for source, _ in rows[:limit]], beams=beams)
    score = texts.bleu([[target] for _, target in rows[:limit]], translations)
    return {"bleu": score, "beams": beams, "signature": SIGNATURE, "examples": len(translations)}


# ------------------------------------------------------------------ where a model errs


def prediction_row(example: Example, label: Any, predicted: ExamplePrediction) -> dict[str, Any]:
    """A line of predictions.jsonl."""
    chances = {name: round(chance, 5) for name, chance in predicted.probabilities.items()}
    return {
        "id": example.id,
        "text": example.text,
        **({} if example.pair is None else {"pair": example.pair}),
        **({"choices": list(example.choices)} if example.choices else {}),
        "label": label,
        "prediction": predicted.prediction,
        "score": round(predicted.score, 5),
        **({"probabilities": chances} if chances else {}),
    }


def analyse_errors(
    task: Task,
    labels: Sequence[str],
    examples: Sequence[Example],
    outcome: Outcome,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """The error analysis of `report.json` and `evaluate --json`, at a predictor's temperature."""
    kind = head_kind(task)
    facts: dict[str, Any] = {}
    pair = outcome.labels, outcome.predictions
    if kind.text_labels or kind.output is TAGS:
        scores = entity_scores(*pair) if kind.output is TAGS else label_scores(*pair, labels)
        facts["labels"] = {name: asdict(score) for name, score in scores.items()}
    if kind.exclusive:
        names = list(facts["labels"])  # with those that only the judged rows have
        facts["confusion"] = {"labels": names, "rows": confusion(*pair, names).tolist()}
    if kind.calibrated:
        facts["calibration"] = calibration(outcome, temperature)
    rows = [
        prediction_row(*each) | {"place": each[0].place}
        for each in zip(examples, outcome.labels, outcome.said, strict=True)
    ]
    wrong = sorted((row for row in rows if not is_correct(row)), key=lambda row: -row["score"])
    facts["mistakes"] = [_short(row) for row in wrong[:MAX_MISTAKES]]
    if kind.exclusive:
        facts["label_errors"] = [_short(row) for row in likely_label_errors(rows)[:MAX_SUSPECTS]]
    return facts


def calibration(outcome: Outcome, temperature: float) -> dict[str, Any]:
    """Expected calibration error with the temperature and without it, and the reliability bins."""
    right = [gold == one.prediction for gold, one in zip(outcome.labels, outcome.said, strict=True)]
    sure = [one.score for one in outcome.said]
    colder = (apply_temperature(one.probabilities, 1 / temperature) for one in outcome.said)
    raw = [max(chances.values()) for chances in colder]
    return {
        "temperature": temperature,
        "error": calibration_error(right, sure),
        "error_without_temperature": calibration_error(right, raw),
        "bins": [asdict(one) for one in calibration_bins(right, sure)],
    }


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "probabilities"}


# ------------------------------------------------------------------ the words alone

MAX_TRAINING_ROWS = 20_000
MAX_JUDGED_ROWS = 2_000


def word_baseline(
    train: Sequence[Example], judged: Sequence[Example], labels: Sequence[str], tokenizer: Tokenizer
) -> float:
    """The accuracy of multinomial naive Bayes on which tokens occur, with Laplace's smoothing."""
    train = limited_rows(train, MAX_TRAINING_ROWS, 0)
    judged = limited_rows(judged, MAX_JUDGED_ROWS, 0)
    place = {name: i for i, name in enumerate(labels)}
    counts = np.ones((len(labels), tokenizer.vocab_size))
    rows = np.ones(len(labels))
    for row, tokens in zip(train, _tokens(train, tokenizer), strict=True):
        counts[place[row.label], tokens] += 1
        rows[place[row.label]] += 1
    logs = np.log(counts) - np.log(counts.sum(1, keepdims=True))
    prior = np.log(rows / rows.sum())
    best = [(prior + logs[:, tokens].sum(1)).argmax() for tokens in _tokens(judged, tokenizer)]
    right = sum(labels[i] == row.label for i, row in zip(best, judged, strict=True))
    return float(right / len(judged))


def _tokens(rows: Sequence[Example], tokenizer: Tokenizer) -> list[list[int]]:
    """The distinct tokens of each row's texts."""
    return [sorted(set(tokens)) for tokens in tokenizer.ids([" ".join(row.texts) for row in rows])]
