"""What minutes of one GPU buy: pre-training with nothing but the minutes set, and its judges.

    python bench/gpu_minutes.py bert --minutes 5 --text books.txt.xz reviews.txt.xz --judge DIR \
        --out OUT [--language ko] [--held-out FILE] [--set NAME=VALUE] [--wall SECONDS]
        [--limit tiny]

A masked model is fine-tuned with `malmoi.finetune`'s defaults on CoLA, RTE, STS-B and SST-2
(`--language ko`: NSMC, KorSTS and KLP-2016), several processes on the card at a time, and judged on
rows that select nothing: GLUE's development rows, the Korean sets' test rows. Every model reads
BLiMP's minimal pairs (Kontrast's), and the bits per byte of `--held-out` if it can. DIR holds the
files named in `FILES` and `PAIRS`.

Where a command may run for ten minutes only: `--wall 560` stops the training after so many seconds
of this process, saved, and the same command resumes it, then judges; each judgement that is
finished is kept too, so the command may be repeated until the table is complete.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import statistics
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_finetune import FILES as GLUE
from gpu_finetune import start_mps

FILES = {
    "en": {task: GLUE[task] for task in ("sst2", "cola", "stsb", "rte")},
    "ko": {
        "nsmc": ("ko/nsmc.train.txt.xz", "ko/nsmc.test.txt.xz"),
        "korsts": ("ko/korsts.sts-train.tsv.xz", "ko/korsts.sts-test.tsv.xz"),
        "klp2016": ("ner/klp2016.ko.train.txt.xz", "ner/klp2016.ko.test.txt.xz"),
    },
}
ONCE = ("sst2", "nsmc")  # the longest have one seed
PAIRS = {"en": ("blimp", "incontext/blimp.jsonl.xz"), "ko": ("kontrast", "ko/kontrast.csv")}
TINY = {"train.batch": 4, "model.width": 64, "model.depth": 2}


@dataclass(frozen=True)
class Job:
    """One fine-tuning of the model in `folder`."""

    task: str
    seed: int
    folder: Path
    rows: Path
    judge: Path
    tiny: bool

    @property
    def out(self) -> Path:
        return self.folder.parent / f"{self.folder.name}-{self.task}-{self.seed}"

    @property
    def result(self) -> Path:
        return self.out.with_suffix(".json")


def finetune(job: Job) -> dict[str, Any]:
    """One fine-tuning with the defaults; a failure does not end the others."""
    import malmoi

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    options: dict[str, Any] = {"steps": 2, "length": 32} if job.tiny else {"length": 128}
    try:
        done = malmoi.finetune(
            job.folder,
            job.task,
            job.rows,
            job.out,
            job.judge,
            seed=job.seed,
            overwrite=True,
            **options,
        )
        facts: dict[str, Any] = {"value": 100 * next(iter(done.metrics.values()))}
    except Exception as error:  # the others' results must not be lost
        facts = {"error": f"{type(error).__name__}: {error}"}
    found = {"task": job.task, "seed": job.seed, "seconds": time.perf_counter() - began, **facts}
    if "value" in found:
        job.result.write_text(json.dumps(found), "utf-8")
    return found


def judge_tasks(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Mean and deviation of each task over the seeds."""
    jobs = [
        Job(task, seed, folder, given.judge / rows, given.judge / judge, bool(given.limit))
        for task, (rows, judge) in FILES[given.language].items()
        for seed in range(1 if given.limit or task in ONCE else given.seeds)
    ]
    kept = [job.result for job in jobs if job.result.is_file()]
    rows = [json.loads(path.read_text("utf-8")) for path in kept]
    left = [job for job in jobs if not job.result.is_file()]
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for one in pool.imap_unordered(finetune, left):
            print(json.dumps(one), flush=True)
            rows.append(one)
    found: dict[str, list[float]] = {}
    for one in rows:
        if "value" in one:
            found.setdefault(one["task"], []).append(one["value"])
    return {
        task: {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "values": values,
        }
        for task, values in found.items()
    }


def judge_pairs(given: argparse.Namespace, model: Any) -> dict[str, float]:
    import malmoi

    task, file = PAIRS[given.language]
    both = model.config.both_ways
    each: tuple[dict[str, Any], ...] = ({"reading": "causal"}, {"reading": "masked"})
    readings = each if both else ({},)
    limit = 100 if given.limit else given.pairs
    return {
        reading.get("reading", task): 100
        * dict(malmoi.evaluate(model, task, given.judge / file, limit=limit, **reading))["accuracy"]
        for reading in readings
    }


def train(given: argparse.Namespace, folder: Path) -> Any:
    """The trained model; none if `--wall` ended the training before its minutes were over."""
    import malmoi
    from malmoi.training.signals import Stopped

    settings: dict[str, object] = dict(text.split("=", 1) for text in given.set)
    settings |= TINY if given.limit else {}
    # SIGTERM is how the trainer is asked to save and stop
    timer = threading.Timer(given.wall, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    if given.wall:
        timer.start()
    try:
        return malmoi.pretrain(
            given.recipe, data=given.text, out=folder, minutes=given.minutes, settings=settings
        )
    except Stopped:
        return None
    finally:
        timer.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=("gpt", "bert", "both"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--language", choices=tuple(FILES), default="en")
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="the JSON file [OUT/RECIPE.json]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--no-tasks", action="store_true", help="minimal pairs alone")
    parser.add_argument("--pairs", type=int, help="of the minimal pairs only so many")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--wall", type=float, default=0.0, help="seconds until training is saved")
    parser.add_argument("--limit", choices=("tiny",), help="a dry run on a CPU")
    given = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = given.out / given.recipe
    model = train(given, folder)
    if model is None:
        print("The training was saved after --wall seconds: the same command resumes it.")
        return
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    last = [json.loads(line) for line in lines if "valid_loss" in line][-1]
    result: dict[str, Any] = {"recipe": given.recipe, "minutes": given.minutes, "last": last}
    result["size"] = f"{model.config.depth} x {model.config.width}"
    print(json.dumps(result), flush=True)
    if given.held_out and given.recipe != "bert":
        result["bits_per_byte"] = model.bits_per_byte(given.held_out.read_text("utf-8"))
    if "objective=electra" not in given.set:  # a detector gives no probabilities of tokens
        result["pairs"] = judge_pairs(given, model)
        print(json.dumps(result["pairs"]), flush=True)
    if given.recipe != "gpt" and not given.no_tasks:
        del model
        start_mps(given.out)
        result["tasks"] = judge_tasks(given, folder)
    target = given.results or given.out / f"{given.recipe}.json"
    target.write_text(json.dumps(result, indent=2), "utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "last"}))


if __name__ == "__main__":
    main()
