"""A budget in minutes means useful updates: the clock, the warm-up, the batch, and what is said
about them.
"""

import html
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from malmoi import pretrain
from malmoi.errors import UsageError
from malmoi.messages import plural
from malmoi.system.machine import Accelerator, Machine, detect, pick_device, pretend, this_machine
from malmoi.system.progress import Progress, listening
from malmoi.system.run_folder import read_metrics
from malmoi.training.budget import SMALLEST_BATCH, Budget, Pace, WorkClock, estimate_run, verdict
from malmoi.training.device import choose_execution
from malmoi.training.recipe import TrainConfig, rate_at, warmup_steps
from malmoi.training.recipes import RECIPES, resolve_recipe
from malmoi.training.signals import Stopped
from malmoi.training.trainer import Trainer
from tiny_runs import KINDS, assert_equal_weights, signalled, train, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


# ---- warm-up


@pytest.mark.parametrize(
    ("name", "updates"), [("bert-base", 10_000), ("bert-tiny", 10_000), ("gpt2-small", 191)]
)
def test_the_papers_warm_up_is_untouched_at_the_papers_length(name: str, updates: int) -> None:
    recipe = RECIPES[name]()
    steps, c = Budget.of(recipe).steps, recipe.train
    shares = [
        rate_at(step, step / steps, c, steps) for step in (0, updates // 2, updates - 1, updates)
    ]
    assert shares[0] <= 1e-3
    assert shares[1] == pytest.approx(0.5, abs=0.01)
    assert shares[2] < shares[3] + 1e-6
    assert shares[3] == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("steps", [12, 50, 100, 400, 1000])
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-small", "gpt-char", "gpt2-small-fast"])
def test_a_short_run_reaches_its_rate(name: str, steps: int) -> None:
    c = RECIPES[name]().train
    shares = [rate_at(step, step / steps, c, steps) for step in range(steps)]
    assert max(shares) > 0.97
    assert shares.index(max(shares)) <= 0.1 * steps + 1


def test_a_guess_that_was_too_high_does_not_keep_the_rate_low() -> None:
    c = TrainConfig(minutes=1, warmup=0.0, warmup_steps=100, schedule="constant")
    assert warmup_steps(c, 300) == pytest.approx(30)
    assert rate_at(10, 0.5, c, 300) == 1.0  # half of the time is gone after 10 steps of 300


# ---- the clock


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def step(self, clock: WorkClock, seconds: float) -> None:
        self.now += seconds
        clock.step()
        clock.lap()


def test_the_first_step_is_free_and_sleep_does_not_count() -> None:
    hands = Hands()
    clock = WorkClock(10.0, now=hands)
    hands.step(clock, 80.0)  # compiling
    assert clock.seconds == 10.0
    for _ in range(5):
        hands.step(clock, 2.0)
    assert clock.seconds == 20.0
    hands.step(clock, 3600.0)  # the lid was closed
    assert clock.seconds == 22.0
    hands.step(clock, 9.0)  # a slow one is still work
    assert clock.seconds == 31.0
    hands.now += 4.0
    clock.lap("validation")
    assert clock.seconds == 35.0
    assert clock.usual_step == 2.0


def test_steps_that_a_gpu_has_not_finished_count_until_they_are_looked_at() -> None:
    hands = Hands()
    clock = WorkClock(now=hands)
    hands.step(clock, 5.0)
    for _ in range(3):
        for _ in range(10):
            hands.now += 0.001
            clock.step()
        hands.now += 9.99
        assert clock.seconds > 9.0
        clock.lap()
    assert clock.seconds == pytest.approx(30.0)


def test_a_slower_machine_is_measured_again() -> None:
    hands = Hands()
    clock = WorkClock(now=hands)
    for seconds in [1.0] * 40 + [20.0] * 40:
        hands.step(clock, seconds)
    assert clock.usual_step == 20.0
    assert clock.seconds > 39 + 20 * 20


# ---- the batch


def paced(
    optimizer: float, sequence: float, seconds: float, name: str = "bert-tiny", world: int = 1
) -> Pace:
    return Pace(optimizer, sequence, RECIPES[name](), Budget(0, seconds=seconds), world)


def test_a_batch_that_fits_gives_useful_updates() -> None:
    pace = paced(0.01, 0.05, 180.0)
    assert pace.updates(256) == pytest.approx(13, abs=1)
    batch = pace.fitting(256)
    assert (batch, pace.updates(batch) >= 200) == (8, True)
    said = pace.sentence(256, batch)
    assert said == (
        f"bert-tiny's batch of 256 would give 13 updates in your 3 minutes; using 8: about "
        f"{pace.updates(8)}."
    )
    assert paced(0.001, 0.0001, 180.0).fitting(256) == 256
    fast = paced(0.001, 0.0001, 180.0)
    steps = fast.updates(256)
    assert fast.sentence(256, 256) == (
        f"{180 / steps:.2g} s per step: about {steps:,} steps in your 3 minutes."
    )


def test_a_paper_in_too_few_minutes_points_to_a_size_that_learns() -> None:
    pace = paced(0.1, 1.0, 60.0, "bert-base")
    said = pace.sentence(8, 8)
    assert "too few to learn much" in said
    assert "let `malmoi pretrain bert` choose a size that can learn in 1 minute." in said
    hours = paced(1.0, 100.0, 60.0, "gpt").sentence(8, 8)
    assert hours.endswith(
        "about 1 step in your 1 minute. That is too few to learn much: use --minutes 4005."
    )


def test_the_batch_divides_over_its_processes_and_is_no_smaller_than_eight() -> None:
    slow = paced(1.0, 1.0, 60.0)
    assert slow.fitting(256) == SMALLEST_BATCH
    assert paced(1.0, 1.0, 60.0, world=4).fitting(48) == 12
    assert slow.fitting(4) == 4
    assert paced(1.0, 1.0, 60.0, "transformer-tiny").fitting(4) == 1
    said = slow.sentence(256, 8)
    assert "1 update in your 1 minute" in said
    assert "use --minutes" in said


def test_a_batch_set_by_the_user_is_kept_and_reported() -> None:
    pace = paced(0.01, 0.05, 180.0)
    assert pace.sentence(32, 32) == (
        f"{pace.expectation(32)} A batch of 8 (--set train.batch=8): about {pace.updates(8)}."
    )
    assert resolve_recipe("bert-tiny", {"minutes": 3}).train.fit_batch
    assert not resolve_recipe("bert-tiny", {"minutes": 3, "batch": 256}).train.fit_batch
    assert not resolve_recipe(RECIPES["bert-tiny"](), {"minutes": 3}).train.fit_batch


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 step"), (0.5, "0.5 steps"), (2000, "2,000 steps")]
)
def test_plurals(count: float, said: str) -> None:
    assert plural(count, "step") == said


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence takes long enough that the recipe's batch gives few updates; nothing waits for
    it.
    """
    monkeypatch.setattr("malmoi.training.trainer.step_seconds", lambda *_, compiled: (0.001, 0.002))


@pytest.mark.usefixtures("slow_machine")
def test_a_run_takes_the_batch_that_fits_and_keeps_it(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {name: value for name, value in KINDS["gpt"][1].items() if name != "train.batch"}

    def go(**changes: float) -> int:
        pretrain(
            "gpt2-small",
            data=str(corpus),
            out=tmp_path / "run",
            device="cpu",
            **{**settings, **changes},
        )
        return int(json.loads((tmp_path / "run" / "recipe.json").read_text())["train"]["batch"])

    assert go(minutes=0.02) == SMALLEST_BATCH
    assert (
        "gpt2-small's batch of 512 would give 1 update in your 0.02 minutes; using 8: about"
        in caplog.text
    )
    before = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert go(steps=before + 2) == SMALLEST_BATCH
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == before + 2
    assert "has used its budget" not in caplog.text
    go(steps=before + 1)
    assert f"has used its budget ({before + 2} steps, " in caplog.text
    assert "a larger --steps (steps=…)" in caplog.text
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == before + 2
    assert "holds another" not in caplog.text


def test_a_run_of_minutes_is_measured_and_ends_at_its_whole_budget(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was measured leaves no trace in the weights, and the state knows what was expected."""
    events: list[Progress] = []
    with listening(events.append):
        train("gpt", corpus, tmp_path / "minutes", minutes=0.01)
    said = caplog.text
    assert "Measuring a step" in said
    assert "unning the first step" in said
    assert [event for event in events if event.verb == "pretrain"][-1].share == 1
    assert position(tmp_path / "minutes")["expected"] > 0
    assert position(tmp_path / "minutes")["threads"] >= 1
    train(
        "gpt",
        corpus,
        tmp_path / "steps",
        steps=3,
        **{"train.warmup_steps": 1, "train.schedule": "constant"},
    )
    again = {"train.warmup_steps": 1, "train.schedule": "constant", "minutes": 0.0005}
    train("gpt", corpus, tmp_path / "again", **again)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("steps", "again")]
    assert rows[0][0]["loss"] == rows[1][0]["loss"]


