"""Sixteen labelled sentences: ours beside SetFit, the same encoder, rows and test rows, on a CPU.

    python bench/few_labels.py --data DIR --model MINILM [--lm SMOLLM2] [--seeds 5] [--judged 872]

DIR has glue/SST-2/{train,dev}.tsv.xz; MINILM is the folder of a sentence encoder such as
all-MiniLM-L6-v2. Each seed draws eight sentences of each label from the training set. Both learn
from them with their own defaults (`pip install setfit` for the other one; without it only ours is
measured) and label the first rows of the development set. A third row has no labels at all: the
texts are compared with the names of the labels. A language model (a folder or a GGUF file) adds two
more rows, with the labels and without any. Seconds are those of learning from the folder on; on a
busy machine the processor's seconds say more than the clock's.
"""

import argparse
import json
import logging
import lzma
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import malmoi
from _timing import benchmark_parser, timed

NAMES = {"0": "negative", "1": "positive"}
EACH = 8  # sentences of each label
MIN_WORDS = 8  # the training set has phrases too; shorter ones are no sentences
Row = dict[str, str]
Learner = Callable[[Path, list[Row], int], Callable[[Sequence[str]], list[str]]]


def read_rows(path: Path) -> list[Row]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    return [{"text": text.strip(), "label": NAMES[label]} for text, label in rows]


def drawn(rows: list[Row], seed: int) -> list[Row]:
    draw = random.Random(seed)
    whole = [row for row in rows if len(row["text"].split()) >= MIN_WORDS]
    by_label = [[row for row in whole if row["label"] == name] for name in NAMES.values()]
    return [row for some in by_label for row in draw.sample(some, EACH)]


def ours(model: Path, rows: list[Row], seed: int) -> Callable[[Sequence[str]], list[str]]:
    with tempfile.TemporaryDirectory() as out:
        done = malmoi.finetune(
            model, "classification", rows, out, rows, seed=seed, device="cpu", overwrite=True
        )  # judged on the sixteen themselves: nothing is held out of so few
    return lambda texts: [one.label for one in done.model.predict(list(texts))]  # type: ignore[union-attr]


def setfit(model: Path, rows: list[Row], seed: int) -> Callable[[Sequence[str]], list[str]]:
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    loaded = SetFitModel.from_pretrained(str(model), labels=list(NAMES.values()), device="cpu")
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(output_dir=out, seed=seed, report_to="none")
        trainer = Trainer(model=loaded, args=settings, train_dataset=Dataset.from_list(rows))
        trainer.train()
    return lambda texts: [str(one) for one in loaded.predict(list(texts))]


def by_names(model: Path, rows: list[Row], seed: int) -> Callable[[Sequence[str]], list[str]]:
    opened = malmoi.load(model, device="cpu")
    return lambda texts: [one.label for one in opened.classify(list(texts), list(NAMES.values()))]


def learners(chosen: argparse.Namespace) -> dict[str, tuple[Learner, Path]]:
    found: dict[str, tuple[Learner, Path]] = {
        "malmoi": (ours, chosen.model),
        "setfit": (setfit, chosen.model),
        "no labels": (by_names, chosen.model),
    }
    if find_spec("setfit") is None:
        print("setfit is not installed: only ours is measured.", file=sys.stderr)
        found.pop("setfit")
    if chosen.lm is not None:
        found |= {"malmoi, lm": (ours, chosen.lm), "no labels, lm": (by_names, chosen.lm)}
    return {name: one for name, one in found.items() if chosen.only in ("", name)}


def measure(name: str, learner: Learner, model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    train = read_rows(chosen.data / "glue/SST-2/train.tsv.xz")
    judged = read_rows(chosen.data / "glue/SST-2/dev.tsv.xz")[: chosen.judged]
    texts = [row["text"] for row in judged]
    scores, seconds, processor = [], [], []
    for seed in range(1 if learner is by_names else chosen.seeds):
        rows = drawn(train, seed)
        began = time.process_time()
        spent, label = timed(partial(learner, model, rows, seed))
        seconds.append(spent)
        processor.append(time.process_time() - began)
        right = sum(said == row["label"] for said, row in zip(label(texts), judged, strict=True))
        scores.append(100 * right / len(judged))
        times = f"{spent:.1f} s ({processor[-1]:.1f} s of the processor)"
        print(f"{name}, seed {seed}: {scores[-1]:.1f} in {times}", file=sys.stderr, flush=True)
    return {
        "accuracy": round(mean(scores), 1),
        "deviation": round(stdev(scores), 1) if len(scores) > 1 else 0.0,
        "runs": [round(one, 1) for one in scores],
        "seconds": round(mean(seconds), 1),
        "processor_seconds": round(mean(processor), 1),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--judged", type=int, default=872)
    parser.add_argument("--lm", type=Path, help="a language model")
    parser.add_argument("--only", default="", help="the name of one row, such as setfit")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    found = {name: measure(name, *one, chosen) for name, one in learners(chosen).items()}
    if chosen.json:
        print(json.dumps(found))
        return
    print(f"{'':14}{'accuracy':>16}{'seconds':>9}{'processor':>11}  each seed")
    for name, one in found.items():
        spread = f"{one['accuracy']:.1f} ± {one['deviation']:.1f}"
        times = f"{one['seconds']:9.1f}{one['processor_seconds']:11.1f}"
        print(f"{name:14}{spread:>16}{times}  {one['runs']}")


if __name__ == "__main__":
    main()
