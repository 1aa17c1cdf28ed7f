"""Studies: cells are done once, a stopped study resumes, verdicts follow from numbers."""

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from malmoi.cli.app import run_command
from malmoi.studies import run
from malmoi.studies.data import public_tasks, write_rows
from malmoi.studies.report import Claim, StudyResults, lower_is_better, result_rows, write_pages
from malmoi.studies.run import StudyRunConfig, finished_cells, run_cells, run_study
from malmoi.studies.study import (
    MODULES,
    Cell,
    JudgedModel,
    Words,
    named_scale,
    named_study,
    picked_summaries,
)
from malmoi.training.signals import Stopped
from malmoi.training.trainer import Trainer
from tiny_models import tiny_bert


def counted(judged: JudgedModel, note: Path, value: float) -> dict[str, float]:
    """Notes that it was called; a negative value fails."""
    with note.with_suffix(".log").open("a") as file:
        file.write(f"{value}\n")
    if value < 0:
        raise ValueError("negative")
    return {"accuracy": value + judged.seed}


def test_a_cell_is_judged_once_and_again_if_its_data_changes(tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("one")

    def cells(*values: float) -> list[Cell]:
        judges = [partial(counted, note=data, value=value) for value in values]
        return [Cell(f"row {j.keywords['value']}", seed, j) for seed in (0, 1) for j in judges]

    failed = run_cells(cells(3.0, -1.0), tmp_path / "cache")
    assert failed == ["row -1.0, seed 0: negative", "row -1.0, seed 1: negative"]
    assert run_cells(cells(3.0), tmp_path / "cache") == []
    assert data.with_suffix(".log").read_text().split() == ["3.0", "-1.0", "3.0", "-1.0"]
    found = StudyResults(finished_cells(cells(3.0), tmp_path / "cache"))
    assert found.table == {"row 3.0": {"accuracy": [3.0, 4.0]}}
    data.write_text("two")
    assert finished_cells(cells(3.0), tmp_path / "cache") == []


def test_a_summary_is_picked_from_the_sentences_of_a_text(tmp_path: Path) -> None:
    rows = [
        {"text": f"Ann sat here. Dogs eat {w} food. Go home.", "summary": f"dogs eat {w} food"}
        for w in ("red", "old", "new", "hot", "raw", "odd")
    ]
    rows.append({"text": "Dogs eat.", "summary": "Dogs eat"})
    for part in ("train", "test"):
        write_rows(tmp_path / f"summaries.{part}.jsonl", rows)
    [task] = public_tasks([tmp_path])
    folder = tiny_bert(tmp_path / "bert", [row["text"] for row in rows], 60)
    judged = JudgedModel(folder, tmp_path / "tuned", 0)
    found = picked_summaries(judged, task, {"epochs": 12.0, "lr": 3e-3, "batch": 1})
    # the second sentence of six texts is the summary, and the only one of the last
    assert found["summaries, a sentence picked"] == pytest.approx(100)
    assert found["summaries: first sentence"] == pytest.approx(100 / 7)


def interrupting(judged: JudgedModel, note: str, process: int) -> dict[str, float]:
    """Asks the study to stop, the first time."""
    if not Path(note).exists():
        Path(note).touch()
        os.kill(process, signal.SIGTERM)
    return {"accuracy": 1.0}


def test_a_signal_ends_a_study_after_the_cells_that_run(tmp_path: Path) -> None:
    judge = partial(interrupting, note=str(tmp_path / "note"), process=os.getpid())
    cells = [Cell("row", seed, judge) for seed in range(3)]
    with pytest.raises(Stopped):
        run_cells(cells, tmp_path)
    assert len(finished_cells(cells, tmp_path)) == 1
    assert run_cells(cells, tmp_path) == []
    assert len(finished_cells(cells, tmp_path)) == 3


def hanging(judged: JudgedModel, note: str) -> dict[str, float]:
    """Notes its process, asks the study to stop, and never ends."""
    Path(note).write_text(str(os.getpid()))
    os.kill(os.getppid() if multiprocessing.parent_process() else os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cell_that_hangs_ends_with_the_study(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "GRACE", 0.5)
    note = tmp_path / "note"
    cells = [Cell("row", 0, partial(hanging, note=str(note)))]
    with pytest.raises(Stopped):
        run_cells(cells, tmp_path, workers)
    if workers > 1:
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)


def test_training_that_hangs_ends_with_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "GRACE", 0.5)
    (tmp_path / "text.txt").write_text("One law for all the people. " * 400)
    hang = partial(hanging, note=str(tmp_path / "note"))
    monkeypatch.setattr(Trainer, "learn_eagerly", lambda trainer, micros: hang(None))
    recipe = named_scale("tiny").recipe("gpt", 0)
    cells = [
        Cell(
            "row",
            0,
            partial(counted, note=tmp_path, value=0.0),
            recipe,
            (str(tmp_path / "text.txt"),),
        )
    ]
    with pytest.raises(Stopped):
        run_cells(cells, tmp_path, device="cpu")
    assert (tmp_path / "note").is_file()


def models_ready(judged: JudgedModel, models: str) -> dict[str, float]:
    return {"models": len(list(Path(models).glob("*/facts.json")))}


