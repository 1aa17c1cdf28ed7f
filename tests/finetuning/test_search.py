"""The search within a budget: only clear gains count, all rows train the result, no repeats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import malmoi
from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.predictions import ExamplePrediction, Outcome
from malmoi.finetuning.candidates import Comparison, Fitted, Gain, paired_gain, read_tried
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.run import run_trial
from malmoi.finetuning.search import MIN_LAST_RUNS, Search
from malmoi.finetuning.task_data import FinetuneData
from malmoi.model import Network, preset
from tiny_models import tiny_bert

WORDS = ("good", "fine", "bad", "poor", "film", "plot", "it", "was")
ERROR = 0.02  # of every gain


class Trainer:
    """Stands for training: twice the rate gains `short` in a trial and `full` in a full run."""

    def __init__(
        self, short: float = 0.0, full: float = 0.0, *, dies_at: int = -1, completed: float = 1.0
    ) -> None:
        self.gains = {"short": short, "full": full, "last": 0.0}
        self.asked: list[tuple[str, float, int]] = []
        self.dies_at = dies_at
        self.completed = completed

    def __call__(self, settings: FinetuneConfig, folder: Path, seconds: float) -> Fitted:
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        folder.mkdir(parents=True, exist_ok=True)
        self.asked.append((folder.name, settings.lr, settings.seed))
        assert (settings.best, settings.minutes, settings.init_seed) == (False, 0.0, 7)
        faster = settings.lr == 2e-4 and not settings.rdrop and settings.layer_decay == 1
        assert settings.seed == 7 or folder.name.startswith("last")
        value = 0.5 + faster * self.gains[folder.name.partition("-")[0]]
        outcome = Outcome({"accuracy": value}, [], [])
        return Fitted(Checkpoint(Network(tiny(), {}), None), outcome, 1, self.completed)


def tiny() -> Any:
    return preset("bert-tiny", vocab=60, context=16, width=16, depth=1, heads=2)


def search_in(out: Path, train: Trainer, minutes: float = 1.0) -> Search:
    settings = FinetuneConfig(best=True, minutes=minutes, lr=1e-4, seed=7)

    def gain(base: Outcome, other: Outcome) -> Gain:
        return Gain(other.metrics["accuracy"] - base.metrics["accuracy"], ERROR)

    return Search(settings, 1, Comparison(out, "accuracy", gain), train, train)


@pytest.mark.parametrize(
    ("short", "full", "kinds", "chosen"),
    [
        (0.01, 0.05, ["short"], {}),  # less than the error: no challenger
        (0.05, 0.01, ["short", "full"], {}),  # a challenger that does not win
        (0.05, 0.05, ["short", "full"], {"lr": 2e-4}),
    ],
)
def test_only_clear_gains_replace_the_defaults(
    tmp_path: Path, short: float, full: float, kinds: list[str], chosen: dict[str, float]
) -> None:
    search = search_in(tmp_path, Trainer(short, full))
    runs = search.run()
    found = list(dict.fromkeys(trial.name.partition("-")[0] for trial in search.comparison.tried))
    assert found == ["last", *kinds]  # first of all a run of the defaults
    last = [
        dict(trial.changes) for trial in search.comparison.tried if trial.name.startswith("last")
    ]
    assert last[0] == {}
    assert len(runs) == len(last) - bool(chosen)  # it is in the mean, unless something is better
    assert last[1] == chosen or {"lr": 2e-4} in last[1:]
    if "full" in kinds:
        compared = [dict(t.changes) for t in search.comparison.tried if t.name.startswith("full")]
        assert compared == [{}, {"lr": 2e-4}]
    assert list(read_tried(tmp_path).values()) == search.comparison.tried


def test_the_runs_differ_in_settings_and_in_the_order_of_the_rows(tmp_path: Path) -> None:
    search = search_in(tmp_path, Trainer(-0.05))  # twice the rate is clearly worse
    search.run()
    last = [trial for trial in search.comparison.tried if trial.name.startswith("last")]
    assert dict(last[1].changes) == {"layer_decay": 0.8, "lr": 2e-4}
    assert {"lr": 2e-4} not in [dict(trial.changes) for trial in last]
    assert [trial.seed for trial in last] == list(range(7, 7 + len(last)))


def test_settings_that_cannot_be_compared_are_taken_untried(tmp_path: Path) -> None:
    search = search_in(tmp_path, Trainer())
    search.compares = False
    assert len(search.run()) == MIN_LAST_RUNS
    found = [dict(trial.changes) for trial in search.comparison.tried]
    assert found == [{}, {"layer_decay": 0.8, "lr": 2e-4}, {"lr": 5e-5}, {"lr": 2e-4}]


@pytest.mark.parametrize("dies_at", [0, 3, 8, 11])  # in a last run, a short trial, a full one
def test_a_killed_search_repeats_nothing(tmp_path: Path, dies_at: int) -> None:
    def run(train: Trainer, name: str) -> Search:
        search = search_in(tmp_path / name, train)
        search.run()
        return search

    whole = Trainer(0.05, 0.05)
    done = run(whole, "whole")
    cut, rest = Trainer(0.05, 0.05, dies_at=dies_at), Trainer(0.05, 0.05)
    with pytest.raises(KeyboardInterrupt):
        run(cut, "cut")
    resumed = run(rest, "cut")
    read = [one for one in cut.asked if one in rest.asked]  # from their folders, not trained again
    kept = {"short-0", "full-0", *(f"last-{i}" for i in range(8))}
    assert {name for name, _, _ in read} <= kept
    assert cut.asked + [one for one in rest.asked if one not in read] == whole.asked
    assert [t.name for t in resumed.comparison.tried] == [t.name for t in done.comparison.tried]


@pytest.mark.parametrize("seconds", [3, 14, 20, 45, 60, 100, 600])
def test_the_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    now = 0.0
    monkeypatch.setattr("malmoi.finetuning.search.time.monotonic", lambda: now)
    train = Trainer(0.05, 0.05)

    def take_time(settings: FinetuneConfig, folder: Path, limit: float) -> Fitted:
        nonlocal now
        needed = 14 * settings.epochs / FinetuneConfig().epochs  # and a second to evaluate
        train.completed = min(1.0, limit / needed)
        now += train.completed * needed + 1
        return replace(train(settings, folder, limit), per_row=0.01)

    search = search_in(tmp_path, Trainer(), minutes=seconds / 60)
    search.train = search.train_on_all = take_time
    search.judged = 300
    runs = search.run()
    assert now + 3 <= 1.15 * seconds + 4  # 3: the final evaluation
    assert len(runs) >= MIN_LAST_RUNS or search.left < 15


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


def test_from_rows_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, set[tuple[int, int]]] = {}

    def observed(work: FinetuneData, settings: Any, folder: Path, limit: float) -> Fitted:
        kind = folder.name.partition("-")[0]
        sizes.setdefault(kind, set()).add((len(work.train), len(work.held)))
        return run_trial(work, settings, folder, limit)

    monkeypatch.setattr("malmoi.finetuning.search.run_trial", observed)
    monkeypatch.setattr("malmoi.finetuning.search.TRIALS_PAY", 0)  # however slow the machine is
    base, out = tmp_path / "bert", tmp_path / "out"
    tiny_bert(base, [" ".join(WORDS)] * 3, 60, context=16, width=16, depth=1, heads=2)
    rows = rows_of(270)
    how: dict[str, Any] = {"best": True, "minutes": 0.2, "epochs": 2, "device": "cpu"}
    events: list[malmoi.Progress] = []
    done = malmoi.finetune(
        base, "classification", rows[:250], out, rows[250:], progress=events.append, **how
    )
    protocol = done.protocol
    assert (protocol.trained_on, protocol.compared_on, protocol.selected_on) == (250, 50, 0)
    assert "50 of them held out while settings are compared" in protocol.describe()
    assert (sizes["short"], sizes["last"]) == ({(200, 50)}, {(250, 0)})
    report = json.loads((out / "report.json").read_text("utf-8"))
    assert {trial["name"].partition("-")[0] for trial in report["trials"]} >= {"short", "last"}
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
