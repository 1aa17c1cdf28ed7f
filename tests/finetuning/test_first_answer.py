"""A run without a budget: a first answer, a limit in minutes, and the better model is kept."""

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import malmoi
from malmoi.cli import run_command
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import KINDS, HeadKind, custom_task, head_kind
from malmoi.finetuning import finetune as defaults
from malmoi.finetuning.candidates import Tried
from malmoi.finetuning.config import FEATURE_DEFAULTS, FinetuneConfig
from malmoi.finetuning.few_labels import CONTRAST_DEFAULTS, LOSSES, fit_head
from malmoi.finetuning.run import fitting_length
from malmoi.inference.predictors import LABEL_SET, NUMBER
from malmoi.model import Network, preset
from malmoi.settings import settings_of
from malmoi.system.machine import parse_machine, pretend
from malmoi.system.progress import Progress
from malmoi.training.signals import Stopped
from tiny_models import tiny_bert

WORDS = ["good", "fine", "bad", "poor", "film", "plot", "it", "was", "dull"]


@pytest.fixture(autouse=True)
def plain_processor() -> Iterator[None]:
    """Little of what random weights tell is left in bf16, which is not used even where it is."""
    with pretend(parse_machine("no-bf16")):
        yield


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(context=16, width=16, depth=2, heads=2, dropout=0.1)
    return tiny_bert(tmp_path_factory.mktemp("bert"), [" ".join(WORDS)] * 3, 60, seed=5, **sizes)


