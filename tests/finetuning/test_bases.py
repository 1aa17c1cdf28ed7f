"""`finetune --dry-run`: which model to start from."""

from pathlib import Path

import pytest
import torch

import malmoi
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli import main, run_command
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import custom_task
from malmoi.finetuning.bases import advice, models_at_hand, probe_bases
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer

GOOD = ("warm", "funny", "bright", "kind")
BAD = ("dull", "slow", "cold", "grim")
ROWS = [
    {"text": f"a {word} {noun}", "label": label}
    for label, words in (("good", GOOD), ("bad", BAD))
    for word in words
    for noun in ("film", "story", "play", "book", "song")
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model to which all words are the same, and a random one."""
    monkeypatch.chdir(tmp_path)
    words = train_tokenizer([row["text"] for row in ROWS], kind="wordpiece", vocab=120)
    config = preset("bert-tiny", vocab=words.vocab_size, context=16, width=32, heads=2, depth=1)
    for name in ("blind", "sees"):
        network = initialise(Network(config, {"mlm": 0}, pooler=True), 0)
        if name == "blind":
            torch.nn.init.zeros_(network.trunk.embed.token.weight)
        write_checkpoint(Checkpoint(network, words), tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_the_model_that_tells_the_labels_apart_is_proposed(runs: Path) -> None:
    task = custom_task("classification")
    names = ["runs/blind", "runs/sees", "runs/none"]
    found = list(probe_bases(names, task, ROWS, torch.device("cpu")))
    assert [one.name for one in found] == names
    blind, sees, none = found
    assert blind.gain is None
    assert sees.gain is not None
    assert sees.value > blind.value
    assert sees.gain.value == pytest.approx(sees.value - blind.value)
    assert "runs/none" in none.problem
    assert advice(found).endswith("-m runs/sees")
    assert "None is clearly better" in advice(found[:1])


def test_only_classes_are_compared(runs: Path) -> None:
    rows = [{"text": "a", "label": 0.5}, {"text": "b", "label": 0.7}]
    with pytest.raises(UsageError, match="regression has none"):
        list(probe_bases(["runs/blind"], custom_task("regression"), rows, torch.device("cpu")))


def test_a_dry_run_prints_the_models_and_writes_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{row['text']},{row['label']}" for row in ROWS]
    Path("rows.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    monkeypatch.setattr("sys.argv", ["malmoi", "finetune", "rows.csv", "--dry-run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    shown = capsys.readouterr()
    for name in ("malmoi-bert", "runs/sees", "runs/blind"):
        assert f"\n{name}\t" in shown.out
    assert sorted(path.name for path in runs.iterdir()) == ["blind", "sees"]


def test_a_run_says_which_base_is_better(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{row['text']},{row['label']}" for row in ROWS * 3]
    Path("rows.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    monkeypatch.setattr("malmoi.finetuning.bases.BERT", "runs/blind")

    def said(base: str, out: str) -> str:
        once = ["--steps", "1", "--device", "cpu", "-o", out]
        assert run_command(["finetune", "rows.csv", "-m", base, *once]) == 0
        return capsys.readouterr().err

    assert "frozen runs/sees tells the labels apart clearly better" in said("runs/blind", "runs/1")
    assert "frozen runs/" not in said("runs/sees", "runs/2")
    Path("runs/sees/finetune.json").write_text("{}")  # it may know these very labels
    assert "frozen runs/" not in said("runs/blind", "runs/3")


def test_models_at_hand(runs: Path) -> None:
    found = models_at_hand("mine", "malmoi-bert", "mine")
    assert found[:4] == ["mine", "malmoi-bert", "runs/blind", "runs/sees"]
    assert malmoi.load("runs/sees").network.config.width == 32
