"""The search within a budget: clear losses are left out, all rows train, nothing is repeated."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import malmoi
from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.features import ExamplePrediction, Outcome
from malmoi.finetuning.candidates import Comparison, Gain, paired_gain, read_tried
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.results import FinishedRun
from malmoi.finetuning.search import Search, other_settings
from malmoi.model import Network, preset
from tiny_models import tiny_bert

WORDS = ("good", "fine", "bad", "poor", "film", "plot", "it", "was")
ERROR = 0.02  # of every gain


class Trainer:
    """Stands for training: twice the rate alone gains so much."""

    def __init__(
        self, gain: float = 0.0, *, dies_at: int = -1, completed: float = 1.0, held: int = 1
    ) -> None:
        self.gain = gain
        self.asked: list[tuple[str, float, int]] = []
        self.dies_at = dies_at
        self.completed = completed
        self.held = held

    def __call__(self, settings: FinetuneConfig, folder: Path, seconds: float) -> FinishedRun:
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        folder.mkdir(parents=True, exist_ok=True)
        self.asked.append((folder.name, settings.lr, settings.seed))
        assert (settings.best, settings.minutes, settings.init_seed) == (False, 0.0, 7)
        faster = settings.lr == 2e-4 and settings.layer_decay == 1
        metrics = {"accuracy": 0.5 + faster * self.gain} if self.held else {}
        outcome = Outcome(metrics, [], [ExamplePrediction("y", 1.0)] * self.held)
        model = Checkpoint(Network(tiny(), {}), None)
        return FinishedRun(settings, model, outcome, 1, metrics, completed=self.completed)


def tiny() -> Any:
    return preset("bert-tiny", vocab=60, context=16, width=16, depth=1, heads=2)


def search_in(out: Path, train: Trainer, minutes: float = 1.0) -> Search:
    settings = FinetuneConfig(best=True, minutes=minutes, lr=1e-4, seed=7)

    def gain(base: Outcome, other: Outcome) -> Gain:
        return Gain(other.metrics["accuracy"] - base.metrics["accuracy"], ERROR)

    return Search(settings, Comparison(out, "accuracy", gain), train)


@pytest.mark.parametrize(("gain", "left_out"), [(0.05, 0), (-0.01, 0), (-0.05, 1)])
def test_only_clear_losses_are_left_out(tmp_path: Path, gain: float, left_out: int) -> None:
    search = search_in(tmp_path, Trainer(gain))
    runs = search.run()
    tried = search.comparison.tried
    assert [dict(one.changes or {}) for one in tried] == [{}, *other_settings(search.settings)]
    assert [one.seed for one in tried] == list(range(7, 7 + len(tried)))
    assert [one.gain for one in tried] == [
        None,
        *(Gain(pytest.approx(gain * (one.changes == {"lr": 2e-4})), ERROR) for one in tried[1:]),
    ]
    assert len(runs) == len(tried) - left_out
    assert list(read_tried(tmp_path).values()) == tried


def test_without_held_out_rows_all_runs_are_averaged(tmp_path: Path) -> None:
    search = search_in(tmp_path, Trainer(-0.05, held=0))
    assert len(search.run()) == 1 + len(other_settings(search.settings))
    assert {one.gain for one in search.comparison.tried} == {None}


@pytest.mark.parametrize("dies_at", [0, 3])
def test_a_killed_search_repeats_nothing(tmp_path: Path, dies_at: int) -> None:
    def run(train: Trainer, name: str) -> Search:
        search = search_in(tmp_path / name, train)
        search.run()
        return search

    whole = Trainer(0.05)
    done = run(whole, "whole")
    cut, rest = Trainer(0.05, dies_at=dies_at), Trainer(0.05)
    with pytest.raises(KeyboardInterrupt):
        run(cut, "cut")
    resumed = run(rest, "cut")
    read = [one for one in cut.asked if one in rest.asked]  # from their folders, not trained again
    assert cut.asked + [one for one in rest.asked if one not in read] == whole.asked
    assert [t.name for t in resumed.comparison.tried] == [t.name for t in done.comparison.tried]


@pytest.mark.parametrize("seconds", [3, 14, 20, 45, 60, 100, 600])
def test_the_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    now = 0.0
    monkeypatch.setattr("malmoi.finetuning.search.time.monotonic", lambda: now)
    train = Trainer(0.05)

    def take_time(settings: FinetuneConfig, folder: Path, limit: float) -> FinishedRun:
        nonlocal now
        needed = 14 * settings.epochs / FinetuneConfig().epochs  # and a second to evaluate
        train.completed = min(1.0, limit / needed)
        now += train.completed * needed + 1
        return replace(train(settings, folder, limit), per_row=0.01)

    search = search_in(tmp_path, Trainer(), minutes=seconds / 60)
    search.train = take_time
    search.judged = 300
    runs = search.run()
    assert now + 3 <= 1.15 * seconds + 4  # 3: the final evaluation
    assert len(runs) == 6 or search.left < 15


def test_a_short_budget_is_one_run_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = search_in(tmp_path, Trainer(completed=0.1), minutes=1e-9)
    search.run()
    assert [(t.name, t.share, dict(t.changes)) for t in search.comparison.tried] == [
        ("last-0", 0.1, {})
    ]
    assert "ended after 10% of the epochs of a single run; --minutes" in caplog.text


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


def rows_of(count: int) -> list[dict[str, str]]:
    chance = np.random.default_rng(0)
    return [
        {"text": f"{WORDS[n]} {' '.join(chance.choice(WORDS[4:], 4))}", "label": "ny"[int(n < 2)]}
        for n in chance.integers(4, size=count).tolist()
    ]


def test_from_rows_to_a_folder(tmp_path: Path) -> None:
    base, out = tmp_path / "bert", tmp_path / "out"
    tiny_bert(base, [" ".join(WORDS)] * 3, 60, context=16, width=16, depth=1, heads=2)
    rows = rows_of(270)
    how: dict[str, Any] = {"best": True, "minutes": 0.2, "epochs": 2, "device": "cpu"}
    events: list[malmoi.Progress] = []
    done = malmoi.finetune(
        base, "classification", rows[:250], out, rows[250:], progress=events.append, **how
    )
    protocol = done.protocol
    assert (protocol.trained_on, protocol.selected_on) == (250, 0)
    report = json.loads((out / "report.json").read_text("utf-8"))
    page = (out / "report.html").read_text("utf-8")
    assert all(f"<td>{trial['name']}</td>" in page for trial in report["trials"])
    assert malmoi.load(out).predict("good film").label in "ny"
    assert not (out / "trials").exists()
    assert {event.unit for event in events if event.verb == "finetune"} == {"seconds"}
    again = malmoi.finetune(base, "classification", rows[:250], out, rows[250:], **how)
    assert (again.metrics, again.steps) == (done.metrics, done.steps)
    with pytest.raises(UsageError, match="best needs a time budget"):
        malmoi.finetune(base, "classification", rows, tmp_path / "o", best=True)
    with pytest.raises(UsageError, match="cannot be combined with grid"):
        malmoi.finetune(base, "classification", rows, tmp_path / "o", seeds=2, **how)
