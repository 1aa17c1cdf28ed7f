"""The search within a budget: the worse are stopped early, the best averaged, nothing repeated."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import malmoi
from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.search import MAX_FULL_RUNS, Search, greedy_soup
from malmoi.finetuning.trials import TrialLimit, TrialRun, read_trials
from malmoi.model import Network, initialise, preset
from tiny_models import tiny_bert

WORDS = ("good", "fine", "bad", "poor", "film", "plot", "it", "was")


class Trainer:
    """Stands for training: a run's value is its rate's, a little better for later seeds."""

    def __init__(self, *, dies_at: int = -1, completed: float = 1.0) -> None:
        self.asked: list[tuple[str, float, int]] = []
        self.dies_at = dies_at
        self.completed = completed

    def __call__(self, settings: FinetuneConfig, folder: Path, limit: TrialLimit) -> TrialRun:
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        folder.mkdir(parents=True, exist_ok=True)
        self.asked.append((folder.name, settings.lr, settings.seed))
        assert (settings.best, settings.minutes, settings.init_seed) == (False, 0.0, 7)
        better = 1e3 * settings.lr + settings.rdrop / 100 + settings.seed / 1000
        cut = self.completed < 1 and not limit.judged_if_cut
        model = Checkpoint(Network(tiny(), {}), None)
        return TrialRun(model, None if cut else better, 1, self.completed)


def tiny() -> Any:
    return preset("bert-tiny", vocab=60, context=16, width=16, depth=1, heads=2)


def search_in(out: Path, train: Trainer) -> Search:
    settings = FinetuneConfig(best=True, minutes=1.0, lr=1e-4, seed=7)
    return Search(settings, 1, "accuracy", out, train)


def test_the_better_third_is_trained_in_full(tmp_path: Path) -> None:
    train = Trainer()
    search = search_in(tmp_path, train)
    runs = search.run()
    short = [trial for trial in search.trials if trial.share < 1]
    full = [trial for trial in search.trials if trial.share == 1]
    assert len(short) == 7
    assert len(full) == len(runs) == MAX_FULL_RUNS
    assert [dict(trial.changes) for trial in full[:3]] == [
        {"lr": 2e-4, "rdrop": 1.0},
        {"lr": 2e-4},
        {"layer_decay": 0.8, "lr": 2e-4},
    ]
    assert [trial.seed for trial in full] == [7 + i // 3 for i in range(12)]
    values = [run.value for run in runs]
    assert values == sorted(values, reverse=True)
    assert list(read_trials(tmp_path).values()) == search.trials
    assert not list((tmp_path / "trials").glob("short-*"))


def test_a_killed_search_repeats_nothing(tmp_path: Path) -> None:
    whole = Trainer()
    search_in(tmp_path / "whole", whole).run()
    cut = Trainer(dies_at=9)
    with pytest.raises(KeyboardInterrupt):
        search_in(tmp_path / "cut", cut).run()
    rest = Trainer()
    search_in(tmp_path / "cut", rest).run()
    assert rest.asked[:2] == cut.asked[7:]  # full runs are only read again
    assert cut.asked + rest.asked[2:] == whole.asked


def test_a_short_budget_is_one_run_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = search_in(tmp_path, Trainer(completed=0.1))
    search.settings = FinetuneConfig(best=True, minutes=1e-9, lr=1e-4, seed=7)
    search.run()
    found = [(t.name, t.share, dict(t.changes)) for t in search.trials]
    assert found == [("short-1", 0.025, {}), ("full-2", 0.1, {})]
    assert "ended after 10% of the epochs of a single run; --minutes" in caplog.text


def test_a_run_that_does_not_help_is_left_out_of_the_mean() -> None:
    runs = [Checkpoint(initialise(Network(tiny(), {}), seed), None) for seed in range(3)]
    name = "trunk.embed.token.weight"
    start = [run.network.state_dict()[name].clone() for run in runs]
    values = iter((0.1, 0.9))  # with the second run, then with the third

    def evaluate(one: Checkpoint) -> Outcome:
        return Outcome({"accuracy": next(values)}, [], [])

    soup, count = greedy_soup([TrialRun(run, 0.5, 1) for run in runs], "accuracy", evaluate)
    assert count == 2
    assert torch.allclose(soup.network.state_dict()[name], (start[0] + start[2]) / 2, atol=1e-6)


def test_from_rows_to_a_folder(tmp_path: Path) -> None:
    base, out = tmp_path / "bert", tmp_path / "out"
    tiny_bert(base, [" ".join(WORDS)] * 3, 60, context=16, width=16, depth=1, heads=2)
    chance = np.random.default_rng(0)
    rows = [
        {"text": f"{WORDS[n]} {' '.join(chance.choice(WORDS[4:], 4))}", "label": "ny"[int(n < 2)]}
        for n in chance.integers(4, size=220).tolist()
    ]
    how: dict[str, Any] = {"best": True, "minutes": 0.01, "epochs": 4, "device": "cpu"}
    events: list[malmoi.Progress] = []
    done = malmoi.finetune(
        base, "classification", rows[:200], out, rows[200:], progress=events.append, **how
    )
    assert done.protocol.selects == ("setting", "temperature")
    report = json.loads((out / "report.json").read_text("utf-8"))
    assert {trial["name"].partition("-")[0] for trial in report["trials"]} == {"short", "full"}
    page = (out / "report.html").read_text("utf-8")
    assert all(f"<td>{trial['name']}</td>" in page for trial in report["trials"])
    assert malmoi.load(out).predict("good film").label in "ny"
    assert not (out / "trials").exists()
    assert {event.unit for event in events if event.verb == "finetune"} == {"seconds"}
    again = malmoi.finetune(base, "classification", rows[:200], out, rows[200:], **how)
    assert (again.metrics, again.steps) == (done.metrics, done.steps)
    with pytest.raises(UsageError, match="best needs a time budget"):
        malmoi.finetune(base, "classification", rows, tmp_path / "o", best=True)
    with pytest.raises(UsageError, match="cannot be combined with grid"):
        malmoi.finetune(base, "classification", rows, tmp_path / "o", seeds=2, **how)
