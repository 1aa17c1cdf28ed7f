"""Training: schedules and optimizers to the formula, and runs that survive whatever happens to
them.
"""

import errno
import json
import lzma
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import malmoi
from conftest import typed
from malmoi import Progress
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.model import Network, initialise
from malmoi.model.families import bert
from malmoi.system.machine import parse_machine, pretend, this_machine
from malmoi.system.run_folder import read_metrics
from malmoi.training.budget import Budget
from malmoi.training.data.loader import LMBatches
from malmoi.training.data.store import Store
from malmoi.training.feed import PhaseFeed, batch_sizes
from malmoi.training.log import RunLog
from malmoi.training.optim import Muon, make_optimizers, orthogonal, set_rate
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import SCHEDULES, Recipe, TrainConfig, rate_at, read_recipe
from malmoi.training.recipes import RECIPES, resolve_recipe
from malmoi.training.signals import Stopped
from malmoi.training.state import (
    CorruptState,
    RunState,
    StateParts,
    latest_state,
    prune_states,
    read_state,
    save_state,
)
from malmoi.training.trainer import Trainer
from tiny_runs import (
    KINDS,
    STILL,
    TINY,
    assert_equal_weights,
    losses,
    signalled,
    steps_of,
    train,
    weights,
    write_corpus,
)