# ---- what pays is compiled


@pytest.mark.parametrize(("compiled", "pays"), [(0.5, True), (1.0, False)])
def test_compiling_is_tried_on_a_processor_and_kept_only_where_it_pays(
    compiled: float,
    pays: bool,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[bool] = []

    def measure(*_: object, compiled: bool) -> tuple[float, float]:
        calls.append(compiled)
        return 0.0, took[compiled]

    took, executions = {False: 1000.0, True: 1000 * compiled}, []
    monkeypatch.setattr("malmoi.training.trainer.step_seconds", measure)
    monkeypatch.setattr(
        "malmoi.training.loop.compile_for",
        lambda execution, judge, **_: executions.append(execution),
    )
    machine = replace(detect(), architecture="x86_64", compiler="/usr/bin/g++")
    settings = {"train.compile": None, "train.save_every": 2}
    with pretend(machine):
        with signalled(2), pytest.raises(Stopped):
            resume_tiny(corpus, tmp_path, steps=4, **settings)
        assert "Compiling once, which takes about 20 s …" in caplog.text
        assert calls == [False, True]
        assert executions[-1].compiled is pays
        resume_tiny(corpus, tmp_path, steps=4, **settings)
    assert calls == [False, True]  # the state knows
    assert executions[-1].compiled is pays
    assert position(tmp_path)["compiled"] is pays
    calls.clear()
    took |= {False: 0.001}  # a run of seconds
    with pretend(machine):
        resume_tiny(corpus, tmp_path / "short", steps=4, **settings)
    assert calls == [False]
    assert not executions[-1].compiled


def resume_tiny(corpus: Path, out: Path, **changes: Any) -> None:
    settings = {name: value for name, value in KINDS["gpt"][1].items() if name != "train.compile"}
    changes = {name: value for name, value in changes.items() if value is not None}
    pretrain("gpt2-small", data=str(corpus), out=out, device="cpu", **{**settings, **changes})


def position(out: Path) -> dict[str, Any]:
    """What the newest state of a run says."""
    states = (
        json.loads(path.read_text())["position"]
        for path in (out / "train_state").glob("step-*/state.json")
    )
    return max(states, key=lambda found: found["step"])


def test_a_short_run_on_a_processor_does_not_compile() -> None:
    x86 = Machine(compiler="/usr/bin/g++", cores=2)
    cpu = torch.device("cpu")
    with pretend(x86):
        assert not choose_execution(cpu, TrainConfig(minutes=3)).compiled
        assert choose_execution(cpu, TrainConfig(minutes=30)).compiled
        assert choose_execution(cpu, TrainConfig(minutes=3, compile=True)).compiled
        assert not choose_execution(cpu, TrainConfig(minutes=30, compile=False)).compiled
    with pretend(replace(x86, compiler=None)):
        assert not choose_execution(cpu, TrainConfig(minutes=30)).compiled
    with pretend(replace(x86, architecture="aarch64")):
        assert not choose_execution(cpu, TrainConfig(minutes=30)).compiled


# ---- threads


def test_a_resumed_run_keeps_its_number_of_threads(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: set[int] = set()
    original = Trainer.step

    def counting(self: Trainer, micros: Any) -> Any:
        used.add(torch.get_num_threads())
        return original(self, micros)

    monkeypatch.setattr(Trainer, "step", counting)
    with pretend(replace(detect(), cores=2)), threads(2):
        train("gpt", corpus, tmp_path / "whole", steps=6)
        with signalled(3), pytest.raises(Stopped):
            train("gpt", corpus, tmp_path / "cut", steps=6)
        shutil.copytree(tmp_path / "cut", tmp_path / "elsewhere")
        assert used == {2}
        with threads(1):
            train("gpt", corpus, tmp_path / "cut", steps=6)
            assert torch.get_num_threads() == 1
        assert used == {2}
    assert_equal_weights(tmp_path / "cut", tmp_path / "whole")
    caplog.clear()
    with pretend(replace(detect(), cores=1)), threads(2):
        train("gpt", corpus, tmp_path / "elsewhere", steps=6)
    assert "This run began with 2 threads and continues with 1" in caplog.text
    assert used == {1, 2}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


# ---- questions and verdicts


def test_a_run_of_months_needs_an_explicit_budget(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = (
        r"This would take about [\d,]+ days here\. Give --minutes, --steps or --tokens, or "
        r"--set train\.steps=1000000 "
    )
    with pretend(replace(this_machine(), flops=5e10)), pytest.raises(UsageError, match=told):
        pretrain("bert-base", data=str(corpus), out=out, device="cpu")
    assert not out.exists()
    with pytest.raises(UsageError, match=r"--set train\.tokens=10000000000 for the paper's budget"):
        pretrain("gpt2-small", data=str(corpus), out=out, device="cpu")
    train("bert", corpus, out, steps=1)


def test_a_run_of_hours_that_nobody_asked_for_is_announced(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    name, settings = KINDS["bert"]
    with pretend(replace(this_machine(), flops=1e12)):
        seconds = estimate_run(resolve_recipe(name, settings), device="cpu")[1].seconds
    how = {**settings, "data": str(corpus), "device": "cpu", "progress": Progress.stop}
    with pretend(replace(this_machine(), flops=1e12 * seconds / 1800)):
        pretrain(name, out=tmp_path / "a", **how)
        said = caplog.text
        caplog.clear()
        pretrain(name, out=tmp_path / "b", steps=1, **how)
    assert re.search(rf"{name} takes about \d+ minutes here; --minutes 10 \(minutes=10\)", said)
    assert "takes about" not in caplog.text


def test_only_a_run_that_learnt_nothing_warns(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("bert", corpus, tmp_path / "short", steps=1)
    said = caplog.messages[-1]
    assert said.startswith("After 1 update: this model has learnt next to nothing (loss ")
    (last,) = [
        row for row in read_metrics(tmp_path / "short" / "metrics.jsonl") if "valid_loss" in row
    ]
    vocab = json.loads((tmp_path / "short" / "config.json").read_text())["vocab_size"]
    assert 1 < last["guessing_loss"] - math.log(2) < math.log(vocab)  # token frequencies, and NSP
    assert said in html.unescape((tmp_path / "short" / "report.html").read_text("utf-8"))
    caplog.clear()
    train("gpt", corpus, tmp_path / "long", steps=60, **{"train.lr": 2e-2})
    assert "next to nothing" not in caplog.text
    assert "guessing_loss" not in read_metrics(tmp_path / "long" / "metrics.jsonl")[-1]


def test_the_verdict_gives_advice_that_fits() -> None:
    recipe = resolve_recipe("bert-tiny", {"minutes": 2})
    assert verdict(recipe, 8, 8.985, 8.987) == (
        "Only 8 updates fitted into 2 minutes: this model has learnt next to nothing (loss 8.98; "
        "guessing by token frequency gives 8.99). "
        "Use --minutes 75 or a smaller batch (--set train.batch=8)."
    )
    assert "a lower train.lr" in verdict(recipe, 5000, 9.2, 8.987)
    few = verdict(recipe, 5000, 9.2, 8.987, epochs=0.0123)
    assert few.startswith("After 5,000 updates on 1.2% of the text: this model has learnt next")
    assert few.endswith("Train for longer (--minutes 8), or use a smaller model.")
    assert "has memorised its text (loss 1.20)" in verdict(recipe, 5000, 9.2, 8.987, training=1.2)
    sized = resolve_recipe("gpt", {"minutes": 2})
    assert verdict(sized, 100, 8.985, 8.987).endswith("Use --minutes 6.")
    assert verdict(recipe, 8, 7.9, 8.987) == ""
    assert verdict(recipe, 8, 7.9, 0.0) == ""  # a teacher's loss has no such measure


# ---- an Apple GPU


def test_an_apple_gpu_computes_in_fp32_without_compiling() -> None:
    laptop = Machine(architecture="aarch64", accelerators=(Accelerator("mps", bf16=True),))
    with pretend(laptop):
        device = pick_device()
        execution = choose_execution(device, TrainConfig(minutes=60))
    assert (execution.device.type, execution.dtype, execution.compiled) == (
        "mps",
        torch.float32,
        False,
    )
    with execution.computing():
        assert not torch.is_autocast_enabled("mps")
    assert "mps" in _get_fused_kernels_supported_devices()  # AdamW's one kernel for all weights