def reviews(count: int, *, wrong: bool = False) -> list[dict[str, str]]:
    """Words at random, labelled by whether they praise; or all labels wrong."""
    chance = random.Random(count)
    texts = [chance.choices(WORDS, k=6) for _ in range(count)]
    praise = [("good" in text or "fine" in text) != wrong for text in texts]
    return [
        {"text": " ".join(text), "label": "yes" if yes else "no"}
        for text, yes in zip(texts, praise, strict=True)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return malmoi.load(folder).network.state_dict()


def equal(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def when(verb: str, count: int, then: Callable[[], None]) -> Callable[[Progress], None]:
    """A progress callback that acts at the n-th event of this verb; judging is predicting, too."""
    seen: list[Progress] = []

    def callback(event: Progress) -> None:
        judges = event.verb == "predict" and event.total == JUDGED
        seen.extend([event] if ("judge" if judges else event.verb) == verb else [])
        if len(seen) == count and event is seen[-1]:
            then()

    return callback


interrupt = partial(os.kill, os.getpid(), signal.SIGINT)


# ------------------------------------------------------------------ the limit


def test_the_default_limit_ends_a_run_and_says_what_more_time_would_hold(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(defaults.MINUTES, "cpu", 0.005)  # 0.3 s
    rows = [{"words": ["Alice", "sat"], "tags": ["B-PER", "O"]}] * 400  # no linear layer for tags
    done = malmoi.finetune(
        bert, "tagging", rows, tmp_path / "o", text="words", label="tags", device="cpu"
    )
    assert 0 < done.steps < 20 * 360 / 16
    assert "20 epochs, at most 0.005 minutes" in caplog.text
    assert re.search(r"0.005 minutes ended it after \S+ of 20 epochs; --minutes 0.025", caplog.text)
    assert "with the model frozen" not in caplog.text
    assert malmoi.load(tmp_path / "o").predict("Alice sat") is not None


def test_a_run_that_fits_is_the_same_with_a_limit_and_without(bert: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"epochs": 2, "lr": 1e-3, "device": "cpu"}
    for name, more in (("free", {}), ("limited", {"max_minutes": 60.0})):
        malmoi.finetune(
            bert, "classification", reviews(100), tmp_path / name, reviews(40), **how, **more
        )
    assert equal(tmp_path / "free", tmp_path / "limited")


def test_a_given_budget_has_neither_a_limit_nor_a_first_answer(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = malmoi.finetune(
        bert, "classification", reviews(600), tmp_path / "o", steps=2, device="cpu"
    )
    assert done.protocol.selected_on == 0
    assert "at most" not in caplog.text
    assert "with the model frozen" not in caplog.text
    with pytest.raises(UsageError, match="frozen_first needs one run of full fine-tuning"):
        malmoi.finetune(
            bert, "classification", reviews(9), tmp_path / "x", frozen_first=True, seeds=2
        )


# ------------------------------------------------------------------ the first answer


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_the_first_answer_is_judged_on_held_out_rows_and_loads(
    kind: str, bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[dict[str, Any]] = list(reviews(600))
    for row in rows:
        if kind == "multilabel":
            row["label"] = [word for word in ("good", "bad") if word in row["text"]]
        elif kind == "regression":
            row["label"] = row["text"].count("good") - 0.5 * row["text"].count("bad")
    settings: dict[str, Any] = {"steps": 1, "lr": 1e-9, "frozen_first": True, "max_minutes": 60.0}
    done = malmoi.finetune(bert, kind, rows, tmp_path / "o", device="cpu", **settings)
    assert "frozen or fine-tuned" in done.protocol.selects
    assert re.search(r"After \d+ s: .* on 60 evaluation rows with the model frozen", caplog.text)
    # one update of a new layer teaches nothing: the frozen model is the result
    assert "On held-out rows the frozen model is better: it is the result." in caplog.text
    assert next(iter(done.metrics.values())) > 0.95
    loaded = malmoi.load(tmp_path / "o")
    start = malmoi.load(bert).network.trunk.state_dict()
    same = loaded.network.trunk.state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in start.items())
    assert dict(malmoi.evaluate(loaded, data=rows))["examples"] == 600
    assert not (tmp_path / "o" / "train_state").exists()


def test_the_fine_tuned_model_is_kept_if_the_held_out_rows_prefer_it(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malmoi.finetuning.run.READ_SECONDS", 0.0)
    how: dict[str, Any] = {"lr": 1e-2, "epochs": 4, "frozen_first": True, "batch": 16}
    rows = reviews(600)
    done = malmoi.finetune(bert, "classification", rows, tmp_path / "o", device="cpu", **how)
    said = re.search(r"accuracy (\S+) on .* that learnt from 16 of 486 rows", caplog.text)
    assert said is not None
    assert float(said[1]) < done.metrics["accuracy"]
    assert "the fine-tuned model is better than the frozen model: it is the result" in caplog.text
    kind = json.loads((tmp_path / "o" / "config.json").read_text("utf-8"))["architectures"]
    assert kind == ["BertForSequenceClassification"]


def test_evaluation_rows_do_not_choose_between_the_two(bert: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"frozen_first": True, "steps": 1, "lr": 1e-9, "device": "cpu"}
    for name, wrong in (("right", False), ("wrong", True)):
        dev = reviews(60, wrong=wrong)
        done = malmoi.finetune(bert, "classification", reviews(600), tmp_path / name, dev, **how)
        assert (done.metrics["accuracy"] > 0.9) is not wrong
    assert equal(tmp_path / "right", tmp_path / "wrong")


@pytest.mark.parametrize("learns", [False, True])
def test_of_few_rows_cross_validation_chooses_between_the_two(
    learns: bool,
    bert: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network that learns beside a layer that saw 16 rows; or one that learns nothing."""
    how: dict[str, Any] = {"frozen_first": True, "max_minutes": 60.0, "batch": 16, "device": "cpu"}
    how |= {"lr": 1e-2, "epochs": 8} if learns else {"lr": 1e-9, "steps": 1}
    if learns:
        monkeypatch.setattr("malmoi.finetuning.run.READ_SECONDS", 0.0)
    out = tmp_path / "o"
    rows = reviews(300)
    # rows whose labels are all wrong: were they asked, the other model would be chosen
    done = malmoi.finetune(bert, "classification", rows, out, reviews(60, wrong=True), **how)
    assert done.protocol.selected_on == 0
    compared = [line for line in caplog.messages if "that neither learnt from" in line]
    assert [re.search(r"on (\d+) rows", line)[1] for line in compared] == (  # type: ignore[index]
        ["100", "200", "300"] if learns else ["100"]  # dropped after the first fold
    )
    chosen = "all rows are fine-tuned on next." if learns else "the frozen model is the result."
    assert compared[-1].endswith(chosen)
    assert (done.steps > 0) is learns
    assert dict(malmoi.evaluate(out, data=rows))["accuracy"] > 0.9
    kind = json.loads((out / "config.json").read_text("utf-8")).get("architectures")
    assert (kind == ["BertForSequenceClassification"]) is learns
    assert not (out / "train_state").exists()


# ------------------------------------------------------------------ stopping


JUDGED = 60  # rows, held out or of the evaluation
LONG: dict[str, Any] = {"epochs": 1, "lr": 1e-3, "max_minutes": 60.0, "frozen_first": True}


@pytest.fixture(scope="module")
def uninterrupted(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("whole")
    with pretend(parse_machine("no-bf16")):
        return malmoi.finetune(
            bert, "classification", reviews(600), out, reviews(JUDGED), device="cpu", **LONG
        )


@pytest.mark.parametrize(
    ("verb", "count"), [("predict", 1), ("judge", 1), ("finetune", 1), ("finetune", 20)]
)
def test_ctrl_c_leaves_a_model_and_the_run_resumes_bit_equal(
    verb: str, count: int, bert: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    """While the rows are read, while it is judged, after the first step, and later."""
    how = LONG
    rows, dev = reviews(600), reviews(JUDGED)
    done, cut = uninterrupted, tmp_path / "cut"
    task = "classification"
    stop = when(verb, count, interrupt)
    with pytest.raises(Stopped):
        malmoi.finetune(bert, task, rows, cut, dev, device="cpu", progress=stop, **how)
    found = dict(malmoi.evaluate(cut, data=dev))["accuracy"]
    assert found > (0.9 if (verb, count) != ("predict", 1) else 0.5)  # of the first few rows
    again = malmoi.finetune(bert, task, rows, cut, dev, device="cpu", **how)
    assert (again.metrics, again.steps) == (done.metrics, done.steps)
    assert equal(done.out, cut)


# ------------------------------------------------------------------ the linear layer


@pytest.mark.parametrize("output", [NUMBER, LABEL_SET])
@pytest.mark.parametrize(
    "width", [16, 128]
)  # of more numbers than rows it is solved in their space
def test_the_layer_is_that_of_scikit_learn(width: int, output: Any) -> None:
    chance = np.random.default_rng(0)
    x = chance.normal(size=(80, width)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1).mean()
    labels = 1 if output is NUMBER else 3
    y = x @ chance.normal(size=(width, labels)) + 0.3 + 0.1 * chance.normal(size=(80, labels))
    config = preset("bert-tiny", vocab=20, context=16, width=width, heads=2, depth=1, pooler="none")
    network = Network(config, {"classify": labels})
    gold = torch.tensor(y[:, 0]) if output is NUMBER else torch.tensor(y > 0).double()
    fit_head(network, torch.tensor(x).double(), gold, LOSSES[output], ridge=1e-2)
    head = network.heads["classify"].get_submodule("linear")
    ours = head.get_parameter("weight").detach().numpy()
    if output is NUMBER:
        theirs = Ridge(alpha=1e-2 * len(x)).fit(x, y[:, 0]).coef_[None]
    else:  # the mean is over the labels too
        c = 1 / (2 * 1e-2 * len(x) * labels)
        fits = [LogisticRegression(C=c, tol=1e-8).fit(x, y[:, i] > 0) for i in range(labels)]
        theirs = np.concatenate([fit.coef_ for fit in fits])
    assert abs(ours - theirs).max() < 1e-3 * abs(theirs).max()


# ------------------------------------------------------------------ what help says


def test_help_says_the_defaults_that_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    tables = (*defaults.BY_ROWS, *defaults.WRITING_BY_ROWS)
    kinds = [kind.defaults for kind in KINDS.values() if isinstance(kind, HeadKind)]
    others = [FinetuneConfig().to_dict(), FEATURE_DEFAULTS, CONTRAST_DEFAULTS, *kinds]
    used = {
        "epochs": [*(row[1] for row in tables), *(o["epochs"] for o in others if "epochs" in o)],
        "batch": [*(row[2] for row in tables), *(o["batch"] for o in others if "batch" in o)],
    }
    assert run_command(["finetune", "--help"]) == 0
    help_ = " ".join(capsys.readouterr().out.replace("│", " ").split())
    known = settings_of(FinetuneConfig)
    for name, values in used.items():
        bounds = f"{min(values):g}–{max(values):g}"
        assert f"[default: {bounds} by rows" in help_
        assert known[name].shown.startswith(f"{bounds} by rows")
    minutes, gpu = (f"{defaults.MINUTES[kind]:g}" for kind in ("cpu", "cuda"))
    limit = f"ended after {minutes} minutes, on a GPU {gpu}"
    assert limit in help_
    assert limit in known["epochs"].shown
    assert "5e-05" not in help_


@pytest.mark.parametrize(
    ("per_row", "changes", "length"),
    [(0.01, {}, 0), (0.1, {}, 192), (9.0, {}, 64), (0.1, {"length": 512}, 0)],
)
def test_rows_are_cut_until_two_epochs_fit(
    per_row: float, changes: dict[str, int], length: int
) -> None:
    """1,000 rows of 500 tokens at 0.1 s a reading: two epochs of 600 s in four minutes."""
    tried = Tried(name="frozen", value=0.8, seconds=25.0, per_row=per_row)
    items: Any = [SimpleNamespace(length=500)] * 1000
    settings = FinetuneConfig(max_minutes=4.0, **changes)
    assert fitting_length(tried, settings, items) == length


@pytest.mark.parametrize(
    ("rows", "given", "first"),
    [(200, {}, True), (201, {}, False), (200, {"epochs": 3.0}, False), (200, {"seeds": 2}, False)],
)
def test_a_gpu_begins_with_a_frozen_model_if_rows_are_few(
    rows: int, given: dict[str, Any], first: bool
) -> None:
    task = custom_task("classification")
    settings = defaults.default_budget(FinetuneConfig(**given), given, head_kind(task), "cuda")
    assert not settings.frozen_first
    work: Any = SimpleNamespace(task=task, train=range(rows))
    assert defaults.frozen_if_few(settings, given, work).frozen_first == first
