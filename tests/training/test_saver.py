"""Saves beside the training: what they hold, that they wait for one another, and how they fail."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from malmoi.errors import MalmoiError
from malmoi.training import loop, saver, state
from malmoi.training.trainer import Trainer
from tiny_runs import assert_equal_weights, steps_of, train, weights, write_corpus

SETTINGS = {"steps": 6, "train.save_every": 2, "train.keep": 9, "train.ema": 0.5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text.txt")


def state_tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "train_state" / f"step-{step}"
    with state._open(folder / "rank-00000.safetensors") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_steps_go_on_while_a_save_is_written_which_holds_its_own_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 2 is not written before step 3 is done; that of step 4 waits for it."""
    train("gpt", corpus, tmp_path / "plain", **SETTINGS)
    third = threading.Event()
    began: list[int] = []
    write, step = loop.save_state, Trainer.step

    def late(root: Path, saved: state.RunState, *given: Any) -> Path:
        began.append(saved.step)
        if saved.step == 2:
            assert third.wait(60)
        return write(root, saved, *given)

    def noted(self: Trainer, micros: list[Any]) -> Any:
        losses = step(self, micros)
        if self.state.step == 2:  # this was the third
            assert not (tmp_path / "late" / "train_state" / "step-2").exists()
            third.set()
        return losses

    monkeypatch.setattr(loop, "save_state", late)
    monkeypatch.setattr(Trainer, "step", noted)
    train("gpt", corpus, tmp_path / "late", **SETTINGS)
    assert began == [0, 2, 4, 6]
    assert_equal_weights(tmp_path / "plain", tmp_path / "late")
    for number in (2, 4, 6):
        plain, late_one = (state_tensors(tmp_path / run, number) for run in ("plain", "late"))
        assert plain.keys() == late_one.keys()
        assert all(torch.equal(plain[name], late_one[name]) for name in plain)


def test_the_model_beside_a_state_has_its_averaged_weights(corpus: Path, tmp_path: Path) -> None:
    train("bert", corpus, tmp_path, **SETTINGS)
    tensors = state_tensors(tmp_path, 6)
    kinds = ("weights.", "average.")
    own, mean = ([t for n, t in tensors.items() if n.startswith(kind)] for kind in kinds)
    saved = weights(tmp_path)["bert.embeddings.word_embeddings.weight"]
    assert any(torch.equal(saved, one) for one in mean if one.shape == saved.shape)
    assert not any(torch.equal(saved, one) for one in own if one.shape == saved.shape)


def test_a_copy_that_is_too_large_is_not_made(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("gpt", corpus, tmp_path / "beside", **SETTINGS)
    monkeypatch.setattr(saver, "COPY_SHARE", 0.0)
    monkeypatch.setattr(state.StateParts, "copied", lambda *_: pytest.fail("a copy was made"))
    train("gpt", corpus, tmp_path / "waited", **SETTINGS)
    assert_equal_weights(tmp_path / "beside", tmp_path / "waited")


def test_a_full_disk_is_said_by_the_loop_and_costs_one_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = state.write_tensors

    def full(path: Path, *given: Any) -> None:
        if ".step-4" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, *given)

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_tensors", full)
        with pytest.raises(MalmoiError, match=r"The disk is full: .*step-4.* could not be written"):
            train("gpt", corpus, tmp_path / "full", **SETTINGS)
    left = sorted(path.name for path in (tmp_path / "full" / "train_state").iterdir())
    assert left == ["step-0", "step-2"]
    train("gpt", corpus, tmp_path / "full", **SETTINGS)
    train("gpt", corpus, tmp_path / "plain", **SETTINGS)
    assert steps_of(tmp_path / "full") == list(range(1, 7))
    assert_equal_weights(tmp_path / "full", tmp_path / "plain")
