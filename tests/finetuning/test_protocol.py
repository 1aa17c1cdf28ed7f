"""Which rows train, select and judge: nothing is chosen on the rows that judge."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import malmoi
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.task import Example
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.task_data import hold_out, judged_twins, selection_rows
from malmoi.metrics.labels import (
    apply_temperature,
    best_temperature,
    calibration_bins,
    calibration_error,
)
from tiny_models import tiny_bert

WORDS = ("good", "fine", "bad", "poor", "film", "plot", "it", "was")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    return tiny_bert(folder, [" ".join(WORDS)] * 3, 60, context=16, width=16, depth=1, heads=2)


def table(path: Path, rows: int, *, wrong: int = 0) -> Path:
    """Rows of words at random, labelled by whether the first one praises."""
    chance = np.random.default_rng(rows)
    lines = ["text,label"]
    for i in range(rows):
        first = WORDS[int(chance.integers(4))]
        praise = (first in WORDS[:2]) != (i < wrong)
        rest = " ".join(chance.choice(WORDS[4:], 4))
        lines.append(f"{first} {rest},{'yes' if praise else 'no'}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_labels_are_stratified_and_a_single_row_stays() -> None:
    labels = ["a"] * 80 + ["b"] * 19 + ["c"]
    rows = [Example(f"text {i}", label=label) for i, label in enumerate(labels)]
    rest, held = hold_out(named_task("imdb"), rows, 20, seed=3)
    assert Counter(row.label for row in held) == {"a": 16, "b": 4}
    assert len(rest) + len(held) == 100
    assert not {row.text for row in rest} & {row.text for row in held}


def test_a_hold_out_leaves_rows_of_two_labels(bert: Path, tmp_path: Path) -> None:
    rows = [Example(f"text {i}", label="ab"[i % 2]) for i in range(6)]
    with pytest.raises(MalmoiError, match="Holding out 6 of 6 rows leaves none"):
        hold_out(named_task("imdb"), rows, 6, seed=0)
    two = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}]
    options: Any = {"steps": 1, "device": "cpu"}
    with pytest.raises(MalmoiError, match="Each label has only one text"):
        malmoi.finetune(bert, "classification", two, tmp_path / "out", **options)
    with pytest.raises(MalmoiError, match="All training rows have the label 'yes'"):
        malmoi.finetune(bert, "classification", two[:1], tmp_path / "dev", two[1:], **options)


def test_questions_about_one_passage_and_equal_texts_stay_together() -> None:
    rows = [Example(f"q{i}", f"passage {i // 5}", (("a", 0),), str(i)) for i in range(100)]
    rest, held = hold_out(named_task("squad"), rows, 10, seed=0)
    assert 10 <= len(held) < 15
    assert not {row.pair for row in rest} & {row.pair for row in held}
    rows = [Example(f"t{i % 30}", label="ab"[i % 2]) for i in range(60)]
    rest, held = hold_out(named_task("imdb"), rows, 8, seed=0)
    assert len(held) == 8
    assert not {row.text for row in rest} & {row.text for row in held}


def test_how_many_rows_are_held_out() -> None:
    labels, number = head_kind(named_task("sst2")), head_kind(named_task("stsb"))
    plain = FinetuneConfig()
    counts = [selection_rows(n, labels, plain, needed=True) for n in (100, 300, 5_000, 90_000)]
    assert counts == [0, 50, 500, 2000]
    counts = [selection_rows(n, labels, plain, needed=False) for n in (1_000, 2_490, 90_000)]
    assert counts == [0, 100, 500]
    assert selection_rows(90_000, number, plain, needed=False) == 0


def opened_by_transformers(folder: Path, text: str) -> list[float]:
    """The probabilities that transformers finds in the folder."""
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    words = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        chances: list[float] = network(**words).logits.softmax(-1)[0].tolist()
    return chances


def test_evaluation_rows_do_not_affect_the_model(bert: Path, tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", 300)
    how = {"epochs": 2, "lr": 5e-3, "patience": 2, "batch": 32, "device": "cpu"}
    weights, protocols = [], []
    for name, wrong in (("right", 0), ("wrong", 60)):
        dev = table(tmp_path / f"{name}.csv", 60, wrong=wrong)
        done = malmoi.finetune(bert, "classification", train, tmp_path / name, dev, **how)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
        protocols.append(done.protocol)
        assert 0 < done.model.checkpoint.extra["temperature"] < 20
        chances = opened_by_transformers(tmp_path / name, "it was good")
        assert list(done.model.predict("it was good").scores.values()) == pytest.approx(chances)
    assert weights[0] == weights[1]
    assert protocols[0] == protocols[1]
    assert (protocols[0].trained_on, protocols[0].selected_on, protocols[0].judged_on) == (
        250,
        50,
        60,
    )
    assert protocols[0].selects == ("epoch", "temperature")
    report = json.loads((tmp_path / "right" / "report.json").read_text("utf-8"))
    assert report["protocol"] == protocols[0].to_dict()
    assert {"labels", "confusion", "calibration", "mistakes", "label_errors"} <= set(report)
    assert report["calibration"]["temperature"] == done.model.checkpoint.extra["temperature"]
    assert protocols[0].judged_twins == report["protocol"]["judged_twins"] > 0
    assert report["metrics"]["accuracy"] == pytest.approx(1 - report_of(tmp_path / "wrong"))
    card = (tmp_path / "right" / "README.md").read_text("utf-8")
    assert "50 held-out rows for selection: epoch, temperature" in card
    assert "pipeline_tag: text-classification" in card
    assert "accuracy of naive Bayes" in card
    assert str(tmp_path) not in card
    lines = (tmp_path / "right" / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["rows"] for row in rows if "rows" in row] == ["held out", "held out", "judged"]


def report_of(folder: Path) -> float:
    found = json.loads((folder / "report.json").read_text("utf-8"))
    return float(found["metrics"]["accuracy"])


def test_weights_are_averaged_over_the_end_of_the_run(bert: Path, tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", 96)
    how = {"lr": 1e-2, "batch": 32, "schedule": "constant", "device": "cpu"}
    found = {}
    for steps, average in ((5, 0.0), (6, 0.0), (6, 0.3)):
        out = tmp_path / f"{steps}-{average}"
        how |= {"steps": steps, "average": average, "warmup": 0.0}
        done = malmoi.finetune(bert, "classification", train, out, train, **how)
        found[steps, average] = done.model.network.state_dict()["pooler.dense.weight"]
    mean = (found[5, 0.0] + found[6, 0.0]) / 2
    assert not mean.allclose(found[6, 0.0], atol=1e-5)
    assert mean.allclose(found[6, 0.3], atol=1e-6)


def test_a_folder_without_a_newer_setting_is_still_the_same_run(bert: Path, tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", 40)
    how = {"steps": 1, "device": "cpu"}
    first = malmoi.finetune(bert, "classification", train, tmp_path / "out", train, **how)
    record = tmp_path / "out" / "finetune.json"
    older = json.loads(record.read_text("utf-8"))
    del older["recurrent"]  # as if it had come later
    record.write_text(json.dumps(older), "utf-8")
    again = malmoi.finetune(bert, "classification", train, tmp_path / "out", train, **how)
    assert again.metrics == first.metrics


def test_a_row_may_hold_any_separator_of_lines(bert: Path, tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", 60)
    text = train.read_text("utf-8").replace(" ", "\u0085 \u2028", 40)
    train.write_text(text, "utf-8")
    words = ["finetune", train, "--dev", train, "-m", bert, "-o", tmp_path / "out", "--steps", "1"]
    assert run_command([*map(str, words)]) == 0


def test_the_metric_that_selects_can_be_chosen(bert: Path, tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", 40)
    done = malmoi.finetune(
        bert, "classification", train, tmp_path / "o", train, metric="mcc", steps=1, device="cpu"
    )
    assert next(iter(done.metrics)) == "matthews"
    with pytest.raises(UsageError, match=r"'pearson' is not one of classification's"):
        malmoi.finetune(bert, "classification", train, tmp_path / "o", train, metric="pearson")


def test_a_temperature_and_calibration_by_hand() -> None:
    chance = np.random.default_rng(0)
    scores = chance.normal(size=(4000, 3))
    exact = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    gold = [str(chance.choice(3, p=row)) for row in exact]
    sharp = np.exp(2.5 * scores) / np.exp(2.5 * scores).sum(1, keepdims=True)
    said = [dict(zip("012", row, strict=True)) for row in sharp.tolist()]
    temperature = best_temperature(gold, said)
    assert temperature == pytest.approx(2.5, rel=0.1)
    softer = [apply_temperature(one, temperature) for one in said]
    before, after = (
        calibration_error(
            [max(one, key=one.__getitem__) == g for one, g in zip(some, gold, strict=True)],
            [max(one.values()) for one in some],
        )
        for some in (said, softer)
    )
    assert before > 0.1 > 0.05 > after
    bins = calibration_bins([True, False, True], [0.95, 0.92, 0.5])
    assert [(b.low, b.high, b.count, b.accuracy) for b in bins] == [
        (0.4, 0.5, 1, 1),
        (0.9, 1, 2, 0.5),
    ]


def test_typos_and_copies_of_training_rows_are_found() -> None:
    text = "a long text about a film that nobody would forget soon"
    train = [Example(text, label="good"), Example("premise", text, "yes")]
    copies = [text, f" {text.upper()}", text.replace("film", "flim"), text.replace("soon", "son")]
    assert judged_twins(train, [Example(one, label="good") for one in copies]) == 4
    others = ["another text", text[: len(text) // 2], text.replace("film", "long and dull book")]
    assert judged_twins(train, [Example(one, label="good") for one in others]) == 0
    # one word can turn around what a pair of texts says
    assert judged_twins(train, [Example("premise", text.replace("nobody", "somebody"), "no")]) == 0


def test_a_label_that_looks_like_a_typo_is_noted() -> None:
    names = ["good"] * 20 + ["bad"] * 20 + ["goood", "BAD", "fine", "good2"]
    rows = [{"text": f"text {i}", "label": name} for i, name in enumerate(names)]
    task = malmoi.custom_task("classification", text="text", label="label")
    assert list(load_examples(task, rows).notes) == [
        "The label 'goood' (1 row) looks like a typo of 'good' (20 rows), and is learnt as a "
        "label of its own.",
        "The label 'BAD' (1 row) looks like a typo of 'bad' (20 rows), and is learnt as a "
        "label of its own.",
    ]