SCRIPT = Path(__file__).parents[1] / "tiny_runs.py"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undisturbed runs of 20 steps, dropout on."""
    folders = {kind: tmp_path_factory.mktemp("whole") / kind for kind in KINDS}
    for kind, out in folders.items():
        train(kind, corpus, out, steps=20, **{"train.save_every": 6})
    return folders


# ---- schedules, batches, optimizers


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_warms_up_and_ends_at_its_floor(name: Any) -> None:
    c = TrainConfig(schedule=name, warmup=0.1, warmup_steps=0, floor=0.1)
    shares = [rate_at(step, step / 1000, c) for step in range(1001)]
    assert shares[50] == pytest.approx(0.5 * SCHEDULES[name](0.0, c), rel=1e-3)
    assert max(shares) == pytest.approx(1.0, abs=1e-3)
    assert shares[-1] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert all(a <= b + 1e-12 for a, b in pairwise(shares[:101]))
    assert all(a >= b - 1e-12 for a, b in pairwise(shares[100:]))


def test_schedules_have_their_shapes() -> None:
    c = TrainConfig(warmup=0.0, warmup_steps=0, cooldown=0.4)
    assert rate_at(0, 0.25, replace(c, schedule="linear")) == pytest.approx(0.75)
    assert rate_at(0, 0.5, replace(c, schedule="cosine")) == pytest.approx(0.5)
    assert rate_at(0, 0.25, replace(c, schedule="cosine")) == pytest.approx(
        (1 + math.cos(math.pi / 4)) / 2
    )
    assert rate_at(0, 0.6, replace(c, schedule="wsd")) == pytest.approx(1.0)
    assert rate_at(0, 0.8, replace(c, schedule="wsd")) == pytest.approx(0.5)
    few = TrainConfig(warmup=0.0, warmup_steps=10)
    assert [rate_at(step, 0.0, few) for step in (0, 4, 9, 50)] == pytest.approx(
        [0.1, 0.5, 1.0, 1.0]
    )


def test_the_batch_grows_with_the_samples_seen() -> None:
    c = TrainConfig(batch=64, batch_start=8, batch_ramp=0.1)
    sizes = list(islice(batch_sizes(c, 0, 10_000, world=4), 120))
    seen = [sum(sizes[:i]) for i in range(len(sizes))]
    assert sizes == [int(8 + 56 * min(1, n / 1000)) // 4 * 4 for n in seen]
    # wherever it starts
    assert sizes[30:40] == list(islice(batch_sizes(c, seen[30], 10_000, world=4), 10))


def test_a_budget_of_tokens_counts_the_growing_batch() -> None:
    recipe = resolve_recipe(
        "gpt2-small", {"tokens": 1_000_000, "batch": 32, "batch_start": 8, "batch_ramp": 0.5}
    )
    steps = Budget.of(recipe).steps
    samples = 1_000_000 / recipe.model.context
    used = sum(islice(batch_sizes(recipe.train, 0, samples, 1), steps)) * recipe.model.context
    assert used == pytest.approx(1_000_000, rel=0.05)


def test_a_budget_in_epochs_reads_the_text_that_often(corpus: Path, tmp_path: Path) -> None:
    _, settings = KINDS["gpt"]
    settings = {name: value for name, value in settings.items() if name != "steps"}
    malmoi.pretrain("gpt2-small", data=corpus, out=tmp_path, device="cpu", epochs=2, **settings)
    (folder,) = (tmp_path / "data").glob("**/train")
    text = len(Store.open(folder).tokens)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["tokens"] == pytest.approx(
        2 * text, rel=0.1
    )


def test_biases_and_norms_do_not_decay() -> None:
    config = bert(vocab=50, context=16, width=8, depth=1, heads=2)
    network = Network(config, {"mlm": 0, "nsp": 0})
    (adam,) = make_optimizers(network, TrainConfig(decay=0.3))
    names = {id(p): name for name, p in network.named_parameters()}
    decay = {
        names[id(p)]: group["weight_decay"] for group in adam.param_groups for p in group["params"]
    }
    assert decay.keys() == dict(network.named_parameters()).keys()
    for name, value in decay.items():
        assert value == (0.0 if name.endswith("bias") or "norm" in name else 0.3), name


def test_muon_takes_the_matrices_of_the_blocks_and_makes_them_orthogonal() -> None:
    network = initialise(
        Network(bert(vocab=50, context=16, width=32, depth=2, heads=2), {"mlm": 0}), 0
    )
    adam, muon = make_optimizers(network, TrainConfig(optimizer="muon", muon_lr=0.1))
    assert isinstance(muon, Muon)
    taken = [p for group in muon.param_groups for p in group["params"]]
    assert all(p.dim() == 2 for p in taken)
    assert len(taken) + sum(len(g["params"]) for g in adam.param_groups) == len(
        list(network.parameters())
    )
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 24, 60)).float())
    # the quintic keeps them near 1, not at it
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    matrix = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([matrix], lr=0.1)
    matrix.grad = torch.randn(8, 8) * torch.logspace(0, -4, 8)[:, None]  # rows of any length
    set_rate([optimizer], 0.5)
    optimizer.step()
    moved = torch.linalg.svdvals(matrix.detach() / -0.05)  # every direction moves by the rate
    assert 0.5 < float(moved.min()) <= float(moved.max()) < 1.4


@pytest.mark.parametrize("shape", [(2, 24, 96), (2, 96, 24), (3, 24, 60), (1, 20, 20)])
def test_long_matrices_become_what_the_iteration_makes_of_them(shape: tuple[int, ...]) -> None:
    given = torch.randn(shape) * torch.logspace(0, -4, shape[-1])
    with pretend(parse_machine("no-bf16")):  # in fp32
        found = orthogonal(given)
    x = given.double() / given.double().norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    assert (found - x).norm() < 1e-3 * x.norm()


def test_cautious_decay_shrinks_only_what_the_update_shrinks() -> None:
    before = torch.randn(6, 6)
    moved = {}
    for decay, cautious in ((0.0, False), (0.5, False), (0.5, True)):
        matrix = torch.nn.Parameter(before.clone())
        matrix.grad = torch.arange(36.0).reshape(6, 6).sin()
        Muon([matrix], lr=0.1, decay=decay, cautious=cautious).step()
        moved[decay, cautious] = matrix.detach()
    update = before - moved[0.0, False]
    shrunk = before * 0.1 * 0.5
    torch.testing.assert_close(moved[0.5, False], moved[0.0, False] - shrunk)
    expected = moved[0.0, False] - torch.where(update * before > 0, shrunk, 0.0)
    torch.testing.assert_close(moved[0.5, True], expected)


def test_averaged_weights_are_written_and_both_losses_reported(
    corpus: Path, tmp_path: Path
) -> None:
    settings = {"steps": 8, "train.save_every": 1, "train.keep": 9}
    model = train("gpt", corpus, tmp_path, **settings, **{"train.ema": 0.5})
    states = [load_file(p) for p in tmp_path.glob("train_state/step-[5678]/rank-*.safetensors")]
    assert len(states) == 4
    name = "trunk.blocks.0.mlp.up.weight"
    mean = torch.stack([state[f"weights.{name}"] for state in states]).mean(0)
    torch.testing.assert_close(model.network.state_dict()[name], mean)
    torch.testing.assert_close(weights(tmp_path)["transformer.h.0.mlp.c_fc.weight"].T, mean)
    row = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert row["valid_loss"] != row["valid_loss_without_ema"]


# ---- going on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [3, 7, 12])
def test_a_stopped_run_ends_like_an_uninterrupted_one(
    kind: str,
    step: int,
    corpus: Path,
    whole: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"steps": 20, "train.save_every": 6}
    with signalled(step), pytest.raises(Stopped) as stopped:
        train(kind, corpus, tmp_path, **settings)
    assert stopped.value.code == 143
    assert f"Stopped at step {step} and saved" in caplog.text
    assert (tmp_path / "report.html").is_file()
    train(kind, corpus, tmp_path, **settings)
    assert f"Resuming from step {step}." in caplog.text
    assert_equal_weights(tmp_path, whole[kind])
    assert steps_of(tmp_path) == list(range(1, 21))
    assert losses(tmp_path) == losses(whole[kind])


def test_every_part_of_a_run_resumes(corpus: Path, tmp_path: Path) -> None:
    """Muon, a batch that grows, two sources by weight, several passes a step, averaged weights."""
    other = write_corpus(tmp_path / "other.txt", documents=25)
    recipe, settings = KINDS["gpt"]
    settings = {
        **settings,
        "train.optimizer": "muon",
        "train.batch_start": 2,
        "train.batch_ramp": 0.8,
    }
    settings |= {"data.weights": [3, 1], "train.micro": 3, "steps": 12, "train.ema": 0.5}
    settings |= {"train.cautious_decay": True, "data.shuffle": "documents"}

    def go(out: Path) -> None:
        malmoi.pretrain(recipe, data=[corpus, other], out=out, device="cpu", **settings)

    go(tmp_path / "whole")
    with signalled(7), pytest.raises(Stopped):
        go(tmp_path / "stopped")
    go(tmp_path / "stopped")
    assert_equal_weights(tmp_path / "stopped", tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_three_are_one_of_eight(kind: str, corpus: Path, tmp_path: Path) -> None:
    for micro in (3, 8):
        train(kind, corpus, tmp_path / str(micro), steps=5, **STILL, **{"train.micro": micro})
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "8"), abs=1e-5)


def test_the_command_stops_with_143_after_saving(
    corpus: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    _, settings = KINDS["gpt"]
    sets = [
        f"--set={name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
    ]
    arguments = [
        *typed("pretrain gpt2-small --data", corpus, "--out", tmp_path / "run", "--steps 20"),
        *sets,
    ]
    slow = "import time, malmoi.training.trainer as t; f = t.Trainer.step\n"
    slow += (
        "t.Trainer.step = lambda *a: (time.sleep(0.1), f(*a))[1]\nfrom malmoi.cli import main; "
        "main()"
    )
    said = ""
    # as many as the run that was not stopped
    threads = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", slow, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=threads) as child:
        for line in child.stderr or ():
            said += line
            if "unning the first step" in line:
                child.send_signal(signal.SIGTERM)
    assert child.returncode == 143
    assert "and saved" in said
    assert "Traceback" not in said
    assert run_command([*arguments, "--json"]) == 0
    assert_equal_weights(tmp_path / "run", whole["gpt"])


def kill_often(jobs: dict[str, Any], folder: Path) -> list[str]:
    file = folder / "jobs.json"
    file.write_text(json.dumps([jobs]), "utf-8")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def check_kills(
    corpus: Path, folder: Path, *, kind: str, steps: int, kills: int, between: tuple[float, float]
) -> None:
    settings = {"steps": steps, "train.save_every": 1, "train.valid_every": 3}
    job = dict(
        name="kills", kind=kind, data=str(corpus), out=str(folder / "killed"), settings=settings
    )
    ends = kill_often(job | dict(kills=kills, seed=kills, between=between), folder)
    assert ends.count("killed") >= kills // 2  # otherwise the run was too short to say anything
    train(kind, corpus, folder / "killed", **settings)
    train(kind, corpus, folder / "whole", **settings)
    assert_equal_weights(folder / "killed", folder / "whole")
    for name in ("loss", "valid_loss"):
        rows, wanted = (
            [
                (row["step"], row[name])
                for row in read_metrics(folder / run / "metrics.jsonl")
                if name in row
            ]
            for run in ("killed", "whole")
        )
        assert rows == wanted
    left = [
        path.name for path in (folder / "killed").rglob("*") if path.name.endswith((".tmp", ".old"))
    ]
    assert left == []


def test_a_killed_run_ends_like_an_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    check_kills(corpus, tmp_path, kind="gpt", steps=40, kills=2, between=(0.2, 0.7))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_kills_at_random_moments(kind: str, corpus: Path, tmp_path: Path) -> None:
    check_kills(corpus, tmp_path, kind=kind, steps=400, kills=20, between=(0.2, 1.2))


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    parts = StateParts.of({"weights.x": torch.arange(6.0)}, ProcessGroup())
    save_state(tmp_path, RunState(step=3), parts, ProcessGroup())
    (tmp_path / "step-3").rename(tmp_path / ".step-3.old")
    assert latest_state(tmp_path, print, ProcessGroup()) == tmp_path / "step-3"
    save_state(tmp_path, RunState(step=3, tokens=9), parts, ProcessGroup())
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert json.loads((tmp_path / "step-3" / "state.json").read_text())["position"]["tokens"] == 9


def test_the_last_states_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in enumerate([3.0, 1.0, 2.0, None, 2.5]):
        save_state(
            tmp_path,
            RunState(step=step, valid_loss=loss),
            StateParts.of({"weights.x": torch.ones(2)}, ProcessGroup()),
            ProcessGroup(),
        )
        prune_states(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]


def test_position_is_computed_not_replayed(corpus: Path, whole: dict[str, Path]) -> None:
    """The first batch after 100,000 steps reads as many places of the store as the first of all."""
    store = Store.open(whole["gpt"] / "data" / "train")

    class Counting(np.ndarray):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.reads += 1
            return np.asarray(self)[key]

    from malmoi.training.data.windows import Windows

    watched = replace(store, tokens=store.tokens.view(Counting))
    windows = Windows(watched, 16, seed=0)
    feed = PhaseFeed(LMBatches(windows), 16, len(windows))

    def work(position: int) -> int:
        Counting.reads = 0
        feed.micro(position, 8, torch.device("cpu"))
        return Counting.reads

    assert work(100_000 * 8) == work(10 * 8) == 8


def test_a_run_resumes_from_a_far_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of step 100,000: one batch is made for each step that is left, none for those
    before.
    """
    unjudged = {"data.valid": 0.0}
    train("gpt", corpus, tmp_path, steps=2, **unjudged)
    (state,) = (tmp_path / "train_state").glob("step-2")
    about = json.loads((state / "state.json").read_text())
    del about["checksum"]  # as a state of an earlier version
    about["position"] |= {"step": 100_000, "samples_seen": [800_000]}
    (state / "state.json").write_text(json.dumps(about))
    state.rename(state.with_name("step-100000"))
    asked: list[int] = []
    original = LMBatches.at

    def counting(self: LMBatches, first: int, size: int) -> Any:
        asked.append(first)
        return original(self, first, size)

    monkeypatch.setattr(LMBatches, "at", counting)
    train("gpt", corpus, tmp_path, steps=100_002, **unjudged)
    assert asked[:2] == [800_000, 800_008]
    assert len(asked) <= 2 + 6  # and what the thread had prepared ahead


