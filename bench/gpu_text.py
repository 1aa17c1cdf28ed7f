"""Bits per byte after the same minutes of one GPU: `pretrain gpt` beside other people's scripts.

    python bench/gpu_text.py --minutes 5 --text books.txt.xz reviews.txt.xz --out OUT \
        --nanogpt DIR --gpt2 DIR --autoresearch DIR [--only ours,nanogpt,autoresearch]

The text and its held-out documents are those of the record `text-5`. DIR are copies of
karpathy/nanoGPT and karpathy/autoresearch; their training code runs as it is. All read the held-out
text in windows of their context, half of each as context. A row in OUT is not run again, so that
the rows may come from several calls.

nanoGPT: its defaults (12 × 768) with GPT-2's tokenizer (`--gpt2`, a folder with tokenizer.json); it
has no clock, so a few steps are timed first and its schedule is set to the steps that fit
(`--nanogpt-steps` if that number is known).
autoresearch: a byte-level BPE of 8,192 learnt from the training text; FlashAttention 3, which is
downloaded, is replaced by SDPA over the full causal window, and long documents are cut.
Compilation is free for all. All rows prepare their text at the same time, then take turns on the
card.
"""

import argparse
import fcntl
import importlib
import importlib.util
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRACK = "text-5"
MAX_CHARACTERS = 8000  # of a document for autoresearch: a row of its 2,048 tokens
TIMED_STEPS = 12  # of nanoGPT; the first half is not counted
TINY_OURS = {"train.batch": 4, "model.width": 64, "model.depth": 2}
TINY_NANOGPT = dict(n_layer=1, n_head=2, n_embd=32, block_size=64, batch_size=2)
# autoresearch has no options: a dry run on a CPU rewrites its constants
TINY_AUTORESEARCH = (
    (r'"cuda"', '"cpu"'),
    (r"pin_memory=True", "pin_memory=False"),
    (r"@torch\.compile\(.*\)\n", ""),
    (r"torch\.compile\(model, dynamic=False\)", "model"),
    (r"torch\.bfloat16", "torch.float32"),
    (r"\.bfloat16\(\)", ".float()"),
    (r"MAX_SEQ_LEN = 2048", "MAX_SEQ_LEN = 64"),
    (r"DEPTH = 8 ", "DEPTH = 2 "),
    (r"DEVICE_BATCH_SIZE = 128", "DEVICE_BATCH_SIZE = 2"),
    (r"TOTAL_BATCH_SIZE = 2\*\*19", "TOTAL_BATCH_SIZE = 128"),
)
Score = Callable[[Any, Any], Any]  # inputs and targets [1, T] → nats of each target [T]


def bits_per_byte(score: Score, ids: list[int], size: int, context: int, device: str) -> float:
    """Windows of `context` tokens, the second half judged; the first token of `ids` is given."""
    import torch

    nats = 0.0
    half = context // 2
    whole = torch.tensor(ids, device=device)
    for start in range(0, len(ids) - 1, half):
        begin = max(0, start - half)
        end = min(start + half, len(ids) - 1)
        # one shape for all, so that nothing is compiled again
        row = torch.zeros(context + 1, dtype=torch.long, device=device)
        row[: end - begin + 1] = whole[begin : end + 1]
        with torch.no_grad():
            each = score(row[None, :-1], row[None, 1:])
        nats += float(each.float()[start - begin : end - begin].sum())
    return nats / math.log(2) / size


