"""The examples run as they stand, smaller where they say how; so do the playbooks' snippets."""

import ast
import json
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import malmoi
from malmoi.text.sources import sotu_messages
from test_readme import blocks
from tiny_models import tiny_bert

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "custom_task.py"


def run(*arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_custom_task_of_public_names_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        node.attr
        for node in ast.walk(ast.parse(EXAMPLE.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        if isinstance(node.value, ast.Name) and node.value.id == "malmoi"
    }
    assert names == {"pretrain", "custom_task", "finetune", "evaluate", "predict"}
    few = list(islice(sotu_messages(), 3))
    monkeypatch.setattr("malmoi.text.sources.sotu_messages", lambda: iter(few))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path), "2"])
    runpy.run_path(str(EXAMPLE))
    assert "'accuracy': " in capsys.readouterr().out
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "delivery", "1": "praise", "2": "refund"}


def test_the_worker_of_the_ray_example_labels_a_batch(tmp_path: Path) -> None:
    """Ray itself hands over batches of NumPy arrays, and takes them back."""
    texts = ["the state of the union", "a small model of words"]
    two: Any = dict(heads_of={"classify": 2}, labels=("no", "yes"), init_std=0.3)
    model = tiny_bert(tmp_path / "model", texts * 4, 120, width=32, depth=2, heads=2, **two)
    worker = runpy.run_path(str(ROOT / "examples" / "ray_predict.py"))["Labels"](str(model), "body")
    found = worker({"body": np.array(texts, object), "id": np.arange(2)})
    alone = malmoi.load(model).predict(texts, malmoi.Prediction)
    assert found["prediction"] == [one.label for one in alone]
    assert found["score"] == [max(one.scores.values()) for one in alone]
    assert list(found) == ["body", "id", "prediction", "score"]


@pytest.mark.heavy
def test_digits_are_read_far_above_chance(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the images are scikit-learn's")
    said = run(ROOT / "examples" / "digits.py", tmp_path, "100")
    assert float(said.split("accuracy ")[1].split()[0]) > 0.8


def test_the_playbooks_snippets_run() -> None:
    """In a process of its own: what they register stays there."""
    pages = [*blocks("CONTRIBUTING.md", "python"), *blocks("docs/newcomers.md", "python")]
    code = [block for block in pages if "pretrain(" not in block]
    run("-c", "\n".join(f"exec({block!r}, {{}})" for block in code))
