"""The rule of `pretrain gpt` beside a grid of its neighbours, at fixed minutes of one machine.

    python bench/minutes_grid.py shakespeare tinyshakespeare.txt --out OUT [--minutes 3]
        [--cores 4-15] [--each 2] [--set NAME=VALUE] [--only rule,wider] [--seed 0]
    python bench/minutes_grid.py text-5 books.txt.xz reviews.txt.xz --out OUT --minutes 2 \
        --device cuda --each 4

Every cell is a process of its own on `--each` cores of `--cores`, as many at a time as fit; on a
GPU they share the card, and the rule measures its share. The neighbours change one choice of the
rule each and keep the others as they were made here. Text and judge are those of a record. `--set`
changes the rule and with it every cell. Linux only: cores are pinned.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_finetune import start_mps

START_SECONDS = 300  # beyond the minutes: imports, vocabulary, compilation, judging
Settings = dict[str, Any]


def neighbours(choice: dict[str, Any]) -> dict[str, tuple[str, Settings]]:
    """Name → (recipe, settings) around the rule's choice, the rule itself first."""
    model = choice["model"]
    train = choice["train"]
    width, depth, context = model["width"], model["depth"], model["context"]
    rates = {"train.muon_lr": train["muon_lr"], "train.lr": train["lr"]}
    # what is not named would follow from what is: a cell would change more than its one choice
    chosen: Settings = {
        **{f"model.{name}": model[name] for name in ("width", "depth", "context", "dropout")},
        **{f"train.{name}": train[name] for name in ("batch", "muon_decay")},
        "tokenizer.vocab": choice["tokenizer"]["vocab"],
    }
    cells: dict[str, Settings] = {
        "narrower": {"model.width": max(64, width * 3 // 4 // 64 * 64)},
        "wider": {"model.width": (width * 4 // 3 // 64 + 1) * 64},
        "shallower": {"model.depth": max(1, depth - 1)},
        "deeper": {"model.depth": depth + 2},
        "half batch": {"train.batch": max(1, train["batch"] // 2)},
        "double batch": {"train.batch": 2 * train["batch"]},
        "rates × 1.5": {name: 1.5 * rate for name, rate in rates.items()},
        "dropout + 0.1": {"model.dropout": round(model["dropout"] + 0.1, 2)},
        "double context": {"model.context": 2 * context, "train.batch": train["batch"] // 2},
    }
    found: dict[str, tuple[str, Settings]] = {"rule": ("gpt", {})}
    found |= {name: ("gpt", chosen | settings) for name, settings in cells.items()}
    # another vocabulary has another number of tokens, so that the rest follows from it
    vocab = choice["tokenizer"]["vocab"]
    if vocab > 2048:
        for name, size in (("half vocabulary", vocab // 2), ("double vocabulary", 2 * vocab)):
            found[name] = ("gpt", {"tokenizer.vocab": size})
    else:
        found["characters"] = ("gpt", {"tokenizer.kind": "char", "tokenizer.vocab": 256})
        found["gpt-char"] = ("gpt-char", {})
    return found


# ------------------------------------------------------------------ inside a pinned process


def rule_choice(job: dict[str, Any]) -> dict[str, Any]:
    """What `pretrain gpt` chooses on these cores."""
    from malmoi.training.pretrain import explain_size

    settings = {"train.minutes": job["minutes"], **job["settings"]}
    chosen = explain_size("gpt", [job["train"]], device=job["device"], **settings)
    return {**chosen.recipe.to_dict(), "reasons": chosen.reasons}


def run_cell(job: dict[str, Any]) -> dict[str, Any]:
    """Trains for the minutes, then reads the held-out text."""
    from malmoi.studies.records import JUDGES, named_track
    from malmoi.training.pretrain import run_pretraining

    began = time.perf_counter()
    out = Path(job["out"])
    settings = {"train.minutes": job["minutes"], **job["settings"]}
    model = run_pretraining(
        job["recipe"],
        data=job["train"],
        out=out,
        device=job["device"],
        overwrite=True,
        **settings,
    )
    trained = time.perf_counter() - began
    judge = JUDGES[named_track(job["track"]).judge]
    (figure,) = judge(model, Path(job["held_out"]), None, out).values()
    recipe = json.loads((out / "recipe.json").read_text("utf-8"))
    lines = map(json.loads, (out / "metrics.jsonl").read_text("utf-8").splitlines())
    last = [line for line in lines if "loss" in line][-1]
    return {
        "figure": figure,
        "size": f"{model.config.depth} × {model.config.width}",
        "vocab": model.config.vocab,
        "batch": f"{recipe['train']['batch']} × {model.config.context}",
        "dropout": model.config.dropout,
        "steps": last["step"],
        "tokens": last["tokens"],
        "train_loss": last["loss"],
        "train_seconds": round(trained),
        "seconds": round(time.perf_counter() - began),
    }


def worker(job: dict[str, Any]) -> None:
    """A child process: pins itself before torch counts the cores; the last line is its answer."""
    os.sched_setaffinity(0, job["cores"])
    answer = rule_choice(job) if job["recipe"] == "choose" else run_cell(job)
    print(json.dumps(answer))


# ------------------------------------------------------------------ the grid


def start(job: dict[str, Any], cores: set[int], seconds: float) -> dict[str, Any]:
    """One child process on these cores; a failure is a row, so that the others are not lost."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(len(cores)))
    command = [sys.executable, __file__, "--job", json.dumps(job | {"cores": sorted(cores)})]
    try:
        done = subprocess.run(
            command, env=os.environ | threads, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {seconds:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def core_groups(text: str, each: int) -> list[set[int]]:
    """'4-15' or '0,1' as groups of `each` cores; empty: the cores this process may use."""
    if text:
        ends = [part.split("-") for part in text.split(",")]
        cores = [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]
    else:
        cores = sorted(os.sched_getaffinity(0))
    groups = [set(cores[i : i + each]) for i in range(0, len(cores) - each + 1, each)]
    if not groups:
        raise SystemExit(f"--cores {text} are fewer than {each}.")
    return groups


def print_rows(rows: list[dict[str, Any]], judge: str) -> None:
    print(f"| cell | size | vocabulary | batch | dropout | steps | tokens | train | {judge} |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: row.get("figure", 99.0)):
        if "error" in row:
            print(f"| {row['cell']} | {row['error']} |")
            continue
        shown = [row[name] for name in ("cell", "size", "vocab", "batch", "dropout", "steps")]
        tokens = f"{row['tokens'] / 1e6:.2f}M"
        losses = [f"{row['train_loss']:.3f}", f"{row['figure']:.4f}"]
        print("| " + " | ".join(map(str, [*shown, tokens, *losses])) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("track", nargs="?", choices=("shakespeare", "text-5"))
    parser.add_argument("text", nargs="*", help="the track's text")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--cores", default="", help="such as 4-15 [all]")
    parser.add_argument("--each", type=int, default=2, help="cores of a cell [2]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", default="", metavar="CELL,…", help="these cells alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        worker(given.job)
        return
    if not (given.text and given.out):
        parser.error("give the track, its text and --out")
    run_grid(given)


def run_grid(given: argparse.Namespace) -> None:
    began = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"  # of this process, which only waits
    from malmoi.studies.records import VALID_SHARE, machine_of, named_track, split_text

    track = named_track(given.track)
    train, held_out = split_text(track, given.text, given.out / "text")
    base: Settings = dict(text.split("=", 1) for text in given.set)
    # as `malmoi records run` has them: the judge's text is held out already
    fixed = {"train.seed": given.seed, "data.valid": VALID_SHARE}
    base = fixed | base
    job = {"track": given.track, "train": train[0], "held_out": str(held_out)}
    job |= {"minutes": given.minutes, "device": given.device}
    if given.device == "cuda":
        start_mps(given.out)
    groups = core_groups(given.cores, given.each)
    limit = 60 * given.minutes + START_SECONDS
    choice = start({**job, "recipe": "choose", "settings": base}, groups[0], limit)
    if "error" in choice:
        raise SystemExit(f"The rule made no choice: {choice['error']}")
    print("\n".join(choice["reasons"]), flush=True)
    cells = neighbours(choice)
    names = [name.strip() for name in given.only.split(",") if name.strip()] or list(cells)
    if unknown := [name for name in names if name not in cells]:
        raise SystemExit(f"There is no cell {unknown[0]!r}: {', '.join(cells)}.")
    free: queue.Queue[set[int]] = queue.Queue()
    for group in groups:
        free.put(group)

    def one(name: str) -> dict[str, Any]:
        recipe, settings = cells[name]
        cores = free.get()
        shared = base if recipe == "gpt" else fixed
        where = str(given.out / name.replace(" ", "-"))
        cell = {**job, "recipe": recipe, "settings": {**shared, **settings}, "out": where}
        row = {"cell": name, **start(cell, cores, limit)}
        free.put(cores)
        print(json.dumps(row, ensure_ascii=False), flush=True)
        return row

    with ThreadPoolExecutor(len(groups)) as pool:
        rows = list(pool.map(one, names))
    facts = {
        "machine": machine_of(given.device),
        "minutes": given.minutes,
        "cores_each": given.each,
        "at_a_time": len(groups),
        "settings": base,
        "choice": choice,
        "rows": rows,
        "seconds": round(time.perf_counter() - began),
    }
    (given.out / "grid.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False), "utf-8")
    print_rows(rows, track.judge)
    judged = {r["cell"]: r["figure"] for r in rows if "figure" in r}
    if "rule" in judged:
        best = min(judged, key=lambda cell: judged[cell])
        above = judged["rule"] / judged[best] - 1
        print(f"rule {judged['rule']:.4f}, best {judged[best]:.4f} ({best}): {above:.1%} above it")
    print(f"{facts['seconds']} s on {facts['machine']}, {len(groups)} at a time")


if __name__ == "__main__":
    main()
