"""The search within a budget: the defaults unless a student is clearly better, nothing repeated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import malmoi
from malmoi.errors import UsageError
from malmoi.evaluation.features import ExamplePrediction, Outcome
from malmoi.finetuning import search
from malmoi.finetuning.candidates import Gain, paired_gain
from malmoi.finetuning.finetune import FinetuneResult
from tiny_models import tiny_bert

WORDS = ("good", "fine", "bad", "poor", "film", "plot", "it", "was")
# the rows of the defaults: some held out, or none
HELD: dict[str, Any] = {"epochs": 1, "frozen_first": True, "device": "cpu"}
NONE_HELD: dict[str, Any] = {"epochs": 1, "device": "cpu"}
LONG: dict[str, Any] = {"best": True, "minutes": 60}
CLEAR, UNCLEAR = Gain(0.03, 0.02), Gain(0.01, 0.02)


def rows_of(count: int) -> list[dict[str, str]]:
    chance = np.random.default_rng(0)
    return [
        {"text": f"{WORDS[n]} {' '.join(chance.choice(WORDS[4:], 4))}", "label": "ny"[int(n < 2)]}
        for n in chance.integers(4, size=count).tolist()
    ]


ROWS = rows_of(540)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert(folder, [" ".join(WORDS)] * 3, 60, context=16, width=16, depth=1, heads=2)
    return folder


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gain], None]:
    """Decides what the student gains; there are two others."""
    every = search.other_settings
    monkeypatch.setattr(search, "other_settings", lambda settings: every(settings)[:2])

    def decide(gain: Gain) -> None:
        monkeypatch.setattr("malmoi.finetuning.candidates.paired_gain", lambda *_: gain)

    return decide


def tuned(bert: Path, out: Path, **how: Any) -> FinetuneResult:
    return malmoi.finetune(bert, "classification", ROWS[:500], out, ROWS[500:], **how)


def weights(run: FinetuneResult) -> torch.Tensor:
    state = run.model.checkpoint.network.state_dict()
    return torch.cat([tensor.flatten() for tensor in state.values()])


def tried(out: Path) -> dict[str, Any]:
    return {one["name"]: one for one in json.loads((out / "search.json").read_text())["trials"]}


@pytest.mark.parametrize("how", [HELD, NONE_HELD])
def test_a_student_that_is_not_clearly_better_leaves_the_defaults(
    bert: Path, tmp_path: Path, decided: Callable[[Gain], None], how: dict[str, Any]
) -> None:
    decided(UNCLEAR)
    plain = tuned(bert, tmp_path / "plain", **how)
    best = tuned(bert, tmp_path / "best", **how, **LONG)
    assert torch.equal(weights(best), weights(plain))
    assert (best.metrics, best.protocol) == (plain.metrics, plain.protocol)
    assert best.protocol.selected_on == (50 if how is HELD else 0)


def test_a_clearly_better_student_is_the_result(
    bert: Path, tmp_path: Path, decided: Callable[[Gain], None]
) -> None:
    decided(CLEAR)
    out = tmp_path / "out"
    done = tuned(bert, out, **HELD, **LONG)
    found = tried(out)
    assert [*found] == ["defaults", "other-1", "other-2", "student"]
    assert [one["seed"] for one in found.values()] == [0, 1, 2, 0]
    assert found["student"]["gain"] == {"value": CLEAR.value, "error": CLEAR.error}
    record = json.loads((out / "finetune.json").read_text())
    assert record["finished"]["held_out"]["accuracy"] == found["student"]["value"]
    page = (out / "report.html").read_text("utf-8")
    assert all(f"<td>{name}</td>" in page for name in found)
    assert json.loads((out / "report.json").read_text("utf-8"))["trials"] == [*found.values()]
    assert not (out / "trials").exists()
    again = tuned(bert, out, **HELD, **LONG)
    assert (again.metrics, again.steps) == (done.metrics, done.steps)


def test_nothing_is_searched_without_rows_to_choose_by(
    bert: Path, tmp_path: Path, decided: Callable[[Gain], None], caplog: pytest.LogCaptureFixture
) -> None:
    decided(CLEAR)
    tuned(bert, tmp_path / "none", **NONE_HELD, **LONG)
    assert [*tried(tmp_path / "none")] == ["defaults"]
    assert "No rows are held out" in caplog.text
    some = tuned(bert, tmp_path / "some", **NONE_HELD, **LONG, holdout=0.2)
    assert (some.protocol.selected_on, some.protocol.selects[0]) == (100, "student or defaults")
    assert [*tried(tmp_path / "some")][-1] == "student"


def test_a_killed_search_repeats_nothing(
    bert: Path, tmp_path: Path, decided: Callable[[Gain], None]
) -> None:
    decided(CLEAR)
    whole = tuned(bert, tmp_path / "whole", **HELD, **LONG)
    out = tmp_path / "out"
    for last in ("other-1", "student"):

        def stop(event: malmoi.Progress, last: Path = out / "trials" / last) -> None:
            if last.exists():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tuned(bert, out, **HELD, **LONG, progress=stop)
        assert malmoi.load(out).predict("good film").label in "ny"
    before = tried(out)
    assert [*before] == ["defaults", "other-1", "other-2"]
    resumed = tuned(bert, out, **HELD, **LONG)
    after = tried(out)
    assert {name: after[name] for name in before} == before
    assert torch.equal(weights(resumed), weights(whole))


def test_a_short_budget_is_the_run_of_the_defaults(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(bert, tmp_path / "out", **HELD, best=True, minutes=1e-9)
    assert [*tried(tmp_path / "out")] == ["defaults"]
    assert "hold the run of the defaults alone, which is the result; --minutes" in caplog.text


def test_what_cannot_be_searched(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="best needs a time budget"):
        tuned(bert, tmp_path / "o", best=True)
    with pytest.raises(UsageError, match="cannot be combined with grid"):
        tuned(bert, tmp_path / "o", seeds=2, **LONG)
    pairs = [{"text": "a film", "pair": "a plot", "label": 1}] * 4
    with pytest.raises(UsageError, match="scores that a student can learn"):
        malmoi.finetune(bert, "similarity", pairs, tmp_path / "o", pairs, **LONG)


def test_the_error_of_a_gain_is_that_of_the_differences() -> None:
    chance = np.random.default_rng(0)
    first, second = chance.random(500) < 0.7, chance.random(500) < 0.75

    def outcome(right: Any) -> Outcome:
        return Outcome({}, [], [ExamplePrediction(bool(one), 1.0) for one in right])

    def accuracy(one: Outcome, places: Any) -> float:
        return float(np.mean([one.said[i].prediction for i in places]))

    found = paired_gain(accuracy, outcome(first), outcome(second))
    differences = second.astype(float) - first
    assert found.value == pytest.approx(differences.mean())
    assert found.error == pytest.approx(differences.std(ddof=1) / 500**0.5, rel=0.3)
    assert paired_gain(accuracy, outcome(first), outcome(first)) == Gain(0.0, 0.0)