def test_a_finished_run_run_again_changes_nothing(whole: dict[str, Path], corpus: Path) -> None:
    rows, before = read_metrics(whole["bert"] / "metrics.jsonl"), weights(whole["bert"])
    model = train("bert", corpus, whole["bert"], steps=20, **{"train.save_every": 6})
    assert read_metrics(whole["bert"] / "metrics.jsonl") == rows
    assert all(torch.equal(before[name], value) for name, value in weights(whole["bert"]).items())
    assert not model.network.training


def test_a_longer_budget_resumes(corpus: Path, tmp_path: Path) -> None:
    train("gpt", corpus, tmp_path, steps=3)
    train("gpt", corpus, tmp_path, steps=5)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


# ---- damage


def begun(corpus: Path, out: Path) -> dict[str, Any]:
    """A run of 20 stopped at step 8, with states of 6 and 8."""
    settings = {"steps": 20, "train.save_every": 6}
    with signalled(8), pytest.raises(Stopped):
        train("gpt", corpus, out, **settings)
    assert {"step-6", "step-8"} <= {path.name for path in (out / "train_state").iterdir()}
    return settings


def truncate(state: Path) -> None:
    file = next(state.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def flip(state: Path) -> None:
    file = next(state.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(bytes(content))


def forget(state: Path) -> None:
    (state / "state.json").unlink()


@pytest.mark.parametrize("damage", [truncate, flip, forget])
def test_the_state_before_a_damaged_one_is_used(
    damage: Callable[[Path], None],
    corpus: Path,
    whole: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = begun(corpus, tmp_path)
    damage(tmp_path / "train_state" / "step-8")
    train("gpt", corpus, tmp_path, **settings)
    said = caplog.text
    assert "step-8 is damaged" in said
    assert "damaged-step-8" in said
    assert "Resuming from step 6." in said
    assert (tmp_path / "train_state" / "damaged-step-8").is_dir()  # nothing is lost
    assert_equal_weights(tmp_path, whole["gpt"])
    assert steps_of(tmp_path) == list(range(1, 21))


@pytest.mark.parametrize("what", ["all damaged", "deleted"])
def test_without_a_state_the_run_starts_over_with_a_note(
    what: str,
    corpus: Path,
    whole: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = begun(corpus, tmp_path)
    for state in (tmp_path / "train_state").iterdir():
        (truncate if what == "all damaged" else remove)(state)
    caplog.clear()
    train("gpt", corpus, tmp_path, **settings)
    said = caplog.text
    assert "the run starts over" in said
    assert "Resuming" not in said
    assert_equal_weights(tmp_path, whole["gpt"])
    assert steps_of(tmp_path) == list(range(1, 21))


def remove(state: Path) -> None:
    for path in state.iterdir():
        path.unlink()
    state.rmdir()


def test_a_state_of_another_version_is_refused(corpus: Path, tmp_path: Path) -> None:
    settings = begun(corpus, tmp_path)
    file = tmp_path / "train_state" / "step-8" / "state.json"
    about = json.loads(file.read_text())
    del about["checksum"]
    file.write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(MalmoiError, match="another version"):
        train("gpt", corpus, tmp_path, **settings)
    assert file.is_file()


def test_every_bit_of_a_states_json_is_checked(corpus: Path, tmp_path: Path) -> None:
    settings = begun(corpus, tmp_path)
    root = tmp_path / "train_state"
    text = (root / "step-8" / "state.json").read_bytes()
    whole = read_state(root / "step-8")
    chance = random.Random(0)
    for _ in range(300):
        at = chance.randrange(len(text))
        flipped = bytes([text[at] ^ 1 << chance.randrange(8)])
        (root / "step-8" / "state.json").write_bytes(text[:at] + flipped + text[at + 1 :])
        with suppress(CorruptState):  # a flip that is not noticed changes nothing that is read
            assert read_state(root / "step-8") == whole
    (root / "step-8" / "state.json").write_bytes(text.replace(b'"seconds": ', b'"seconds": 1'))
    train("gpt", corpus, tmp_path, **settings)
    assert (root / "damaged-step-8").is_dir()


def test_a_run_whose_folder_is_removed_stops_and_leaves_none(corpus: Path, tmp_path: Path) -> None:
    def remove(event: Progress) -> None:
        if event.verb == "pretrain" and event.done == 8:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(MalmoiError, match=r"run was removed while the run was writing to it"):
        train(
            "gpt", corpus, tmp_path / "run", steps=20, progress=remove, **{"train.save_every": 10}
        )
    assert not (tmp_path / "run" / "train_state").exists()


@pytest.mark.parametrize(("steps", "every"), [(4, 500), (60, 4)])
def test_a_run_that_diverges_says_so_at_its_validation(
    steps: int, every: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may be finite, and what they compute no number."""

    def broken(*arguments: Any) -> dict[str, float]:
        return {"valid_loss": math.nan}

    monkeypatch.setattr("malmoi.training.trainer.validate", broken)
    for _ in range(2):  # and when the same command is repeated
        with pytest.raises(MalmoiError, match=r"(diverged|reached nan).*lower train.lr"):
            train("gpt", corpus, tmp_path, steps=steps, **{"train.valid_every": every})


# ---- losses that go wrong


def spoil(monkeypatch: pytest.MonkeyPatch, at: Callable[[Trainer, int], bool], how: str) -> None:
    """Some steps end in a loss, or in weights, that are no numbers."""
    original, calls = Trainer.step, iter(range(1, 10_000))

    def step(self: Trainer, micros: list[Any]) -> Any:
        losses = original(self, micros)
        if at(self, next(calls)):
            if how == "weights":
                with torch.no_grad():
                    next(self.network.parameters()).fill_(math.nan)
            else:
                losses["loss"] = losses["loss"] * float(how)
        return losses

    monkeypatch.setattr(Trainer, "step", step)


@pytest.mark.parametrize("how", ["nan", "inf", "weights"])
def test_a_bad_step_takes_the_run_back_and_is_skipped(
    how: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(monkeypatch, lambda trainer, call: call == 8, how)
    train("gpt", corpus, tmp_path, steps=12, **{"train.save_every": 4})
    said = caplog.text
    assert "at step 8: back to step 4, skipping" in said
    assert steps_of(tmp_path) == list(range(1, 13))
    assert all(math.isfinite(loss) for loss in losses(tmp_path))
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    newest = tmp_path / "train_state" / "step-12" / "state.json"
    # four steps were skipped
    assert json.loads(newest.read_text())["position"]["samples_seen"] == [(12 + 4) * 8]


def test_a_loss_spike_is_an_outlier() -> None:
    position, noise = RunState(), random.Random(0)
    for step in range(1, 200):
        position.step = step
        # early losses fall too fast to tell
        early = step == 50 and position.is_spike(9.0, phase=0)
        assert not early
        assert not position.is_spike(2 + noise.uniform(-0.1, 0.1), phase=0)
    assert not position.is_spike(2.9, phase=0)
    assert position.is_spike(9.0, phase=0)
    assert position.is_spike(math.nan, phase=0)
    # at another length BERT meets positions it has not learnt, and its loss leaps
    assert not position.is_spike(9.0, phase=1)


def test_the_fourth_bad_step_ends_the_run_with_its_last_good_state(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as bad:
        spoil(bad, lambda trainer, call: trainer.state.step == 9, "nan")
        with pytest.raises(MalmoiError, match=r"4th time.*last good state.*train\.lr"):
            train("gpt", corpus, tmp_path, steps=12, **{"train.save_every": 4})
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    train("gpt", corpus, tmp_path, steps=12, **{"train.save_every": 4})
    assert steps_of(tmp_path) == list(range(1, 13))


def test_spikes_far_apart_do_not_add_up(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("malmoi.training.trainer.ROLLBACK_FORGIVEN_STEPS", 3)
    # once in six steps, two of which are done again
    spoil(monkeypatch, lambda trainer, call: call % 6 == 0, "nan")
    train("gpt", corpus, tmp_path, steps=40, **{"train.save_every": 2})
    assert steps_of(tmp_path) == list(range(1, 41))
    position = json.loads((tmp_path / "train_state" / "step-40" / "state.json").read_text())[
        "position"
    ]
    assert position["spiked"] > 30
    assert position["rollbacks"] == 1
    assert position["samples_seen"][0] > (40 + 4) * 8  # more than four times


# ---- disks, sources, settings


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError(errno.EIO, "I/O error")]
)
def test_a_full_disk_is_one_sentence_and_costs_nothing(
    error: OSError,
    corpus: Path,
    whole: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = begun(corpus, tmp_path)
    with monkeypatch.context() as full:

        def refuse(tensors: Any, path: Path, metadata: Any) -> None:
            path.write_bytes(b"half")
            raise error

        full.setattr("malmoi.checkpoint.weights.save_file", refuse)
        with pytest.raises(
            MalmoiError,
            match=r"(disk is full|I/O error): .* could not be .*written.* same command again",
        ):
            train("gpt", corpus, tmp_path, **settings)
    assert not list((tmp_path / "train_state").glob(".*"))
    train("gpt", corpus, tmp_path, **settings)
    assert_equal_weights(tmp_path, whole["gpt"])


def test_a_disk_that_is_full_when_the_model_is_written(
    corpus: Path, whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 20, "train.save_every": 6}
    with monkeypatch.context() as full:

        def refuse(tensors: Any, path: Path, metadata: Any) -> None:
            if path.name != "model.safetensors":
                return save_file(tensors, path, metadata)
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )

        full.setattr("malmoi.checkpoint.weights.save_file", refuse)
        with pytest.raises(MalmoiError, match="The disk is full"):
            train("gpt", corpus, tmp_path, **settings)
    train("gpt", corpus, tmp_path, **settings)
    assert_equal_weights(tmp_path, whole["gpt"])


def test_without_validation_there_is_still_a_result(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("bert", corpus, tmp_path, steps=3, **{"data.valid": 0.0, "train.valid_every": 1})
    assert "there will be no validation" in caplog.text
    assert steps_of(tmp_path) == [1, 2, 3]
    assert "<polyline" in (tmp_path / "report.html").read_text("utf-8")


def test_a_text_that_is_not_there_or_empty_or_short(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(MalmoiError, match=r"nowhere\.txt"):
        train("gpt", tmp_path / "nowhere.txt", tmp_path / "a", steps=2)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n")
    with pytest.raises(MalmoiError, match="no text"):
        train("gpt", empty, tmp_path / "b", steps=2)
    short = tmp_path / "short.txt"
    short.write_text("the state of the union")
    with pytest.raises(MalmoiError, match="fewer than one context of 512"):
        train("gpt", short, tmp_path / "c", steps=2, **{"model.context": 512})
    with pytest.raises(MalmoiError, match="blank lines"):
        train("bert", short, tmp_path / "d", steps=2)


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt.xz"
    broken.write_bytes(lzma.compress(b"the state of the union\n" * 9999)[:-40])
    with pytest.raises(MalmoiError, match=r"broken\.txt\.xz"):
        train("gpt", broken, tmp_path / "run", steps=2)


def test_a_changed_text_is_encoded_again_with_a_note(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_corpus(tmp_path / "text.txt")
    train("gpt", text, tmp_path / "run", steps=2)
    write_corpus(text, documents=70)
    train("gpt", text, tmp_path / "run", steps=4)
    assert "rebuilt because the text changed" in caplog.text


def test_other_settings_in_the_same_folder_are_refused_by_name(
    corpus: Path, whole: dict[str, Path]
) -> None:
    before = (whole["gpt"] / "recipe.json").read_bytes()
    with pytest.raises(UsageError, match=r"train\.lr was 0\.003.*choose another folder"):
        train("gpt", corpus, whole["gpt"], steps=20, **{"train.lr": 1e-2})
    with pytest.raises(UsageError, match=r"model\.width was 16"):
        train("gpt", corpus, whole["gpt"], steps=20, **{"model.width": 32})
    assert (whole["gpt"] / "recipe.json").read_bytes() == before


def test_a_folder_with_someone_elses_model_is_left_alone(
    whole: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    malmoi.load(whole["gpt"]).save(tmp_path / "model")
    with pytest.raises(UsageError, match="not pre-trained here"):
        train("gpt", corpus, tmp_path / "model", steps=2)


def test_one_run_in_a_folder_at_a_time(corpus: Path, tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MalmoiError, match="Another process is using"):
            train("gpt", corpus, tmp_path, steps=2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"steps": 0}, "give a budget"),
        ({"steps": 2, "minutes": 3}, "one budget"),
        ({"steps": -2}, r"train\.steps must not be negative"),
        ({"micro": -1}, r"train\.micro must not be negative"),
        ({"valid": 1.0}, r"data\.valid must lie in \[0, 1\)"),
        ({"train.save_every": 0}, r"train\.save_every must be positive"),
        ({"train.keep": 0}, r"train\.keep must be positive"),
        ({"objective": "lm"}, "cannot learn to predict"),
        ({"train.lrr": 1}, "Did you mean 'lr'"),
        ({"minuets": 1}, "Did you mean 'minutes'"),
        ({"data.lengths": "128,1024"}, "more than the model's context"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        resolve_recipe("bert-tiny", changes)


# ---- starting from a model


def test_a_started_model_keeps_its_own_tokenizer(
    whole: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    pretrained = weights(whole["bert"])
    train("bert", corpus, tmp_path / "on", start=whole["bert"], steps=2, objective="mlm")
    assert (tmp_path / "on" / "tokenizer.json").read_bytes() == (
        whole["bert"] / "tokenizer.json"
    ).read_bytes()
    after = weights(tmp_path / "on")
    assert not torch.equal(
        after["bert.embeddings.word_embeddings.weight"],
        pretrained["bert.embeddings.word_embeddings.weight"],
    )
    same = "cls.seq_relationship.weight"  # not trained by this objective
    assert torch.equal(after[same], pretrained[same])


def test_a_run_that_starts_from_a_gpt_folder_continues_bit_equal(
    whole: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    """Its weights are transposed views, as GPT-2's files have them; so are then the optimizer's
    moments.
    """
    settings = {"start": whole["gpt"], "steps": 6, "train.save_every": 1}
    train("gpt", corpus, tmp_path / "one", **settings)
    with signalled(3), pytest.raises(Stopped):
        train("gpt", corpus, tmp_path / "two", **settings)
    train("gpt", corpus, tmp_path / "two", **settings)
    assert_equal_weights(tmp_path / "one", tmp_path / "two")


def test_a_tokenizer_that_does_not_fit_the_start_is_refused(
    whole: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    larger = tmp_path / "larger"
    malmoi.tokenizer.train_tokenizer(corpus.read_text().split(), kind="byte-bpe", vocab=310).save(
        larger
    )
    with pytest.raises(UsageError, match=r"tokens.*only 290"):
        train("gpt", corpus, tmp_path / "a", start=whole["gpt"], tokenizer=larger, steps=2)
    other = tmp_path / "other"
    malmoi.tokenizer.train_tokenizer(
        ["other words altogether"] * 9, kind="byte-bpe", vocab=270
    ).save(other)
    with pytest.raises(UsageError, match="with its own tokenizer"):
        train("gpt", corpus, tmp_path / "b", start=whole["gpt"], tokenizer=other, steps=2)
    with pytest.raises(
        UsageError, match=r"holds another pre-training run \(with another tokenizer"
    ):
        train("gpt", corpus, whole["gpt"], tokenizer=other, steps=20)
    with pytest.raises(
        UsageError, match=r'holds another pre-training run \(name was "gpt2-small"\)'
    ):
        train("gpt", corpus, whole["gpt"], name="another", steps=20)
    with pytest.raises(UsageError, match="has no mlm head"):
        train("bert", corpus, tmp_path / "c", start=whole["gpt"], steps=2)


# ---- the folder


def test_transformers_opens_a_run(whole: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, BertForPreTraining

    text = "The state is strong."
    ours, theirs = (
        malmoi.load(whole["gpt"]),
        AutoModelForCausalLM.from_pretrained(whole["gpt"]).eval(),
    )
    tokens = torch.tensor([AutoTokenizer.from_pretrained(whole["gpt"])(text)["input_ids"]])
    torch.testing.assert_close(
        torch.from_numpy(ours.logits(text)), theirs(tokens).logits[0].detach(), rtol=1e-4, atol=1e-4
    )
    ours, theirs = (
        malmoi.load(whole["bert"]),
        BertForPreTraining.from_pretrained(whole["bert"]).eval(),
    )
    tokens = torch.tensor([AutoTokenizer.from_pretrained(whole["bert"])(text)["input_ids"]])
    torch.testing.assert_close(
        torch.from_numpy(ours.logits(text)),
        theirs(tokens).prediction_logits[0].detach(),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_and_the_report_are_there(kind: str, whole: dict[str, Path]) -> None:
    recipe = read_recipe(whole[kind] / "recipe.json")
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert replace(recipe.model, hidden=recipe.model.mlp_width) == malmoi.load(whole[kind]).config
    assert resolve_recipe(str(whole[kind] / "recipe.json"), {}) == recipe
    report = (whole[kind] / "report.html").read_text("utf-8")
    assert "<polyline" in report
    assert "http" not in report.replace("http-equiv", "")  # it needs nothing from elsewhere
    rows = read_metrics(whole[kind] / "metrics.jsonl")
    assert {"step", "tokens", "seconds", "loss", "lr", "tokens_per_second"} <= set(rows[0])
    assert rows[-1]["valid_loss"] > 0
    assert rows[-1]["sample"]


def test_a_cut_off_row_is_left_out(tmp_path: Path) -> None:
    log = RunLog(tmp_path, TrainConfig(), first=True)
    for step in (1, 2, 3):
        log.write_row(step=step, loss=1.0)
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    RunLog(tmp_path, TrainConfig(), first=True).resume(2)
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2]


# ---- the command


def test_a_dry_run_estimates_the_cost_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    arguments = typed(
        f"pretrain gpt2-small --data {tmp_path}/text.txt --out",
        tmp_path / "run",
        "--tokens 1e6 --dry-run",
    )
    assert run_command([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 124_439_808
    assert said["weights"] == 4 * said["parameters"]
    assert said["optimizer"] == 8 * said["parameters"]
    assert 1e6 <= said["tokens"] < 1.6e6  # whole steps of half a million
    assert said["seconds"] > 0
    assert Recipe.from_dict(said["recipe"]).train.tokens == 1_000_000
    assert run_command(arguments) == 0
    assert "124,439,808" in capsys.readouterr().out
    slow = [*arguments[:-3], "--minutes", "1", "--dry-run"]
    with pretend(replace(this_machine(), flops=1e10)):
        assert run_command(slow) == 0
    assert "malmoi pretrain gpt chooses a size for 1 minute." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_trains_on_several_files_and_prints_the_result(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write_corpus(tmp_path / f"{i}.txt", documents=30)) for i in range(2)]
    sets = [
        "model.width=16",
        "model.depth=1",
        "model.heads=2",
        "model.context=16",
        "batch=4",
        "compile=false",
    ]
    arguments = [
        "pretrain",
        "gpt-char",
        "--data",
        *files,
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "4",
    ]
    arguments += [part for setting in sets for part in ("--set", setting)]
    assert run_command([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["folder"] == str(tmp_path / "run")
    assert result["step"] == 4
    assert result["valid_loss"] > 0
    assert run_command(arguments) == 0
    assert "step 4" in capsys.readouterr().out
    arguments[arguments.index("--out") + 1] = str(tmp_path / "blind")
    assert run_command([*arguments, "--set", "data.valid=0", "--set", "log_every=100"]) == 0
    assert f"{tmp_path / 'blind'}: step 4, tokens 256, training loss 3." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gpt-chat", "--data", __file__, "--out", "y"], 2, "gpt-char"),
        (["gpt-char", "--data", __file__, "--out", "y", "--set", "train.lr"], 2, "NAME=VALUE"),
        (
            ["gpt-char", "--data", __file__, "--out", "y", "--minutes", "2", "--steps", "3"],
            2,
            "one budget",
        ),
        (["gpt-char", "--data", __file__, "--out", "y", "--steps", "many"], 2, "a whole number"),
        (["nowhere/recipe.json", "--data", __file__, "--out", "y"], 2, "nowhere/recipe.json"),
        (["gpt-char", "--data", "-", "-", "--out", "y"], 2, "only once"),
        (["gpt-char", "--data", __file__, "--out", "y", "--device", "tpu"], 2, "device"),
        (["gpt-char", "--out", "y"], 2, "needs text"),
    ],
)
def test_wrong_commands_are_one_sentence(
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    workdir: Path,
    tmp_path: Path,
) -> None:
    assert run_command(["pretrain", *arguments]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


SMALL = {
    "electra-small": {
        "tokenizer.vocab": 90,
        "model.embed_width": 8,
        "model.hidden": 32,
        "data.lengths": [32],
    },
    "albert-base": {"tokenizer.vocab": 90, "model.embed_width": 8, "data.lengths": [16, 32]},
    "bert-tiny-fast": {"tokenizer.vocab": 90, "data.lengths": [16, 32]},
    "bert-tiny": {
        "tokenizer.vocab": 90,
        "data.lengths": [16, 32],
        "data.packed": True,
        "data.whole_word": True,
    },
    "gpt1": {"tokenizer.vocab": 200},
    "gpt3-125m": {"tokenizer.vocab": 290, "train.batch_start": 2},
    "gpt2-small-fast": {"tokenizer.vocab": 290, "data.document_mask": True},
    "gpt-char": {"tokenizer.vocab": 90},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_recipe_trains_and_opens(name: str, corpus: Path, tmp_path: Path) -> None:
    settings = {**TINY, "model.context": 32, **SMALL[name]}
    malmoi.pretrain(name, data=corpus, out=tmp_path, device="cpu", steps=3, **settings)
    assert len(losses(tmp_path)) == 3
    assert malmoi.load(tmp_path).tokens("the state")


def test_a_fast_bert_is_a_modernbert_to_transformers(corpus: Path, tmp_path: Path) -> None:
    settings = {**TINY, "model.context": 32, **SMALL["bert-tiny-fast"]}
    model = malmoi.pretrain(
        "bert-tiny-fast", data=corpus, out=tmp_path, device="cpu", steps=3, **settings
    )
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert theirs.config.model_type == "modernbert"
    given = words(["the state of the union", "the"], padding=True, return_tensors="pt")
    keep = given["attention_mask"].bool()
    with torch.no_grad():
        ours = model.network(given["input_ids"], keep=keep)["mlm"]
        logits = theirs(**given).logits
    torch.testing.assert_close(ours[keep], logits[keep], rtol=0, atol=1e-5)


def test_an_electra_is_two_folders_to_transformers(corpus: Path, tmp_path: Path) -> None:
    settings = {**TINY, "model.context": 32, **SMALL["electra-small"], "train.valid_every": 2}
    model = malmoi.pretrain(
        "electra-small", data=corpus, out=tmp_path, device="cpu", steps=3, **settings
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"mlm", "detect"} <= rows[0].keys()
    assert any("detect_accuracy" in row for row in rows)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = words(["the state of the union", "the"], padding=True, return_tensors="pt")
    keep = given["attention_mask"].bool()
    inputs = {"segments": given["token_type_ids"], "keep": keep}
    network = model.network.eval()
    generator = network.heads["generator"]
    kinds = {"": transformers.ElectraForPreTraining, "generator": transformers.ElectraForMaskedLM}
    with torch.no_grad():
        ours = {
            "": network(given["input_ids"], heads=("detect",), **inputs)["detect"],
            "generator": generator(generator.trunk(given["input_ids"], **inputs)),
        }
        for folder, kind in kinds.items():
            theirs, info = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            logits = theirs.eval()(**given).logits
            torch.testing.assert_close(ours[folder][keep], logits[keep], rtol=0, atol=1e-5)
    assert set(malmoi.load(tmp_path).network.heads) == {"detect"}
    assert malmoi.load(tmp_path / "generator").fill("the [MASK] of")


def test_a_bert_that_also_detects_is_a_bert_to_transformers_and_goes_on(
    corpus: Path, tmp_path: Path
) -> None:
    settings = {**TINY, "model.context": 32, **SMALL["bert-tiny-fast"], "train.valid_every": 2}
    settings |= {"objective": "mlm+rtd", "model.generator_depth": 1, "device": "cpu", "steps": 3}
    one, two = tmp_path / "one", tmp_path / "two"
    model = malmoi.pretrain("bert-tiny-fast", data=corpus, out=one, **settings)
    rows = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert {"mlm", "generator", "detect"} <= rows[0].keys()
    assert any({"mlm_accuracy", "detect_accuracy"} <= row.keys() for row in rows)
    opened = malmoi.load(one)
    assert set(opened.network.heads) == {"mlm"}
    fills = [one.fill("the [MASK] of") for one in (opened, model)]
    first, second = ([one.probability for one in some] for some in fills)
    assert first == pytest.approx(second, abs=1e-5)
    assert not (one / "generator").exists()
    words = transformers.AutoTokenizer.from_pretrained(one)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(one).eval()
    given = words(["the state of the union"], return_tensors="pt")
    with torch.no_grad():
        ours = opened.network(given["input_ids"])["mlm"]
        torch.testing.assert_close(ours, theirs(**given).logits, rtol=0, atol=1e-5)
    more = malmoi.pretrain(str(one), data=corpus, out=two, start=one, device="cpu", steps=2)
    assert set(malmoi.load(two).network.heads) == {"mlm"}
    before, after = (m.network.trunk.embed.token.weight for m in (opened, more))
    assert 0 < (before - after).abs().max() < 0.1  # it goes on from there


def test_every_recipe_can_be_resolved() -> None:
    for name in RECIPES:
        recipe = resolve_recipe(name, {})
        assert recipe.name == name
        assert recipe.about
        assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_recipe_comes_before_a_folder_of_its_name(workdir: Path) -> None:
    for name in ("bert", "mine"):
        (workdir / name).mkdir()
        (workdir / name / "recipe.json").write_text(resolve_recipe("bert-mini", {}).to_json())
    assert [resolve_recipe(name, {}).name for name in ("bert", "mine")] == ["bert", "bert-mini"]


def test_a_vocabulary_named_alone_is_that_of_the_tokenizer() -> None:
    assert resolve_recipe("bert-tiny", {"vocab": 300}).tokenizer.vocab == 300


def test_the_models_vocabulary_is_that_of_the_tokenizer_to_train() -> None:
    chosen = resolve_recipe("bert-tiny", {"model.vocab": "300"})
    assert (chosen.model.vocab, chosen.tokenizer.vocab) == (300, 300)


# ---- snapshots along training


def test_snapshots_are_models_and_a_resumed_run_has_each_once(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train.snapshots": True, "train.save_every": 5, "steps": 12}
    with pytest.raises(Stopped), signalled(7):
        train("gpt", corpus, tmp_path / "run", **settings)
    root = tmp_path / "run" / "snapshots"
    stale = root / "000011"  # left by a kill after it was written and before the next saved state
    stale.mkdir()
    model = train("gpt", corpus, tmp_path / "run", **settings)
    assert sorted(p.name for p in root.iterdir()) == [f"{n:06d}" for n in (1, 2, 3, 4, 6, 8, 11)]
    train("gpt", corpus, tmp_path / "whole", **settings)
    for name in ("000004", "000008", "000011"):
        assert_equal_weights(root / name, tmp_path / "whole" / "snapshots" / name)
    text = "The state of the union is strong."
    values = [
        malmoi.load(root / name, device="cpu").perplexity(text) for name in ("000001", "000011")
    ]
    assert values[1] < values[0]
    assert model.perplexity(text) < values[0]
    assert run_command(["perplexity", "-m", str(root / "000011"), text]) == 0
    assert float(capsys.readouterr().out) == pytest.approx(values[1], abs=1e-3)
