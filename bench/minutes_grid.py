"""The rule of `pretrain gpt` beside a grid of its neighbours and nanoGPT, at fixed minutes.

    malmoi bench minutes_grid shakespeare tinyshakespeare.txt --out OUT [--minutes 3]
        [--cores 4-15] [--each 2] [--set NAME=VALUE] [--only rule,wider] [--seed 0] [--beside]
    malmoi bench minutes_grid text-5 books.txt.xz reviews.txt.xz --out OUT --minutes 2 \
        --device cuda --each 4 [--nanogpt DIR --gpt2 DIR]

Every cell is a process of its own on `--each` cores of `--cores`, as many at a time as fit; on a
GPU they share the card, and the rule measures its share. The neighbours change one choice of the
rule each and keep the others as they were made here. Text and judge are those of a record. `--set`
changes the rule and with it every cell. A cell in OUT is not run again. `--beside` trains the rule
once more with every cell, at the same time, for machines whose speed changes within the hour. Linux
only: cores are pinned.

`--nanogpt` is a copy of karpathy/nanoGPT, whose train.py runs as it is with its defaults (12 × 768)
and GPT-2's tokenizer (`--gpt2`, a folder with tokenizer.json). It has no clock: a few steps are
timed first, and its schedule is set to the steps that fit. Give `--only nanogpt` and `--only rule`
for a card of their own.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _shared import benchmark_parser, core_groups, run_jobs, start_mps

START_SECONDS = 300  # beyond the minutes: imports, vocabulary, compilation, judging
ADAMW_RATE = 0.002  # for all weights
TIMED_STEPS = 12  # of nanoGPT; the first half is not counted
RULE = "rule"
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
        "AdamW": {"train.optimizer": "adamw", "train.lr": ADAMW_RATE},
        "rates × 1.5": {name: 1.5 * rate for name, rate in rates.items()},
        "dropout + 0.1": {"model.dropout": round(model["dropout"] + 0.1, 2)},
        "double context": {"model.context": 2 * context, "train.batch": train["batch"] // 2},
    }
    grid: dict[str, tuple[str, Settings]] = {RULE: ("gpt", {})}
    grid |= {name: ("gpt", chosen | settings) for name, settings in cells.items()}
    # another vocabulary has another number of tokens, so that the rest follows from it
    vocab = choice["tokenizer"]["vocab"]
    if vocab > 2048:
        for name, size in (("half vocabulary", vocab // 2), ("double vocabulary", 2 * vocab)):
            grid[name] = ("gpt", {"tokenizer.vocab": size})
    else:
        grid["characters"] = ("gpt", {"tokenizer.kind": "char", "tokenizer.vocab": 256})
        grid["gpt-char"] = ("gpt-char", {})
    return grid


# ------------------------------------------------------------------ inside a pinned process


def run_cell(job: dict[str, Any]) -> dict[str, Any]:
    """Trains for the minutes, then reads the held-out text."""
    if job["recipe"] == "choose":
        return rule_choice(job)
    began = time.perf_counter()
    row = nanogpt_cell(job) if job["recipe"] == "nanogpt" else our_cell(job)
    return row | {"seconds": round(time.perf_counter() - began)}


def rule_choice(job: dict[str, Any]) -> dict[str, Any]:
    """What `pretrain gpt` chooses on these cores."""
    from malmoi.training.pretrain import explain_size

    settings = {"train.minutes": job["minutes"], **job["settings"]}
    chosen = explain_size("gpt", [job["train"]], device=job["device"], **settings)
    return {**chosen.recipe.to_dict(), "reasons": [str(reason) for reason in chosen.reasons]}


def our_cell(job: dict[str, Any]) -> dict[str, Any]:
    from malmoi.studies.records import JUDGES, named_track
    from malmoi.training.pretrain import run_pretraining

    out = Path(job["out"])
    settings = {"train.minutes": job["minutes"], **job["settings"]}
    model = run_pretraining(
        job["recipe"], data=job["train"], out=out, device=job["device"], overwrite=True, **settings
    )
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
    }


def nanogpt_cell(job: dict[str, Any]) -> dict[str, Any]:
    """nanoGPT's own script, judged by bits per byte of the same held-out text."""
    import torch
    from tokenizers import Tokenizer

    folder, out = Path(job["nanogpt"]), Path(job["out"]).resolve()
    words = Tokenizer.from_file(str(Path(job["gpt2"]) / "tokenizer.json"))
    end = words.token_to_id("<|endoftext|>")
    data = out.parent / "nanogpt-data"
    encode_bins(words, end, Path(job["train"]), data)
    options = dict(
        dataset=os.path.relpath(data, folder.resolve() / "data"), out_dir=str(out), eval_iters=2
    )
    if job["device"] == "cpu":
        options |= dict(device="cpu", dtype="float32", compile=False)
    options |= job["nanogpt_options"]
    timed = nanogpt_script(folder, options | dict(max_iters=TIMED_STEPS, eval_interval=999))
    usual = timed[len(timed) // 2 :]
    steps = max(2, round(60_000 * job["minutes"] / (sum(usual) / len(usual))))
    schedule = dict(max_iters=steps, lr_decay_iters=steps, eval_interval=steps)
    nanogpt_script(folder, options | schedule | {"warmup_iters": max(1, min(2000, steps // 20))})
    sys.path.insert(0, str(folder))
    import model as nanogpt  # type: ignore[import-not-found]  # the module of that folder

    device = job["device"]
    saved = torch.load(out / "ckpt.pt", map_location=device, weights_only=False)
    shape, config = saved["model_args"], saved["config"]
    network = nanogpt.GPT(nanogpt.GPTConfig(**shape)).to(device).eval()
    weights = {name.removeprefix("_orig_mod."): one for name, one in saved["model"].items()}
    network.load_state_dict(weights)
    held_out = Path(job["held_out"]).read_text("utf-8")
    nats = window_nats(network, [end, *words.encode(held_out).ids], shape["block_size"], device)
    rows = config["batch_size"] * config["gradient_accumulation_steps"]
    return {
        "figure": nats / math.log(2) / len(held_out.encode()),
        "size": f"{shape['n_layer']} × {shape['n_embd']}",
        "vocab": shape["vocab_size"],
        "batch": f"{rows} × {shape['block_size']}",
        "dropout": shape["dropout"],
        "steps": steps,
        "tokens": rows * shape["block_size"] * steps,
        "train_loss": float(saved["best_val_loss"]),
    }


def window_nats(network: Any, ids: list[int], context: int, device: str) -> float:
    """Windows of `context` tokens, the second half judged; the first token is given."""
    import torch

    nats = 0.0
    half = context // 2
    whole = torch.tensor(ids, device=device)
    for start in range(0, len(ids) - 1, half):
        begin = max(0, start - half)
        end = min(start + half, len(ids) - 1)
        inputs, targets = whole[begin:end], whole[begin + 1 : end + 1]
        half_precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        with torch.no_grad(), half_precision:
            logits = network(inputs[None], targets[None])[0][0]
        each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        nats += float(each[start - begin :].sum())
    return nats


def encode_bins(words: Any, end: int, train: Path, folder: Path) -> None:
    """train.bin and val.bin as nanoGPT's own prepare.py writes them: uint16, documents ended."""
    import numpy as np

    from malmoi.text.documents import read_documents

    if (folder / "val.bin").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = [document.text for document in read_documents(str(train))]
    encoded = [[*one.ids, end] for one in words.encode_batch(texts)]
    ids = np.array([token for one in encoded for token in one], dtype=np.uint16)
    ids.tofile(folder / "train.bin")
    ids[-len(ids) // 100 :].tofile(folder / "val.bin")  # its own reports only


def nanogpt_script(folder: Path, options: dict[str, Any]) -> list[float]:
    """Runs train.py; the milliseconds of its steps."""
    command = [sys.executable, "train.py", *(f"--{k}={v}" for k, v in options.items())]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"nanoGPT failed: {ended.stderr[-2000:]}")
    return [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", ended.stdout, re.M)]


# ------------------------------------------------------------------ the grid


def print_rows(rows: dict[str, dict[str, Any]], judge: str) -> None:
    print(f"| cell | size | vocabulary | batch | dropout | steps | tokens | train | {judge} |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    for name, row in sorted(rows.items(), key=lambda pair: pair[1].get("figure", 99.0)):
        if "error" in row:
            print(f"| {name} | {row['error']} |")
            continue
        shown = [row[key] for key in ("size", "vocab", "batch", "dropout", "steps")]
        numbers = [
            f"{row['tokens'] / 1e6:.2f}M",
            f"{row['train_loss']:.3f}",
            f"{row['figure']:.4f}",
        ]
        print("| " + " | ".join(map(str, [name, *shown, *numbers])) + " |")


def run_grid(given: argparse.Namespace) -> None:
    # before torch counts the cores: of this process, which only waits, and of its children
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(given.each))
    from malmoi.studies.records import VALID_SHARE, machine_of, named_track, split_text

    began = time.perf_counter()
    track = named_track(given.track)
    train, held_out = split_text(track, given.text, given.out / "text")
    # as `malmoi records run` has them: the judge's text is held out already
    fixed: Settings = {"train.seed": given.seed, "data.valid": VALID_SHARE}
    base = fixed | dict(text.split("=", 1) for text in given.set)
    job = {"track": given.track, "train": train[0], "held_out": str(held_out)}
    job |= {"minutes": given.minutes, "device": given.device}
    if given.device == "cuda":
        start_mps(given.out)
    lanes = core_groups(given.cores, given.each)
    limit = 60 * given.minutes + START_SECONDS
    choose = {"choice": {**job, "recipe": "choose", "settings": base}}
    choice = run_jobs(run_cell, choose, given.out, lanes=lanes[:1], limit=limit)["choice"]
    if "error" in choice:
        raise SystemExit(f"The rule made no choice: {choice['error']}")
    print("\n".join(choice["reasons"]), flush=True)
    cells = neighbours(choice)
    jobs = {
        name: {
            **job,
            "recipe": recipe,
            "settings": {**(base if recipe == "gpt" else fixed), **settings},
            "out": str(given.out / name.replace(" ", "-")),
        }
        for name, (recipe, settings) in cells.items()
    }
    if given.nanogpt:
        peer = {"nanogpt": str(given.nanogpt), "gpt2": str(given.gpt2)}
        options = dict(text.split("=", 1) for text in given.nanogpt_set)
        place = {"out": str(given.out / "nanogpt"), "nanogpt_options": options}
        jobs["nanogpt"] = {**job, **peer, **place, "recipe": "nanogpt"}
    names = [name.strip() for name in given.only.split(",") if name.strip()] or list(jobs)
    if unknown := [name for name in names if name not in jobs]:
        raise SystemExit(f"There is no cell {unknown[0]!r}: {', '.join(jobs)}.")
    twins = {f"{RULE}, beside {n}": n for n in names if n != RULE} if given.beside else {}
    for twin in twins:
        jobs[twin] = {**jobs[RULE], "out": str(given.out / twin.replace(" ", "-"))}
    rows: dict[str, dict[str, Any]] = {}
    for together in twins.items() or [names]:
        some = {name: jobs[name] for name in together}
        rows |= run_jobs(run_cell, some, given.out, lanes=lanes, fresh=True, limit=limit)
    print_rows(rows, track.judge)
    judged = {name: row["figure"] for name, row in rows.items() if "figure" in row}
    pairs = twins.items() or [(RULE, name) for name in names]
    gaps = [(judged[a], judged[b], b) for a, b in pairs if {a, b} <= judged.keys()]
    if gaps:
        ours, best, cell = max(gaps, key=lambda gap: gap[0] / gap[1])
        above = max(0.0, ours / best - 1)
        print(f"rule {ours:.4f}, {cell} {best:.4f}: at most {above:.1%} above any cell")
    machine = machine_of(given.device)
    print(f"{time.perf_counter() - began:.0f} s on {machine}, {len(lanes)} at a time")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("track", choices=("shakespeare", "text-5"))
    parser.add_argument("text", nargs="+", help="the track's text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--cores", default="", help="such as 4-15 [all]")
    parser.add_argument("--each", type=int, default=2, help="cores of a cell [2]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", default="", metavar="CELL,…", help="these cells alone")
    parser.add_argument("--beside", action="store_true", help="every cell at once with the rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR")
    parser.add_argument("--gpt2", type=Path, metavar="DIR", help="GPT-2's tokenizer, for nanoGPT")
    parser.add_argument("--nanogpt-set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    if given.beside and len(core_groups(given.cores, given.each)) != 2:
        parser.error("--beside needs the cores of two cells: --cores 0-1 --each 1")
    if given.nanogpt and not given.gpt2:
        parser.error("nanoGPT needs GPT-2's tokenizer: --gpt2 DIR")
    run_grid(given)


if __name__ == "__main__":
    main()
