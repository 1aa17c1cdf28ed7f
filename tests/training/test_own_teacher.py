"""A GPT that learns from the mean of its own last weights, where text ends before the minutes."""

from pathlib import Path
from typing import Any

import pytest

import malmoi
from malmoi.system.run_folder import read_metrics
from malmoi.training.signals import Stopped
from tiny_runs import STILL, assert_equal_weights, losses, signalled, train, weights, write_corpus

MUON: dict[str, Any] = {"train.optimizer": "muon", "train.muon_decay": 2.0, "steps": 40, **STILL}
TAUGHT: dict[str, Any] = {**MUON, "train.own_teacher": 0.5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


def test_it_teaches_late_and_leaves_nothing_in_the_folder(corpus: Path, tmp_path: Path) -> None:
    train("gpt", corpus, tmp_path / "plain", **MUON)
    train("gpt", corpus, tmp_path / "taught", **TAUGHT)
    rows = read_metrics(tmp_path / "taught" / "metrics.jsonl")
    distance = {row["step"]: row["own_teacher"] for row in rows if "own_teacher" in row}
    assert list(distance) == list(range(17, 41))  # from 40 % of the budget on
    # the mean reaches back two of forty steps: near the network, and not the network
    assert all(1e-6 < value < 0.1 for value in distance.values())
    assert losses(tmp_path / "taught")[:16] == losses(tmp_path / "plain")[:16]
    assert weights(tmp_path / "taught").keys() == weights(tmp_path / "plain").keys()
    with pytest.raises(AssertionError):
        assert_equal_weights(tmp_path / "plain", tmp_path / "taught")


def test_a_stopped_run_resumes_to_the_bit(corpus: Path, tmp_path: Path) -> None:
    train("gpt", corpus, tmp_path / "whole", **TAUGHT)
    with signalled(25), pytest.raises(Stopped):
        train("gpt", corpus, tmp_path / "stopped", **TAUGHT)
    train("gpt", corpus, tmp_path / "stopped", **TAUGHT)
    assert_equal_weights(tmp_path / "stopped", tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_other_objectives_have_no_such_teacher(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(malmoi.MalmoiError, match="objective lm and without"):
        train("bert", corpus, tmp_path / "bert", steps=2, **{"train.own_teacher": 0.5})