def test_models_trained_by_the_clock_share_the_machine_with_no_judge(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("One law for all the people. " * 400)
    judge = partial(models_ready, models=str(tmp_path / "models"))
    timed = (
        named_scale("tiny").recipe("gpt", 0).override({"train.steps": 0, "train.minutes": 0.001})
    )
    text = (str(tmp_path / "text.txt"),)
    cells = [Cell("judge", 0, judge), Cell("timed", 0, judge, timed, text)]
    assert run_cells(cells, tmp_path, device="cpu") == []
    assert StudyResults(finished_cells(cells, tmp_path)).table["judge"] == {"models": [1.0]}


TEXT = "The {0} of {1} asked the people of {1} for a {0} law. They gave it to {1} at once."
NOUNS = ("state", "house", "court", "people", "army", "union", "peace", "labour")


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Sixty documents, and a folder with SST-2 and BLiMP in their own formats."""
    names = [f"{a}{b}" for a in ("Al", "Bo", "Ce", "Do") for b in ("tia", "ria", "land")]
    lines = [TEXT.format(NOUNS[i % 8], names[i % 12]) for i in range(300)]
    text = "\n\n\n".join(" ".join(lines[i : i + 5]) for i in range(0, 300, 5))
    (tmp_path / "text.txt").write_text(text)
    sets = tmp_path / "sets" / "SST-2"
    sets.mkdir(parents=True)
    rows = "".join(f"the {NOUNS[i % 8]} is here\t{i % 2}\n" for i in range(16))
    for name in ("train.tsv", "dev.tsv"):
        (sets / name).write_text(f"sentence\tlabel\n{rows}")
    pair = {"sentence_good": "They gave it.", "sentence_bad": "They it gave."}
    row = json.dumps({**pair, "linguistics_term": "order"}) + "\n"
    (tmp_path / "sets" / "blimp.jsonl").write_text(row * 4)
    return ["--data", str(tmp_path / "text.txt"), "--data", str(tmp_path / "sets")]


def test_a_stopped_study_resumes(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    order = [
        "study",
        "gpt1-zeroshot",
        "--scale",
        "tiny",
        *data,
        "--out",
        str(out),
        "--device",
        "cpu",
        "--workers",
        "1",
    ]
    assert run_command(order) == 0
    said = capsys.readouterr().out
    assert "| 4 updates | " in said
    assert "BLiMP improves with pre-training" in said
    facts = json.loads((out / "results.json").read_text("utf-8"))
    assert set(facts["rows"]["1 update"]) == {"bits per byte", "BLiMP", "last word"}
    assert facts["models"]["1 update"]["parameters"] > 0
    assert (out / "figure.svg").read_text("utf-8").count("<polyline") == 2
    page = (out / "report.html").read_text("utf-8")
    assert "업데이트 횟수에 따른" in page
    assert "<svg" in page
    # as if it had been stopped before its last cell
    model = next((out / "cache" / "models").glob("*/facts.json"))
    cells = sorted((out / "cache" / "cells").glob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in (model, *cells)}
    cells[0].unlink()
    assert run_command([*order, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == facts["rows"]
    assert [path for path, at in before.items() if path.stat().st_mtime_ns != at] == [cells[0]]
    assert run_command([*order[:4], "--data", "builtin:sotu", "--out", str(out)]) == 2
    assert "was made from a different text" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODULES)
def test_every_study_runs_at_the_scale_of_a_cpu(name: str, tmp_path: Path) -> None:
    study = named_study(name)
    result = run_study(study, tmp_path, StudyRunConfig(workers=2, device="cpu"))
    rows = result.facts["rows"]
    assert isinstance(rows, dict)
    assert len(rows) >= 2
    assert "±" in result.report.read_text("utf-8")
    assert all(
        "verdict" in claim
        for claim in json.loads((tmp_path / "results.json").read_text("utf-8"))["claims"]
    )


@pytest.mark.parametrize(
    ("ours", "other", "column", "said"),
    [
        ([90.0, 91.0, 92.0], [80.0, 81.0, 82.0], "SST-2", "agrees (+10.0, error ± 0.816)"),
        ([80.0, 81.0], [90.0, 91.0], "SST-2", "does not at this scale (−10.0, error ± 0.707)"),
        ([90.0, 70.0], [79.0, 81.0], "SST-2", "within noise (+0.000, error ± 10.0)"),
        ([90.0], [80.0], "SST-2", "cannot tell (+10.0, one seed, spread unknown)"),
        ([3.0, 3.1], [5.0, 5.1], "bits per byte", "agrees (+2.00, error ± 0.071)"),
    ],
)
def test_verdicts(ours: list[float], other: list[float], column: str, said: str) -> None:
    records = [
        {"row": row, "seed": seed, "values": {column: value}, "facts": {}}
        for row, values in (("ours", ours), ("other", other))
        for seed, value in enumerate(values)
    ]
    results = StudyResults(records)
    claim = Claim(Words("x", "가"), "ours", "other", column)
    assert claim.verdict(results).en == said
    assert lower_is_better(column) == (column == "bits per byte")
    head, rows = result_rows(results, {"other": {"theirs": 84.0}})
    assert head == ["", column, "paper: theirs"]
    assert [row[-1] for row in rows] == ["–", "84.0"]


PUBLISHED = sorted((Path(__file__).parents[2] / "docs/results/studies").glob("*/results.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_a_published_report_follows_from_its_numbers(path: Path, tmp_path: Path) -> None:
    facts = json.loads(path.read_text("utf-8"))
    study = named_study(facts["study"])
    write_pages(study, facts["scale"], facts["seeds"], facts["cells"], tmp_path)
    for name in ("figure.svg", "report.md"):
        ours, theirs = ((folder / name).read_text("utf-8") for folder in (tmp_path, path.parent))
        here = facts["machine"]  # the page names the machine, the date and the version
        assert {*theirs.splitlines()} - {*ours.splitlines()} == {
            line for line in theirs.splitlines() if here in line
        }
