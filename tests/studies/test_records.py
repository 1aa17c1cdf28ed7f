"""The ladder: it reads, its best come first, and a track is run and judged on what it held out."""

import tomllib
from pathlib import Path

import pytest

from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.inference import load
from malmoi.studies.records import (
    JUDGES,
    RecordEntry,
    entry_toml,
    named_track,
    read_ladder,
    run_record,
)
from tiny_runs import write_corpus


def test_the_records_are_read_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tracks, entries = read_ladder()
    assert {track.judge for track in tracks.values()} == set(JUDGES)
    assert all(entry.track in tracks for entry in entries)
    assert run_command(["records"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in tracks)
    with pytest.raises(UsageError, match="Did you mean 'shakespeare'"):
        named_track("shakespear")


def test_an_entry_is_toml_that_reads_back() -> None:
    entry = RecordEntry(
        track="text-5",
        recipe="gpt",
        machine='one "H200"',
        figure=1.2,
        date="2026-11-16",
        commit="0.1.0",
        settings={"model.width": "512"},
        figures={"bits_per_byte": 1.2},
    )
    (found,) = tomllib.loads(entry_toml(entry))["entries"]
    assert RecordEntry.from_dict(found) == entry


def test_a_track_is_run_and_judged_on_what_it_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_corpus(tmp_path / "text.txt", documents=120)
    settings = {
        "model.width": "16",
        "model.depth": "1",
        "model.heads": "1",
        "model.context": "16",
        "train.batch": "4",
        "train.steps": "3",
        "train.minutes": "0",
    }
    entry = run_record("shakespeare", [str(text)], tmp_path / "run", device="cpu", **settings)
    held_out = (tmp_path / "run" / "text" / "held-out.txt").read_text()
    trained = (tmp_path / "run" / "text" / "train.txt").read_text()
    assert len(held_out) == pytest.approx(len(trained) / 9, rel=0.01)
    bits = load(tmp_path / "run" / "model", device="cpu").bits_per_byte(held_out)
    assert entry.figure == pytest.approx(bits * 0.693147, rel=1e-4)
    assert entry.recipe == "gpt"
    assert "is for 3 minutes: with another budget this run is no entry" in caplog.text
    (found,) = tomllib.loads((tmp_path / "run" / "entry.toml").read_text())["entries"]
    assert found["track"] == "shakespeare"
    with pytest.raises(UsageError, match="is evaluated on rows"):
        run_record("bert-5", [str(text)], tmp_path / "bert", device="cpu")


def test_what_is_missing_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text.txt", documents=120)
    for track, missing in (("both-10", r"no blimp\.jsonl\.xz in"), ("bert-5", "no glue/SST-2 in")):
        with pytest.raises(UsageError, match=missing):
            run_record(track, [str(text)], tmp_path / "run", judge_data=tmp_path, device="cpu")
        (tmp_path / "blimp.jsonl.xz").touch()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(MalmoiError, match="every source is empty"):
        run_record("shakespeare", [str(tmp_path / "empty.txt")], tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
