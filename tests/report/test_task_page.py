"""The page of a fine-tuning, drawn from predictions alone."""

import random
import re

import pytest
from scipy.stats import binomtest

from malmoi.report.task_page import TaskPage, likely_label_errors, wilson_interval


def row(text: str, label: str, **chances: float) -> dict[str, object]:
    said = max(chances, key=lambda name: chances[name])
    return {
        "text": text,
        "label": label,
        "prediction": said,
        "score": chances[said],
        "probabilities": chances,
    }


def judged_rows() -> list[dict[str, object]]:
    chance = random.Random(0)
    rows = []
    for i in range(60):
        sure = chance.uniform(0.5, 0.95)
        label = "cat" if i % 3 else "dog"
        right = chance.random() < sure
        said = label if right else ("dog" if label == "cat" else "cat")
        other = "dog" if said == "cat" else "cat"
        rows.append(row(f"text {i}", label, **{said: sure, other: 1 - sure}))
    return [*rows, row("<b>mislabelled</b>", "dog", cat=0.99, dog=0.01)]


def page(**changes: object) -> str:
    about = dict(
        title="Fine-tuned: pets.csv",
        lead="",
        measure="accuracy",
        log=[{"step": 1, "loss": 0.7}, {"step": 2, "loss": 0.6, "accuracy": 0.5}],
        metrics={"accuracy": 0.6},
        rows=judged_rows(),
        labels=("cat", "dog"),
        exclusive=True,
        facts=[("date", "today")],
    )
    return TaskPage(**(about | changes)).render()


def test_the_page_shows_the_errors_of_the_model() -> None:
    shown = page()
    for part in ("Each label", "Confusion matrix", "Calibration", "Worst mistakes", "This run"):
        assert f"<h2>{part}</h2>" in shown
    assert "always “cat”" in shown
    assert "&lt;b&gt;mislabelled" in shown
    assert "<b>mislabelled" not in shown
    suspects = shown.split("<h2>Likely label errors</h2>")[1].split("<h2>")[0]
    assert "mislabelled" in suspects.split("</tr>")[1]  # the first row under the head


def test_a_model_that_learnt_nothing_doubts_no_labels() -> None:
    rows = [row(f"text {i}", "cat" if i % 3 else "dog", cat=0.4, dog=0.6) for i in range(30)]
    shown = page(rows=rows)
    assert "No better than the baseline." in shown
    assert "Likely label errors" not in shown


def test_the_curve_shows_the_held_out_rows_alone() -> None:
    log = [{"step": i, "accuracy": 0.6, "rows": "held out"} for i in (1, 2)]
    shown = page(log=[*log, {"step": 2, "accuracy": 0.1, "rows": "judged"}])
    assert shown == page(log=log)


def test_tags_are_shown_as_entities() -> None:
    tags = {"label": ["B-LOC", "I-LOC", "O"], "prediction": ["B-PER", "I-PER", "O"], "score": 0.0}
    right = tags | {"text": "Kim said", "label": ["B-PER", "O"], "prediction": ["B-PER", "O"]}
    rows = [tags | {"text": "New York wins"}, right]
    shown = page(rows=rows, labels=(), exclusive=False, tagged=True, measure="entity_f1")
    table = shown.split("<h2>Each label</h2>")[1].split("<h2>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)", table) == [
        *("LOC", "0.000", "0.000", "0.000", "1"),
        *("PER", "0.500", "1.000", "0.667", "1"),
    ]
    assert "New York (LOC)" in shown
    assert "New York (PER)" in shown


def test_a_stopped_run_has_a_page() -> None:
    shown = page(rows=(), metrics={}, warning="Stopped before the end: the same command resumes.")
    assert "Stopped before the end" in shown
    assert "<polyline" in shown
    assert "Confusion matrix" not in shown
    assert "nan" not in re.sub(r"<[^>]*>", " ", shown).split()


def test_only_doubtful_labels_are_suspected() -> None:
    rows = judged_rows()
    suspects = likely_label_errors(rows)
    assert suspects[0]["text"] == "<b>mislabelled</b>"
    assert all(one["label"] != one["prediction"] for one in suspects)
    assert len(suspects) < sum(one["label"] != one["prediction"] for one in rows)


@pytest.mark.parametrize(("right", "total"), [(0, 5), (3, 10), (95, 100), (7, 7)])
def test_the_interval_is_wilsons(right: int, total: int) -> None:
    expected = binomtest(right, total).proportion_ci(method="wilson")
    assert wilson_interval(right, total) == pytest.approx((expected.low, expected.high), abs=1e-4)
