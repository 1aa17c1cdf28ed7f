"""Trackers get the rows of metrics.jsonl, through their own libraries and without a network."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import malmoi
from conftest import environment
from malmoi.errors import MalmoiError, UsageError
from malmoi.training.log import (
    TRACKERS,
    Settings,
    Tracker,
    check_trackers,
    close_trackers,
    open_trackers,
)
from tiny_runs import train, write_corpus

ROWS = [({"loss": 2.5, "lr": 0.1}, 10), ({"loss": 1.5, "lr": 0.05}, 20)]
WHY = "not installed here: pip install it to run this test"


def log_rows(name: str, out: Path) -> None:
    (tracker,) = open_trackers([name, name], out, {"lr": 0.1, "steps": 20})
    for values, step in ROWS:
        tracker.log(values, step)
    close_trackers([tracker])


def test_only_results_go_to_stdout_and_a_failure_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(lambda values, step: None, lambda: print("Run finished."))
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda out, settings: print("Hello.") or tracker)
    log_rows("tensorboard", tmp_path)
    assert capsys.readouterr() == ("", "Hello.\nRun finished.\n")

    def fails(out: Path, settings: Settings) -> Tracker:
        raise ConnectionError("No API key configured.")

    monkeypatch.setitem(TRACKERS, "tensorboard", fails)
    with pytest.raises(MalmoiError, match=r"^--track tensorboard cannot start: No API key confi"):
        log_rows("tensorboard", tmp_path)


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=WHY)
    with environment(WANDB_MODE="offline"):
        log_rows("wandb", tmp_path)
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    written = files[0].read_bytes()
    assert b"loss" in written
    assert b"2.5" in written


def test_mlflow_in_a_local_store(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason=WHY)
    with environment(MLFLOW_ALLOW_FILE_STORE="true"):
        mlflow.set_tracking_uri((tmp_path / "store").as_uri())
        log_rows("mlflow", tmp_path / "run")
        client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("malmoi")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["steps"] == "20"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(10, 2.5), (20, 1.5)]


def test_trackio_in_a_local_folder(tmp_path: Path) -> None:
    with environment(TRACKIO_DIR=str(tmp_path / "trackio")):  # read when it is imported
        pytest.importorskip("trackio", reason=WHY)
        log_rows("trackio", tmp_path / "run")
    assert list((tmp_path / "trackio").iterdir())


def test_tensorboard_gets_the_rows_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=WHY)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    corpus = write_corpus(tmp_path / "text.txt", documents=20)
    train("gpt", corpus, tmp_path / "out", steps=2, track="tensorboard")
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [one.value for one in events.Scalars("loss")] == pytest.approx(losses)
    rows = [{"text": f"{word} people", "label": word} for word in ("free", "strong")] * 3
    for options in ({"track": ["tensorboard"]}, {}):  # the second call finds the run finished
        malmoi.finetune(
            tmp_path / "out", "classification", rows, tmp_path / "tuned", rows, steps=1, **options
        )
    events = EventAccumulator(str(tmp_path / "tuned" / "tensorboard")).Reload()
    assert "accuracy" in events.Tags()["scalars"]


def test_an_unknown_or_missing_tracker_is_reported() -> None:
    with pytest.raises(UsageError, match="Did you mean 'wandb'"):
        check_trackers(["wandv"])
    for name in TRACKERS:
        if find_spec(name) is None:
            with pytest.raises(MalmoiError, match=f"pip install {name}"):
                check_trackers([name])
