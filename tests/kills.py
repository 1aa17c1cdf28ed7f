"""Every kind of run, killed at random moments until it is done: `python kills.py FOLDER SEED KILLS
[RUN…]`.

A run is done once without a kill, for its files and its time. Then it is started again and again
and killed without a warning, at moments drawn from that time; all of them must come to the same
files, to the bit. States are saved after every step, so that many kills fall into a save. Then it
is killed inside of its saves: at one of its operations on files, drawn by its number. Prints one
line of JSON a kind. See test_kills.py.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from malmoi import finetune
from malmoi.checkpoint import weights
from malmoi.cli import run_command
from malmoi.compression.distil import distil_model
from malmoi.corpus.build import run_build
from malmoi.finetuning.trainer import FinetuneTrainer
from tiny_runs import WORDS, train, write_corpus

# what a run is for: its weights, what it said, its text; not its clock
RESULTS = (
    "*.safetensors",
    "predictions.jsonl",
    "tokenizer.json",
    "vocab.*",
    "merges.txt",
    "shard-*.jsonl",
    "new.csv",
    "report.json",
)
# operations on files that come between a save's beginning and its end
OPERATIONS = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir", "chmod")
TUNED: dict[str, Any] = dict(steps=12, batch=8, lr=1e-3, precision="fp32", evaluations=3)
SAVED: dict[str, Any] = {"steps": 12, "train.save_every": 1}


class Bench:
    """The text, the rows and the models that the runs start from."""

    def __init__(self, root: Path) -> None:
        self.text = write_corpus(root / "text.txt")
        draw = random.Random(0)
        rows = [" ".join(draw.choices(WORDS, k=draw.randint(3, 14))) for _ in range(60)]
        self.rows = root / "rows.tsv"
        lines = [f"{row}\t{'yes' if 'law' in row else 'no'}\n" for row in rows]
        self.rows.write_text("text\tlabel\n" + "".join(lines), "utf-8")
        self.gpt, self.bert, self.teacher = (root / name for name in ("gpt", "bert", "teacher"))
        train("gpt", self.text, self.gpt, steps=2)
        train("bert", self.text, self.bert, steps=2)
        self.tune(self.bert, self.teacher)

    def tune(self, model: Path, out: Path, **changes: Any) -> None:
        finetune(
            model, "classification", self.rows, out, self.rows, device="cpu", **{**TUNED, **changes}
        )

    def jobs(self) -> dict[str, Callable[[Path], object]]:
        taught = {**TUNED, "task": "classification", "dev": self.rows, "layers": 1, "device": "cpu"}
        spoken = {"layers": 1, "device": "cpu", **SAVED, "train.compile": False}
        return {
            "pre-training a GPT": lambda out: train("gpt", self.text, out, **SAVED),
            "pre-training a BERT": lambda out: train("bert", self.text, out, **SAVED),
            "fine-tuning a BERT": lambda out: self.tune(self.bert, out),
            "fine-tuning a GPT with the auxiliary loss": lambda out: self.tune(
                self.gpt, out, lm=0.5
            ),
            "fine-tuning with two seeds": lambda out: self.tune(self.gpt, out, seeds=2),
            "LoRA": lambda out: self.tune(
                self.gpt, out, **{"adapter.kind": "lora", "adapter.rank": 2}
            ),
            "distillation of a task": lambda out: distil_model(
                self.teacher, out, self.rows, **taught
            ),
            "distillation of text": lambda out: distil_model(self.gpt, out, self.text, **spoken),
            "a vocabulary": self.learn_vocabulary,
            "predictions": self.predict,
            "a smaller model": self.quantize,
            "a corpus": lambda out: run_build([str(self.text)], out, shard=2_000),
        }

    def learn_vocabulary(self, out: Path) -> None:
        kind = ("--kind", "byte-bpe", "--vocab", "400")
        command("tokenizer", "train", self.text, *kind, out=out)

    def predict(self, out: Path) -> None:
        out.mkdir(exist_ok=True)
        command("predict", "-m", self.teacher, self.rows, out=out / "new.csv")

    def quantize(self, out: Path) -> None:
        command("compress", "quantize", "-m", self.gpt, out=out)


def command(*words: object, out: Path) -> None:
    """A command as a user types it: it comes to a good end, or says that it has before."""
    code = run_command([*map(str, words), "-o", str(out)])
    assert code == 0 or (code == 2 and out.exists() and not list(out.glob(".unfinished-*"))), words


def die_at(number: int, tally: Path) -> None:
    """Makes this process kill itself at this operation on files; 0: count them all."""
    calls = count(1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            here = next(calls)
            if number == 0:
                tally.write_text(str(here))
            elif here == number:
                if original is weights.save_file:  # the library writes to a file of its own first
                    given[1].with_name(".tmpABCDEF").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        return call

    weights.save_file = counted(weights.save_file)  # type: ignore[attr-defined]
    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def start(job: Callable[[Path], object], out: Path, number: int | None = None) -> int:
    """The job in a process of its own, quiet, at the head of a group; see `die_at`."""
    child = os.fork()
    if child:
        with suppress(OSError):  # the first of the two makes the group
            os.setpgid(child, child)
        return child
    os.setpgid(0, 0)
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    if number is not None:
        die_at(number, out.with_suffix(".count"))
    try:
        job(out)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(code)


def wait(child: int) -> bool:
    """Whether it came to a good end."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def results(out: Path) -> dict[str, str]:
    found = {
        path
        for pattern in RESULTS
        for path in out.rglob(pattern)
        if "train_state" not in path.parts
    }
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(found)
    }


