"""Where a model errs: labels one by one, confusions, calibration, mistakes, likely label errors."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.predictions import ExamplePrediction, Outcome
from malmoi.evaluation.task import Example, Task
from malmoi.inference.predictors import TAGS
from malmoi.metrics.calibration import apply_temperature, calibration_bins, calibration_error
from malmoi.metrics.labels import confusion, label_scores
from malmoi.metrics.tags import entity_scores
from malmoi.report.task_page import is_correct, likely_label_errors

MAX_MISTAKES = 20
MAX_SUSPECTS = 20


def prediction_row(example: Example, label: Any, predicted: ExamplePrediction) -> dict[str, Any]:
    """A line of predictions.jsonl."""
    row: dict[str, Any] = {"id": example.id, "text": example.text}
    row |= {} if example.pair is None else {"pair": example.pair}
    row |= {"choices": list(example.choices)} if example.choices else {}
    row |= {"label": label, "prediction": predicted.prediction, "score": round(predicted.score, 5)}
    chances = {name: round(chance, 5) for name, chance in predicted.probabilities.items()}
    return row | ({"probabilities": chances} if chances else {})


def analyse_errors(
    task: Task,
    labels: Sequence[str],
    examples: Sequence[Example],
    outcome: Outcome,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """The error analysis in `report.json` and `malmoi evaluate --json`.

    `temperature` is the one that the probabilities were computed with.
    """
    kind = head_kind(task)
    facts: dict[str, Any] = {}
    pair = outcome.labels, outcome.predictions
    if kind.text_labels or kind.output is TAGS:
        scores = entity_scores(*pair) if kind.output is TAGS else label_scores(*pair, labels)
        facts["labels"] = {name: asdict(score) for name, score in scores.items()}
    if kind.exclusive:
        names = list(facts["labels"])  # with those that only the judged rows have
        table = confusion(*pair, names).tolist()
        facts["confusion"] = {"labels": names, "rows": table}
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
    raw = [
        max(apply_temperature(one.probabilities, 1 / temperature).values()) for one in outcome.said
    ]
    return {
        "temperature": temperature,
        "error": calibration_error(right, sure),
        "error_without_temperature": calibration_error(right, raw),
        "bins": [asdict(one) for one in calibration_bins(right, sure)],
    }


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "probabilities"}
