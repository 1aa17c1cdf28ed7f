"""Seconds of a fine-tuning besides learning: from the command to the first step, and to the folder.

    PYTHONPATH=src python bench/finetune_start.py [--rows 1000] [--repeat 2] [--steps N]

A BERT of MiniLM's shape with random weights, made-up sentences of 5 to 30 words, evaluated on 100
more; every run is a process of its own. "to the first step" begins with the process and has the
imports, of which torch's own and the start of CUDA are given, reading, encoding, the model and its
first update; "after" has the evaluation, the calibration, the report and the saved folder; "also
imported" are parts of torch that take seconds. The last line is JSON.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
WORDS = [a + b + c for a in "bdfgklmnprst" for b in ("a", "en", "il", "or") for c in ("", "sa")]
RUN = """
import json, sys, time
began, model, rows, dev, out, steps = float(sys.argv[1]), *sys.argv[2:]
marks = []
import torch
imported = time.time()
if torch.cuda.is_available():
    torch.cuda.init()
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")  # loads cuBLAS
ready = time.time()
import malmoi
from malmoi.system.progress import listening
with listening(lambda event: event.verb == "finetune" and marks.append(time.time())):
    options = {"steps": int(steps)} if int(steps) else {}
    malmoi.finetune(model, "classification", rows, out, dev=dev, **options)
ended = time.time()
parts = ("torch._dynamo", "torch._inductor", "triton", "sympy")
print(json.dumps({
    "also imported": [name for name in parts if name in sys.modules],
    "torch": imported - began, "CUDA": ready - imported, "to the first step": marks[0] - began,
    "learning": marks[-1] - marks[0], "after": ended - marks[-1], "all": ended - began,
}))
"""


def make_model(folder: Path) -> None:
    import transformers

    from malmoi.tokenizer import train_tokenizer

    train_tokenizer([" ".join(WORDS)], kind="wordpiece", vocab=500).save(folder)
    transformers.logging.disable_progress_bar()
    transformers.BertModel(transformers.BertConfig(**SHAPE, vocab_size=500)).save_pretrained(folder)


def write_rows(path: Path, count: int, seed: int) -> None:
    """Two labels with half of their words in common."""
    chance = random.Random(seed)
    third = len(WORDS) // 3
    with path.open("w", encoding="utf-8") as file:
        file.write("text,label\n")
        for i in range(count):
            own = WORDS[: 2 * third] if i % 2 else WORDS[third:]
            words = chance.choices(own, k=chance.randint(5, 30))
            file.write(f"{' '.join(words)},{'no' if i % 2 else 'yes'}\n")


def run(folder: Path, number: int, steps: int) -> dict[str, Any]:
    where = [folder / name for name in ("bert", "train.csv", "dev.csv", f"out-{number}")]
    command = [sys.executable, "-c", RUN, str(time.time()), *map(str, where), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}


def measure(rows: int, repeat: int, steps: int) -> list[dict[str, Any]]:
    """As many runs in a row; 0 steps: the defaults' epochs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "bert")
        write_rows(folder / "train.csv", rows, 0)
        write_rows(folder / "dev.csv", 100, 1)
        return [run(folder, i, steps) for i in range(repeat)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="[the defaults' epochs]")
    given = parser.parse_args()
    rows = measure(given.rows, given.repeat, given.steps)
    for row in rows:
        print(row)
    print(json.dumps({"rows": given.rows, "runs": rows}))


if __name__ == "__main__":
    main()
