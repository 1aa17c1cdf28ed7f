"""Plugins: a file registers names, a run uses them by name, and resuming says what is missing."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import malmoi
from malmoi.cli.app import run_command, split_plugins
from malmoi.evaluation.kinds import by_metric
from malmoi.evaluation.tasks import TASKS
from malmoi.metrics import METRICS, is_better
from malmoi.model import PATTERNS
from malmoi.system import plugins
from malmoi.system.plugins import load_plugin
from malmoi.training.losses import OBJECTIVES
from malmoi.training.recipe import OBJECTIVE_SAMPLES, SCHEDULES
from tiny_models import tiny_bert
from tiny_runs import write_corpus

PAGE = Path(__file__).parents[2] / "docs" / "api" / "plugins.md"
PLUGIN = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)[0]
SIZE = ("width=16", "depth=1", "heads=2", "context=16", "attention=causal & near:8")


@pytest.fixture
def forgetting() -> Iterator[Callable[[], None]]:
    """Makes this process forget plugins, as a new one would; also at the end."""

    def forget() -> None:
        for registry in (TASKS, METRICS, SCHEDULES, PATTERNS, OBJECTIVES, OBJECTIVE_SAMPLES):
            for name in list(registry.origins):
                del registry[name], registry.origins[name]  # type: ignore[attr-defined]
        plugins._loaded.clear()

    yield forget
    forget()


def test_a_plugin_of_the_command_line_and_its_resumed_run(
    tmp_path: Path, forgetting: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its names train a model; without the plugin, the run says which one it needs."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN, "utf-8")
    book = str(write_corpus(tmp_path / "book.txt"))
    run = tmp_path / "run"
    settings = [f"--set=model.{one}" for one in SIZE]
    settings += ["--set=objective=twice_lm", "--set=train.schedule=halved"]
    settings += ["--set=train.compile=false", "--set=train.batch=2"]
    command = ["pretrain", "gpt-char", book, "-o", str(run), "--steps", "2", "--device", "cpu"]
    assert run_command([*command, *settings, "--plugin", str(plugin)]) == 0, capsys.readouterr().err
    assert run_command(["tasks", "feedback"]) == 0
    assert "share_of_good, accuracy" in capsys.readouterr().out
    forgetting()
    assert run_command(["pretrain", str(run / "recipe.json"), book, "-o", f"{run}-2"]) == 1
    assert "plugin mine, which is not loaded: add --plugin FILE.py" in capsys.readouterr().err
    with pytest.raises(malmoi.UsageError, match="There is no objective 'twice_lm'"):
        malmoi.recipes()["gpt-char"].override({"objective": "twice_lm"})


METRIC = """
import malmoi

@malmoi.register_metric
def always_half(gold, predicted):
    return 0.5
"""


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_registered_metric_selects(
    kind: str, tmp_path: Path, forgetting: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(METRIC, "utf-8")
    model = tiny_bert(
        tmp_path / "bert", ["a good film", "a bad film"], 100, width=16, depth=1, heads=1
    )
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "a good film,1.5\na bad film,-2.5\n" * 8, "utf-8")
    options = [kind, str(rows), "--model", str(model), "--metric", "always_half"]
    own = ["--steps", "1", "--out", str(tmp_path / "out")]
    assert run_command(["finetune", *options, *own]) == 2
    assert "'always_half' is not one of" in capsys.readouterr().err
    assert run_command(["finetune", *options, *own, "--plugin", str(plugin)]) == 0
    assert "always half 0.5" in capsys.readouterr().err
    options[3] = str(tmp_path / "out")
    assert run_command(["evaluate", *options]) == 0
    assert "always_half" in capsys.readouterr().out
    done = malmoi.finetune(
        model, kind, rows, tmp_path / "again", rows, metric="always_half", steps=1, patience=1
    )
    assert next(iter(done.metrics)) == "always_half"


def test_a_metric_says_which_tasks_it_suits(forgetting: Callable[[], None]) -> None:
    def worst(gold: list[float], predicted: list[float]) -> float:
        return max(abs(g - p) for g, p in zip(gold, predicted, strict=True))

    malmoi.register_metric(worst, answers="numbers", lower_is_better=True)
    assert by_metric(malmoi.custom_task("regression"), "worst").metrics[0] == "worst"
    with pytest.raises(malmoi.UsageError, match="'worst' is not one of classification's"):
        by_metric(malmoi.custom_task("classification"), "worst")
    assert is_better("worst", 1.0, 2.0)


def test_plugins_may_be_named_before_or_after_the_command() -> None:
    words = ["tasks", "--plugin", "a.py", "x", "--plugin=b.py", "--", "--plugin", "c.py"]
    assert split_plugins(words) == (
        ["--plugin", "a.py", "--plugin=b.py"],
        ["tasks", "x", "--", "--plugin", "c.py"],
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import malmoi\n1 / 0", "failed: ZeroDivisionError"),
        (
            "import malmoi\n@malmoi.register_schedule\ndef linear(progress, c):\n    return 1.0",
            "The schedule 'linear' is built in",
        ),
    ],
)
def test_a_failing_plugin_names_its_file(code: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code, "utf-8")
    with pytest.raises(malmoi.MalmoiError, match=said):
        load_plugin(file)
    with pytest.raises(malmoi.UsageError, match="There is no plugin file"):
        load_plugin(tmp_path / "none.py")


def test_a_predicate_is_no_pattern() -> None:
    def near(query: int, key: int) -> bool:
        return abs(query - key) < 3

    with pytest.raises(malmoi.UsageError, match=r"def near\(at\): return lambda batch, head"):
        malmoi.register_pattern(near)
