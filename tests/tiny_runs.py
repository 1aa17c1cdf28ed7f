"""Tiny runs that several tests train, here or in a process of their own: `python tiny_runs.py
JOBS.json`.
"""

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from malmoi import pretrain
from malmoi.system.run_folder import read_metrics
from malmoi.training.loss_module import LossModule
from malmoi.training.signals import Stopped
from malmoi.training.trainer import Trainer

WORDS = (
    "the",
    "state",
    "of",
    "union",
    "is",
    "strong",
    "people",
    "are",
    "free",
    "we",
    "work",
    "for",
    "peace",
    "law",
)
TINY: dict[str, Any] = {
    "model.width": 16,
    "model.depth": 2,
    "model.heads": 2,
    "train.batch": 8,
    "train.warmup_steps": 2,
    "train.lr": 3e-3,
    "train.precision": "fp32",
    "train.compile": False,
    "train.log_every": 1,
    "train.valid_every": 0,
    "train.valid_batches": 1,
    "data.valid": 0.1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt2-small", {**TINY, "model.context": 16, "tokenizer.vocab": 290}),
    "bert": (
        "bert-tiny",
        {
            **TINY,
            "model.context": 32,
            "tokenizer.vocab": 90,
            "data.lengths": [16, 32],
            "data.shares": [0.5, 0.5],
        },
    ),
}
# several processes draw their own dropout
STILL = {"model.dropout": 0.0, "model.attention_dropout": 0.0}


def write_corpus(path: Path, documents: int = 60) -> Path:
    """Documents of a few made-up sentences, with a blank line between them."""
    rng = random.Random(0)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize() + "."

    texts = ["\n".join(sentence() for _ in range(rng.randint(3, 8))) for _ in range(documents)]
    path.write_text("\n\n".join(texts), "utf-8")
    return path


def train(kind: str, data: Path, out: Path, **changes: Any) -> Any:
    recipe, settings = KINDS[kind]
    return pretrain(recipe, data=str(data), out=out, device="cpu", **{**settings, **changes})


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(out / "model.safetensors"))


def assert_equal_weights(one: Path, other: Path) -> None:
    """To the bit."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def steps_of(out: Path) -> list[int]:
    """The steps of the training rows, in the order they were written."""
    return [row["step"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


@contextmanager
def signalled(step: int, number: int = signal.SIGTERM, rank: int = 0) -> Iterator[None]:
    """This process gets a signal in the middle of a step."""
    original = Trainer.step

    def noisy(self: Trainer, micros: list[Any]) -> Any:
        if self.state.step == step - 1 and self.group.rank == rank:
            signal.raise_signal(number)
        return original(self, micros)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", noisy)
        yield


@contextmanager
def starved(step: int, rank: int) -> Iterator[None]:
    """One process runs out of memory in the middle of a step."""
    original, calls = LossModule.forward, iter(range(1, 10_000))

    def forward(self: LossModule, *given: Any) -> Any:
        if int(os.environ["RANK"]) == rank and next(calls) == step:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossModule, "forward", forward)
        yield


# ------------------------------------------------------------------ in a process of its own


def run(job: dict[str, Any]) -> None:
    """One training, as its own process sees it; says on stdout how it ended."""
    stop = job.get("signal")
    rank = int(os.environ.get("RANK", "0"))
    try:
        with signalled(**stop) if stop else _nothing():
            train(job["kind"], Path(job["data"]), Path(job["out"]), **job["settings"])
        _say(f"{job['name']} rank {rank} done")
    except Stopped as stopped:
        _say(f"{job['name']} rank {rank} stopped {stopped.code}")


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # at once, so that two processes do not mix their lines


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def kill_often(job: dict[str, Any]) -> None:
    """Starts a training again and again and kills it without a warning, at moments drawn from a
    seed.
    """
    rng = random.Random(job["seed"])
    for _ in range(job["kills"]):
        child = os.fork()
        if not child:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
            run(job)
            os._exit(0)
        time.sleep(rng.uniform(*job["between"]))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        _say("killed" if os.WIFSIGNALED(status) else "finished")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:  # one group for all jobs
        torch.distributed.init_process_group("gloo")
    for task in json.loads(Path(sys.argv[1]).read_text("utf-8")):
        (kill_often if "kills" in task else run)(task)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.destroy_process_group()