@contextmanager
def alone(given: argparse.Namespace, name: str) -> Iterator[None]:
    """What only one row may do at a time, such as using the card."""
    with (given.out / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------ ours


def run_ours(given: argparse.Namespace, train: Path, held_out: str) -> dict[str, Any]:
    import malmoi

    folder = given.out / "ours"
    settings = TINY_OURS if given.limit else {}
    with alone(given, "card"):
        model = malmoi.pretrain(
            "gpt", data=train, out=folder, minutes=given.minutes, settings=settings
        )
    lines = [json.loads(n) for n in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    last = [line for line in lines if "valid_loss" in line][-1]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {
        "bits_per_byte": model.bits_per_byte(held_out),
        "size": f"{model.config.depth} × {model.config.width}",
        "tokens": last["tokens"],
        "steps": last["step"],
        "train_loss": losses[-1],
        "valid_loss": last["valid_loss"],
    }


# ------------------------------------------------------------------ nanoGPT


def run_nanogpt(given: argparse.Namespace, train: Path, held_out: str) -> dict[str, Any]:
    import torch
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(given.gpt2 / "tokenizer.json"))
    data = given.out / "nanogpt-data"
    end = words.token_to_id("<|endoftext|>")
    encode_bins(words, end, train, data)
    tiny = bool(given.limit)
    shape = TINY_NANOGPT | dict(gradient_accumulation_steps=1) if tiny else {}
    options = shape | dict(
        dataset=os.path.relpath(data, given.nanogpt / "data"),
        out_dir=str((given.out / "nanogpt").resolve()),
        eval_iters=2,
        compile=not tiny,
    )
    if tiny:
        options |= dict(device="cpu", dtype="float32")
    with alone(given, "card"):
        steps = given.nanogpt_steps or nanogpt_steps(given, options)
        schedule = dict(max_iters=steps, lr_decay_iters=steps, eval_interval=steps)
        schedule["warmup_iters"] = max(1, min(2000, steps // 20))
        took = nanogpt_script(given.nanogpt, options | schedule)
    sys.path.insert(0, str(given.nanogpt))
    import model as nanogpt  # type: ignore[import-not-found]  # the module of that folder

    device = "cpu" if tiny else "cuda"
    saved = torch.load(given.out / "nanogpt" / "ckpt.pt", map_location=device, weights_only=False)
    network = nanogpt.GPT(nanogpt.GPTConfig(**saved["model_args"])).to(device).eval()
    weights = {name.removeprefix("_orig_mod."): one for name, one in saved["model"].items()}
    network.load_state_dict(weights)

    def score(inputs: Any, targets: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=not tiny):
            logits = network(inputs, targets)[0]
        return torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="none")

    ids = [end, *words.encode(held_out).ids]
    context = saved["model_args"]["block_size"]
    config = saved["config"]
    each = config["batch_size"] * context * config["gradient_accumulation_steps"]
    return {
        "bits_per_byte": bits_per_byte(score, ids, len(held_out.encode()), context, device),
        "size": f"{saved['model_args']['n_layer']} × {saved['model_args']['n_embd']}",
        "tokens": each * steps,
        "steps": steps,
        "train_seconds": round(sum(took) / 1000),
    }


def encode_bins(words: Any, end: int, train: Path, folder: Path) -> None:
    """train.bin and val.bin as nanoGPT's own prepare.py writes them: uint16, documents ended."""
    import numpy as np

    if (folder / "val.bin").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(read_lines(train))
    found = [[*one.ids, end] for one in words.encode_batch(texts)]
    ids = np.array([token for one in found for token in one], dtype=np.uint16)
    ids.tofile(folder / "train.bin")
    ids[-len(ids) // 100 :].tofile(folder / "val.bin")  # its own reports only


def nanogpt_steps(given: argparse.Namespace, options: dict[str, Any]) -> int:
    """The steps that fit into the minutes."""
    timed = nanogpt_script(given.nanogpt, options | dict(max_iters=TIMED_STEPS, eval_interval=999))
    usual = timed[len(timed) // 2 :]
    return max(2, round(60_000 * given.minutes / (sum(usual) / len(usual))))


def nanogpt_script(folder: Path, options: dict[str, Any]) -> list[float]:
    """Runs train.py; the milliseconds of its steps."""
    command = [sys.executable, "train.py", *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"nanoGPT failed: {done.stderr[-2000:]}")
    return [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", done.stdout, re.M)]


# ------------------------------------------------------------------ autoresearch


class Words:
    """autoresearch's Tokenizer over a vocabulary of the tokenizers library."""

    def __init__(self, words: Any, bos: int) -> None:
        self.words = words
        self.bos = bos
        self.known: dict[str, list[int]] = {}  # a text is read many times and encoded once

    def get_vocab_size(self) -> int:
        return int(self.words.get_vocab_size())

    def get_bos_token_id(self) -> int:
        return self.bos

    def encode(self, text: Any, prepend: int | None = None, num_threads: int = 8) -> Any:
        first = [] if prepend is None else [prepend]
        if isinstance(text, str):
            return first + self.words.encode(text).ids
        new = [one for one in text if one not in self.known]
        self.known |= {t: e.ids for t, e in zip(new, self.words.encode_batch(new), strict=True)}
        return [first + self.known[one] for one in text]


def run_autoresearch(given: argparse.Namespace, train: Path, held_out: str) -> dict[str, Any]:
    import torch
    from tokenizers.trainers import BpeTrainer

    # its packing takes the documents that fit a row, and would never take a novel
    whole = list(read_lines(train))
    texts = [t[i : i + MAX_CHARACTERS] for t in whole for i in range(0, len(t), MAX_CHARACTERS)]
    random.Random(0).shuffle(texts)
    words = byte_level_bpe()
    vocab = 512 if given.limit else 8192
    words.train_from_iterator(
        texts, BpeTrainer(vocab_size=vocab, special_tokens=["<|reserved_0|>"], show_progress=False)
    )
    own = Words(words, 0)
    own.encode(texts)
    prepare = load_prepare(given)
    budget = {"TIME_BUDGET": 60 * given.minutes, "EVAL_TOKENS": 0}
    for name, value in budget.items():
        setattr(prepare, name, value)
    prepare.Tokenizer.from_directory = classmethod(lambda cls: own)
    # its own evaluation reads no text: the held-out text is judged below
    prepare.evaluate_bpb = lambda *_: 0.0
    prepare._document_batches = lambda split, size=128: forever(texts, size)
    stub_attention()
    if given.limit:
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    with alone(given, "card"):
        found = vars(importlib.import_module("train"))  # it trains when it is imported
    network = getattr(found["model"], "_orig_mod", found["model"])
    device = "cpu" if given.limit else "cuda"

    def score(inputs: Any, targets: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=not given.limit):
            return network(inputs, targets, reduction="none").view(-1)

    ids = own.encode(held_out, prepend=0)
    return {
        "bits_per_byte": bits_per_byte(
            score, ids, len(held_out.encode()), found["MAX_SEQ_LEN"], device
        ),
        "size": f"{found['config'].n_layer} × {found['config'].n_embd}",
        "tokens": found["total_tokens"],
        "steps": found["step"],
        "train_loss": found["debiased_smooth_loss"],
        "train_seconds": round(found["total_training_time"]),
    }


def byte_level_bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return words


def load_prepare(given: argparse.Namespace) -> Any:
    """Its prepare.py, whose packing of rows train.py uses; what it downloads with is not needed."""
    for name in ("requests", "pyarrow", "pyarrow.parquet", "rustbpe", "tiktoken"):
        if importlib.util.find_spec(name.split(".")[0]) is None:
            sys.modules[name] = types.ModuleType(name)
    copy = given.out / "autoresearch-copy"
    copy.mkdir(parents=True, exist_ok=True)
    for name in ("prepare.py", "train.py"):
        source = (given.autoresearch / name).read_text("utf-8")
        for pattern, other in TINY_AUTORESEARCH if given.limit else ():
            source = re.sub(pattern, other, source)
        (copy / name).write_text(source, "utf-8")
    sys.path.insert(0, str(copy))
    return importlib.import_module("prepare")


def stub_attention() -> None:
    """`kernels.get_kernel(…).flash_attn_interface.flash_attn_func` by SDPA; [B, T, H, D] inputs."""
    import torch

    def attention(q: Any, k: Any, v: Any, *, causal: bool, window_size: Any) -> Any:
        heads_first = (one.transpose(1, 2) for one in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)
        return attended.transpose(1, 2)

    interface = types.SimpleNamespace(flash_attn_func=attention)
    kernels = types.ModuleType("kernels")
    vars(kernels)["get_kernel"] = lambda _: types.SimpleNamespace(flash_attn_interface=interface)
    sys.modules["kernels"] = kernels


def forever(texts: list[str], size: int) -> Iterator[tuple[list[str], int]]:
    epoch = 1
    while True:
        for start in range(0, len(texts), size):
            yield texts[start : start + size], epoch
        epoch += 1


def read_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


# ------------------------------------------------------------------ the table

ROWS = {"ours": run_ours, "nanogpt": run_nanogpt, "autoresearch": run_autoresearch}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nanogpt", type=Path, metavar="DIR")
    parser.add_argument("--gpt2", type=Path, metavar="DIR", help="GPT-2's tokenizer, for nanoGPT")
    parser.add_argument("--nanogpt-steps", type=int, default=0, metavar="N")
    parser.add_argument("--autoresearch", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="ROW,…", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--limit", choices=("tiny",), help="a dry run on a CPU")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    wanted = given.only.split(",") if given.only else ["ours", *peers(given)]
    if unknown := set(wanted) - set(ROWS):
        parser.error(f"there is no row {unknown.pop()!r}")
    if missing := [name for name in wanted if name != "ours" and name not in peers(given)]:
        parser.error(f"give --{missing[0]} DIR" + (" and --gpt2 DIR" * ("nanogpt" in missing)))
    given.out.mkdir(parents=True, exist_ok=True)
    # each in a process of its own, so that none leaves memory or settings to the next
    started = {start_row(given, n): n for n in wanted if not row_file(given, n).is_file()}
    for _ in range(len(started)):
        pid, status = os.wait()
        if status:
            print(f"{started[pid]} failed with {status}", flush=True)
    print_table(given)


def start_row(given: argparse.Namespace, name: str) -> int:
    pid = os.fork()
    if not pid:
        run_row(given, name)
        os._exit(0)
    return pid


def peers(given: argparse.Namespace) -> list[str]:
    ready = {"nanogpt": given.nanogpt and given.gpt2, "autoresearch": given.autoresearch}
    return [name for name, folder in ready.items() if folder]


def row_file(given: argparse.Namespace, name: str) -> Path:
    path: Path = given.out / f"{name}.json"
    return path


def track_text(given: argparse.Namespace) -> tuple[Path, str]:
    """The file to train on and the held-out text."""
    from malmoi.studies.records import named_track, split_text

    with alone(given, "text"):
        train, held_out = split_text(named_track(TRACK), given.text, given.out / "text")
    if held_out is None:
        raise SystemExit(f"The track {TRACK} has no held-out text.")
    return Path(train[0]), held_out.read_text("utf-8")


def run_row(given: argparse.Namespace, name: str) -> None:
    began = time.perf_counter()
    row = ROWS[name](given, *track_text(given))
    row |= {"minutes": given.minutes, "seconds": round(time.perf_counter() - began)}
    row_file(given, name).write_text(json.dumps({"row": name, **row}), "utf-8")
    print(json.dumps({"row": name, **row}), flush=True)


def print_table(given: argparse.Namespace) -> None:
    print("| what | size | steps | tokens | minutes | bits per byte |")
    print("|---|---|---:|---:|---:|---:|")
    for name in ROWS:
        if row_file(given, name).is_file():
            row = json.loads(row_file(given, name).read_text("utf-8"))
            shown = f"{row['size']} | {row['steps']} | {row['tokens'] / 1e6:.1f}M"
            print(f"| {name} | {shown} | {row['minutes']:g} | {row['bits_per_byte']:.4f} |")


if __name__ == "__main__":
    main()
