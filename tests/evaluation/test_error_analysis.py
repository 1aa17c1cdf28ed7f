"""Where a model errs, against scikit-learn's figures."""

import random

import pytest

from malmoi.evaluation.evaluate import analyse_errors
from malmoi.evaluation.features import ExamplePrediction, Outcome
from malmoi.evaluation.kinds import custom_task
from malmoi.evaluation.task import Example

LABELS = ("a", "b", "c")


def outcome_of(rows: int) -> tuple[list[Example], Outcome]:
    chance = random.Random(0)
    gold = [chance.choice(LABELS) for _ in range(rows)]
    said = []
    for label in gold:
        scores = {name: chance.random() + (name == label) for name in LABELS}
        chances = {name: value / sum(scores.values()) for name, value in scores.items()}
        best = max(chances, key=chances.__getitem__)
        said.append(ExamplePrediction(best, chances[best], chances))
    examples = [Example(f"text {i}", label=label, place=f"f:{i}") for i, label in enumerate(gold)]
    return examples, Outcome({}, gold, said)


def test_labels_and_confusion_are_sklearns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    examples, outcome = outcome_of(300)
    found = analyse_errors(custom_task("classification"), LABELS, examples, outcome)
    table = sklearn.confusion_matrix(outcome.labels, outcome.predictions, labels=LABELS)
    assert found["confusion"] == {"labels": list(LABELS), "rows": table.tolist()}
    columns = sklearn.precision_recall_fscore_support(outcome.labels, outcome.predictions)
    for i, name in enumerate(LABELS):
        ours = [found["labels"][name][key] for key in ("precision", "recall", "f1", "support")]
        assert ours == pytest.approx([column[i] for column in columns])


def test_calibration_and_mistakes() -> None:
    examples, outcome = outcome_of(300)
    found = analyse_errors(custom_task("classification"), LABELS, examples, outcome)
    bins = found["calibration"]["bins"]
    assert sum(one["count"] for one in bins) == 300
    gap = sum(one["count"] * abs(one["accuracy"] - one["confidence"]) for one in bins) / 300
    assert found["calibration"]["error"] == pytest.approx(gap)
    assert found["calibration"]["error_without_temperature"] == pytest.approx(gap)
    sure = [row["score"] for row in found["mistakes"]]
    assert sure == sorted(sure, reverse=True)
    for row in (*found["mistakes"], *found["label_errors"]):
        assert row["label"] != row["prediction"]
        assert examples[int(row["place"][2:])].text == row["text"]