def kill_often(
    job: Callable[[Path], object], folder: Path, draw: random.Random, kills: int
) -> dict[str, Any]:
    """Kills the job this many times; whenever it got to its end before that, it begins anew in
    another folder.
    """
    folder.mkdir(parents=True)
    whole = folder / "whole"
    began = time.monotonic()
    assert wait(start(job, whole)), whole.with_suffix(".log").read_text("utf-8")[-2000:]
    seconds = time.monotonic() - began
    killed = 0
    cuts = [folder / "cut-0"]
    while killed < kills:
        child = start(job, cuts[-1])
        time.sleep(draw.uniform(0, seconds))
        os.killpg(child, signal.SIGKILL)
        if wait(child):
            cuts.append(folder / f"cut-{len(cuts)}")
        else:
            killed += 1
    good = wait(start(job, cuts[-1]))
    return {"kills": killed, "runs": len(cuts), "resumed": good, **compared(whole, cuts)}


def kill_inside_saves(
    job: Callable[[Path], object], folder: Path, draw: random.Random, kills: int
) -> dict[str, Any]:
    """Kills the job at one operation on files, lets it be repeated, and again from the start."""
    whole = folder / "counted"
    assert wait(start(job, whole, 0)), whole.with_suffix(".log").read_text("utf-8")[-2000:]
    operations = int(whole.with_suffix(".count").read_text())
    cuts, good = [], True
    for number in draw.sample(range(1, operations + 1), min(kills, operations)):
        cuts.append(folder / f"at-{number}")
        good = not wait(start(job, cuts[-1], number)) and wait(start(job, cuts[-1])) and good
    found = {"operations": operations, "inside": len(cuts), "repeated": good}
    return {**found, **{f"inside_{key}": value for key, value in compared(whole, cuts).items()}}


def compared(whole: Path, cuts: Sequence[Path]) -> dict[str, Any]:
    """Whether all results are equal, and what was left half-written or unreadable by others."""
    equal = [bool(results(whole)) and results(cut) == results(whole) for cut in cuts]
    files = [path for cut in cuts for path in cut.rglob("*")]
    half = [
        path.name
        for path in files
        if path.name.startswith(".") and (path.suffix in (".tmp", ".old") or ".tmp" in path.name)
    ]
    private = [path.name for path in files if path.is_file() and not path.stat().st_mode & 0o040]
    return {"equal": all(equal), "left": half, "private": private}


def main(root: Path, seed: int, kills: int, only: Sequence[str] = ()) -> None:
    torch.set_num_threads(1)
    os.umask(0o022)
    FinetuneTrainer.seconds_between_saves = -1.0
    (root / "in").mkdir(parents=True)
    bench = Bench(root / "in")
    for number, (name, job) in enumerate(bench.jobs().items()):
        if only and name not in only:
            continue
        draw = random.Random(seed * 100 + number)
        tally = kill_often(job, root / str(number), draw, kills)
        tally |= kill_inside_saves(job, root / str(number), draw, kills)
        print(json.dumps({"run": name, **tally}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
