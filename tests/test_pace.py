"""A budget in minutes means useful updates: the clock, the warm-up, the batch, and what is said about them."""

import json
from pathlib import Path

import pytest

from malmoi.train import RECIPES, resolve
from malmoi.train.log import plural, read_rows
from malmoi.train.pace import SMALLEST_BATCH, Pace, WorkClock
from malmoi.train.recipe import TrainConfig
from malmoi.train.schedule import rate, warmup_steps
from malmoi.train.trainer import Budget
from tiny_runs import KINDS, train, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


# ---- warm-up


@pytest.mark.parametrize(
    ("name", "updates"),
    [("bert-base", 10_000), ("bert-tiny", 10_000), ("gpt1", 2_000), ("gpt2-small", 191)],
)
def test_the_papers_warm_up_is_untouched_at_the_papers_length(name: str, updates: int) -> None:
    recipe = RECIPES[name]()
    steps, c = Budget.of(recipe).steps, recipe.train
    shares = [rate(step, step / steps, c, steps) for step in (0, updates // 2, updates - 1, updates)]
    assert shares[0] <= 1e-3
    assert shares[1] == pytest.approx(0.5, abs=0.01)
    assert shares[2] < shares[3] + 1e-6
    assert shares[3] == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("steps", [12, 50, 100, 400, 1000])
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-small", "gpt-char", "gpt2-small-fast"])
def test_a_short_run_reaches_its_rate(name: str, steps: int) -> None:
    c = RECIPES[name]().train
    shares = [rate(step, step / steps, c, steps) for step in range(steps)]
    assert max(shares) > 0.97
    assert shares.index(max(shares)) <= 0.1 * steps + 1


def test_a_guess_that_was_too_high_does_not_keep_the_rate_low() -> None:
    c = TrainConfig(minutes=1, warmup=0.0, warmup_steps=100, schedule="constant")
    assert warmup_steps(c, 300) == pytest.approx(30)
    assert rate(10, 0.5, c, 300) == 1.0  # half of the time is gone after 10 steps of 300


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


def test_a_machine_that_becomes_slow_is_believed() -> None:
    hands = Hands()
    clock = WorkClock(now=hands)
    for seconds in [1.0] * 40 + [20.0] * 40:
        hands.step(clock, seconds)
    assert clock.usual_step == 20.0
    assert clock.seconds > 39 + 20 * 20


# ---- the batch


PHASES = ((128, 0.9), (512, 0.1))


def test_a_batch_that_fits_gives_useful_updates() -> None:
    pace = Pace(optimizer=0.01, sequence=0.05, seconds=180.0, phases=PHASES)
    assert pace.updates(256) == pytest.approx(13, abs=1)
    batch = pace.fitting(256)
    assert (batch, pace.updates(batch) >= 200) == (8, True)
    said = pace.sentence("bert-tiny", 256, batch)
    assert (
        said == f"bert-tiny's batch of 256 would give 13 updates in 3 minutes here; using 8: about {pace.updates(8)}."
    )
    assert Pace(0.001, 0.0001, 180.0, PHASES).fitting(256) == 256
    assert Pace(0.001, 0.0001, 180.0, PHASES).sentence("x", 256, 256) == ""


def test_the_batch_divides_over_its_processes_and_is_no_smaller_than_eight() -> None:
    slow = Pace(1.0, 1.0, 60.0, PHASES)
    assert slow.fitting(256) == SMALLEST_BATCH
    assert Pace(1.0, 1.0, 60.0, PHASES, world=4).fitting(48) == 12
    assert slow.fitting(4) == 4
    said = slow.sentence("bert-tiny", 256, 8)
    assert "1 update in 1 minute here" in said
    assert "give --minutes" in said


def test_a_batch_that_a_user_named_is_kept_and_told() -> None:
    pace = Pace(0.01, 0.05, 180.0, PHASES)
    assert pace.sentence("bert-tiny", 32, 32) == (
        f"About {pace.updates(32)} updates of 32 sequences fit into 3 minutes here. "
        f"--set train.batch=8 would give about {pace.updates(8)}."
    )
    assert resolve("bert-tiny", {"minutes": 3}).train.fit_batch
    assert not resolve("bert-tiny", {"minutes": 3, "batch": 256}).train.fit_batch
    assert not resolve(RECIPES["bert-tiny"](), {"minutes": 3}).train.fit_batch


@pytest.mark.parametrize(("count", "said"), [(1, "1 step"), (0.5, "0.5 steps"), (2000, "2,000 steps")])
def test_plurals(count: float, said: str) -> None:
    assert plural(count, "step") == said


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence takes long enough that the recipe's batch gives few updates; nothing waits for it."""
    monkeypatch.setattr("malmoi.train.trainer.Trainer._timed_pass", lambda self, size: 0.002 * size)
    monkeypatch.setattr("malmoi.train.trainer.Trainer._timed_update", lambda self: 0.001)


@pytest.mark.usefixtures("slow_machine")
def test_a_run_takes_the_batch_that_fits_and_keeps_it(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {name: value for name, value in KINDS["gpt"][1].items() if name != "train.batch"}

    def go(**changes: float) -> int:
        from malmoi.train import pretrain

        pretrain("gpt2-small", data=str(corpus), out=tmp_path / "run", device="cpu", **{**settings, **changes})
        return int(json.loads((tmp_path / "run" / "recipe.json").read_text())["train"]["batch"])

    assert go(minutes=0.02) == SMALLEST_BATCH
    assert (
        "gpt2-small's batch of 512 would give 1 update in 0.02 minutes here; using 8: about" in capsys.readouterr().err
    )
    before = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert go(steps=before + 2) == SMALLEST_BATCH
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == before + 2
    assert "other settings" not in capsys.readouterr().err


def test_a_run_of_minutes_is_measured_and_ends_at_its_whole_budget(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured leaves no trace in the weights, and the state knows what was expected."""
    train("gpt", corpus, tmp_path / "minutes", minutes=0.01)
    said = capsys.readouterr().err
    assert "Measuring a step" in said
    assert "aking the first step" in said
    assert "100%" in said
    states = (tmp_path / "minutes" / "train_state").glob("step-*/state.json")
    position = max((json.loads(path.read_text())["position"] for path in states), key=lambda p: p["step"])
    assert position["expected"] > 0
    assert position["threads"] >= 1
    train("gpt", corpus, tmp_path / "steps", steps=3, **{"train.warmup_steps": 1, "train.schedule": "constant"})
    again = {"train.warmup_steps": 1, "train.schedule": "constant", "minutes": 0.0005}
    train("gpt", corpus, tmp_path / "again", **again)
    rows = [read_rows(tmp_path / name / "metrics.jsonl") for name in ("steps", "again")]
    assert rows[0][0]["loss"] == rows[1][0]["loss"]
