"""Settings that nobody gave: by the rows, the kind and the model; and what is kept of a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import malmoi
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.finetune import default_settings
from malmoi.model import preset
from tiny_models import tiny_bert

WORDS = "good fine bad poor film plot it was dull"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(context=16, width=16, depth=3, heads=2, dropout=0.1)
    return tiny_bert(tmp_path_factory.mktemp("bert"), [WORDS] * 3, 60, seed=5, **sizes)


def table(path: Path, labels: str) -> Path:
    """A row for each letter: its label."""
    texts = WORDS.split()
    lines = [f"{texts[i % 9]} {texts[i // 9 % 9]},{label}" for i, label in enumerate(labels)]
    path.write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    return path


def test_the_default_settings_follow_the_rule() -> None:
    labels, number = head_kind(named_task("rte")), head_kind(named_task("stsb"))
    small = preset("bert-tiny", vocab=100, width=384, heads=12)
    base = preset("bert-base")
    found = default_settings(2_390, labels, small)
    assert found == {"epochs": 10, "batch": 16, "lr": 8e-5, "layer_decay": 0.9, "average": 0.33}
    assert default_settings(5_749, number, small)["lr"] == 1.2e-4
    assert default_settings(5_749, number, small)["epochs"] == 10
    assert default_settings(5_749, labels, small)["epochs"] == 5
    assert default_settings(67_349, labels, base) | {"lr": 0} == {
        "epochs": 3, "batch": 32, "lr": 0, "layer_decay": 0.9, "average": 0.33,
    }  # fmt: skip
    assert default_settings(67_349, labels, base)["lr"] == 4e-5
    assert default_settings(2_390, labels, base)["layers_transferred"] == 11
    assert "layers_transferred" not in default_settings(16, labels, base)


def test_defaults_are_logged_recorded_and_overridable(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = table(tmp_path / "rows.csv", "ab" * 27)
    malmoi.finetune(
        bert, "classification", rows, tmp_path / "o", rows, steps=2, lr=1e-3, device="cpu"
    )
    assert "54 rows: 2 steps, batches of 16, rate 0.001, layer decay 0.9, averaged" in caplog.text
    used = json.loads((tmp_path / "o" / "finetune.json").read_text("utf-8"))
    assert (used["lr"], used["batch"], used["average"], used["class_weights"]) == (
        1e-3, 16, 0.33, None,
    )  # fmt: skip


def test_rare_labels_get_larger_weights_by_default(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = table(tmp_path / "rows.csv", "a" * 76 + "b" * 4)
    malmoi.finetune(bert, "classification", rows, tmp_path / "o", rows, steps=1, device="cpu")
    assert "Labels are imbalanced (the rarest is 'b', 5.0%)" in caplog.text
    assert json.loads((tmp_path / "o" / "finetune.json").read_text("utf-8"))["class_weights"]


def test_only_the_first_layers_are_transferred(bert: Path, tmp_path: Path) -> None:
    rows = table(tmp_path / "rows.csv", "ab" * 9)
    how = {"steps": 1, "lr": 1e-12, "device": "cpu", "average": 0.0}
    old = malmoi.load(bert).network.trunk.state_dict()
    for layers in (0, 2, None):
        out = tmp_path / str(layers)
        done = malmoi.finetune(
            bert, "classification", rows, out, rows, layers_transferred=layers, **how
        )
        new = done.model.network.trunk.state_dict()
        same = [
            torch.allclose(new[name], old[name], atol=1e-6)
            for name in (f"blocks.{i}.mlp.up.weight" for i in range(3))
        ]
        assert same == [i < (3 if layers is None else layers) for i in range(3)]
        assert torch.allclose(new["embed.token.weight"], old["embed.token.weight"], atol=1e-6)
    with pytest.raises(UsageError, match="this model has 3 layers, so give 0 to 3"):
        malmoi.finetune(bert, "classification", rows, tmp_path / "x", rows, layers_transferred=4)


def test_a_model_fine_tuned_for_other_labels_gets_a_new_head(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = table(tmp_path / "first.csv", "xyz" * 9)
    how = {"steps": 2, "device": "cpu"}
    malmoi.finetune(bert, "classification", first, tmp_path / "one", first, **how)
    rows = table(tmp_path / "rows.csv", "ab" * 9)
    done = malmoi.finetune(tmp_path / "one", "classification", rows, tmp_path / "two", rows, **how)
    assert done.model.labels == ("a", "b")
    assert "The output layer for x, y, z is replaced by a new one for a, b." in caplog.text
    assert len(done.model.network.heads["classify"].get_parameter("linear.weight")) == 2


def test_a_number_starts_at_the_mean(bert: Path, tmp_path: Path) -> None:
    rows = table(tmp_path / "rows.csv", "36" * 9)
    done = malmoi.finetune(
        bert, "regression", rows, tmp_path / "o", rows, steps=1, lr=1e-9, device="cpu"
    )
    assert done.model.predict("good").scores["score"] == pytest.approx(4.5, abs=0.5)


def test_a_run_starts_without_torchs_compiler(bert: Path, tmp_path: Path) -> None:
    """Its import takes longer than everything else before the first step."""
    rows = table(tmp_path / "rows.csv", "ab" * 9)
    code = (
        "import sys, malmoi\n"
        f"rows = {str(rows)!r}\n"
        f"malmoi.finetune({str(bert)!r}, 'classification', rows, {str(tmp_path / 'o')!r}, rows,"
        " steps=1, device='cpu')\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
