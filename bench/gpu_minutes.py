"""What minutes of one GPU buy: pre-training with nothing but the minutes set, and its judges.

    python bench/gpu_minutes.py bert --minutes 5 --text books.txt.xz reviews.txt.xz --judge DIR \
        --out OUT [--held-out FILE] [--set NAME=VALUE] [--wall SECONDS] [--limit tiny]

A masked model is fine-tuned with `malmoi.finetune`'s defaults on CoLA, RTE, STS-B and SST-2 of
DIR/glue, several processes on the card at a time, and judged on the development rows; every model
reads the minimal pairs of DIR/blimp.jsonl.xz, and the bits per byte of `--held-out` if it can.

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
from pathlib import Path
from typing import Any

from gpu_finetune import start_mps

TASKS = {"sst2": "SST-2", "cola": "CoLA", "stsb": "STS-B", "rte": "RTE"}
TINY = {"train.batch": 4, "model.width": 64, "model.depth": 2}


def finetune(job: tuple[str, int, Path, Path, bool]) -> dict[str, Any]:
    """One fine-tuning with the defaults; a failure does not end the others."""
    import malmoi

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    task, seed, folder, judge, tiny = job
    began = time.perf_counter()
    rows = judge / "glue" / TASKS[task]
    options: dict[str, Any] = {"steps": 2, "length": 32} if tiny else {"length": 128}
    try:
        out = folder.parent / f"{folder.name}-{task}-{seed}"
        done = malmoi.finetune(folder, task, rows, out, seed=seed, overwrite=True, **options)
        facts: dict[str, Any] = {"value": 100 * next(iter(done.metrics.values()))}
    except Exception as error:  # the others' results must not be lost
        facts = {"error": f"{type(error).__name__}: {error}"}
    found = {"task": task, "seed": seed, "seconds": time.perf_counter() - began, **facts}
    if "value" in found:
        judged_file(folder, task, seed).write_text(json.dumps(found), "utf-8")
    return found


def judged_file(folder: Path, task: str, seed: int) -> Path:
    return folder.parent / f"{folder.name}-{task}-{seed}.json"


def judge_glue(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Mean and deviation of each task over the seeds; SST-2, the longest, with one."""
    seeds = 1 if given.limit else given.seeds
    jobs = [
        (task, seed, folder, given.judge, bool(given.limit))
        for task in TASKS
        for seed in range(1 if task == "sst2" else seeds)
    ]
    kept = [judged_file(folder, task, seed) for task, seed, *_ in jobs]
    rows = [json.loads(path.read_text("utf-8")) for path in kept if path.is_file()]
    left = [job for job, path in zip(jobs, kept, strict=True) if not path.is_file()]
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


def judge_blimp(given: argparse.Namespace, model: Any) -> dict[str, float]:
    import malmoi

    both = model.config.both_ways
    each: tuple[dict[str, Any], ...] = ({"reading": "causal"}, {"reading": "masked"})
    readings = each if both else ({},)
    limit = 100 if given.limit else None
    pairs = given.judge / "blimp.jsonl.xz"
    return {
        reading.get("reading", "blimp"): 100
        * dict(malmoi.evaluate(model, "blimp", pairs, limit=limit, **reading))["accuracy"]
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
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="the JSON file [OUT/RECIPE.json]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--no-glue", action="store_true", help="BLiMP alone")
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
        result["blimp"] = judge_blimp(given, model)
        print(json.dumps(result["blimp"]), flush=True)
    if given.recipe != "gpt" and not given.no_glue:
        del model
        start_mps(given.out)
        result["glue"] = judge_glue(given, folder)
    target = given.results or given.out / f"{given.recipe}.json"
    target.write_text(json.dumps(result, indent=2), "utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "last"}))


if __name__ == "__main__":
    main()
