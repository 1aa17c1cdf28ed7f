"""Plugins: a file registers names, a run uses them by name, and resuming says what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

import malmoi
from malmoi.cli.app import plugins_first
from malmoi.system.plugins import load_plugin
from tiny_runs import write_corpus

PLUGIN = """
import malmoi
from malmoi.model.patterns import local
from malmoi.training.losses import Objective, Term, lm


@malmoi.register_objective(samples="lm")
def twice_lm() -> Objective:
    return 2.0 * lm()


@malmoi.register_schedule
def halved(progress: float, config: object) -> float:
    return 1 - progress / 2


@malmoi.register_pattern
def near(at, window: int):
    return local(at, window)


@malmoi.register_metric
def share_of_good(gold, predicted):
    return sum(label == "good" for label in predicted) / len(predicted)


malmoi.register_task(
    malmoi.Task(
        "feedback",
        "classification",
        malmoi.custom_task("classification").rows,
        malmoi.custom_task("classification", text="message", label="mood").example,
        metrics=("share_of_good", "accuracy"),
    )
)
"""
SIZE = ("width=16", "depth=1", "heads=2", "context=16", "attention=causal & near:8")


def test_a_plugin_of_the_command_line_and_its_resumed_run(tmp_path: Path) -> None:
    """A process trains with the plugin's names; here, without the plugin, the run names it."""
    (tmp_path / "mine.py").write_text(PLUGIN, "utf-8")
    write_corpus(tmp_path / "book.txt")
    settings = [f"--set=model.{one}" for one in SIZE]
    settings += [
        "--set=objective=twice_lm",
        "--set=train.schedule=halved",
        "--set=train.compile=false",
    ]
    run = ["pretrain", "gpt-char", "book.txt", "-o", "run", "--steps", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "malmoi", *run, *settings, "--plugin", "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    recipe = (tmp_path / "run" / "recipe.json").read_text("utf-8")
    with pytest.raises(malmoi.UsageError, match=r"uses the plugin mine, .* add --plugin FILE\.py"):
        malmoi.Recipe.from_json(recipe)
    with pytest.raises(malmoi.UsageError, match="There is no objective 'twice_lm'"):
        malmoi.recipes()["gpt-char"].override({"objective": "twice_lm"})


def test_plugins_may_be_named_before_or_after_the_command() -> None:
    words = ["tasks", "--plugin", "a.py", "x", "--plugin=b.py", "--", "--plugin", "c.py"]
    assert plugins_first(words) == [
        *("--plugin", "a.py", "--plugin=b.py", "tasks", "x"),
        *("--", "--plugin", "c.py"),
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import malmoi\n1 / 0", "failed: ZeroDivisionError"),
        (
            "import malmoi\n@malmoi.register_schedule\ndef linear(progress, c):\n    return 1.0",
            "Malmoi itself has the schedule 'linear'",
        ),
    ],
)
def test_a_plugin_that_fails_says_where(code: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code, "utf-8")
    with pytest.raises(malmoi.MalmoiError, match=said):
        load_plugin(file)
    with pytest.raises(malmoi.UsageError, match="There is no plugin file"):
        load_plugin(tmp_path / "none.py")
