"""Fine-tuning points: ours beside transformers' Trainer, with the same weights and rows.

    malmoi bench finetune_points --model MINILM --data train.csv --dev dev.csv [--rows 1000]
    malmoi bench finetune_points --model MINILM --data DIR --out OUT [--limit tiny] [--sweep]

MINILM is the folder of an encoder such as all-MiniLM-L6-v2. With a table (columns text and label)
both learn from the same random rows and are judged on the same rows of the other table: ours
chooses everything itself, theirs is the script of its guide (three epochs, batches of 16, 5e-5, at
most 512 tokens); seconds are from the call to the evaluated model, the clock's and the processor's.

With a folder of data sets: CoLA, RTE, STS-B and SICK-E with five seeds, SST-2, CoNLL-2003 and SQuAD
1.1 with one, or those of --tasks with five; the Trainer with its defaults and our tokens, both
judged by `malmoi.evaluate` on the development rows, by which neither selects. `--workers` processes
share the card. `--sweep` tries settings of ours instead, judged on a tenth of the training rows. A
row in OUT is not run again.
"""

import argparse
import csv
import json
import logging
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _shared import be_quiet, benchmark_parser, processor_time, run_jobs, start_mps

SMALL = ("cola", "rte", "stsb", "sick")
LARGE = ("sst2", "conll2003", "squad")  # one seed, unless named with --tasks
METRICS = {
    "cola": "matthews",
    "stsb": "spearman",
    "korsts": "spearman",
    "conll2003": "entity_f1",
    "squad": "span_f1",
}  # the others' is accuracy
FILES = {
    "cola": ("glue/CoLA/train.tsv.xz", "glue/CoLA/dev.tsv.xz"),
    "rte": ("glue/RTE/train.tsv.xz", "glue/RTE/dev.tsv.xz"),
    "stsb": ("glue/STS-B/train.tsv.xz", "glue/STS-B/dev.tsv.xz"),
    "sick": ("nli/SICK_train.txt", "nli/SICK_test_annotated.txt"),
    "sst2": ("glue/SST-2/train.tsv.xz", "glue/SST-2/dev.tsv.xz"),
    "conll2003": ("ner/conll2003.train.txt.xz", "ner/conll2003.testa.txt.xz"),
    "squad": ("squad/train-part-v1.1.json.xz", "squad/dev-v1.1.json.xz"),
    "nsmc": ("ko/nsmc.train.txt.xz", "ko/nsmc.test.txt.xz"),
    "korsts": ("ko/korsts.sts-train.tsv.xz", "ko/korsts.sts-test.tsv.xz"),
}
LENGTHS = {"squad": 384}
# settings of ours that --sweep compares
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "r-drop": {"rdrop": 1.0},
    "batch 32": {"batch": 32, "lr": 1.2e-4},
    "rate 2e-4": {"lr": 2e-4},
    "rate 5e-4": {"lr": 5e-4},
    "no averaging": {"average": 0.0},
    "no layer decay": {"layer_decay": 1.0},
    "5 epochs": {"epochs": 5},
    "10 epochs": {"epochs": 10},
    "20 epochs": {"epochs": 20},
}
TINY_ROWS = 6
Row = dict[str, str]


# ------------------------------------------------------------------ a table


def guide_trainer(model: Path, rows: list[Row], out: Path, length: int = 512, **more: Any) -> Any:
    """transformers' Trainer as its guide has it; `more` changes its arguments."""
    import transformers

    names = sorted({row["label"] for row in rows})
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    transformers.set_seed(more.get("seed", 0))
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(names)
    )
    settings = dict(per_device_train_batch_size=16, per_device_eval_batch_size=32, report_to=[])
    quiet = dict(save_strategy="no", logging_strategy="no", disable_tqdm=True)
    arguments = transformers.TrainingArguments(
        output_dir=str(out), **{**settings, **quiet, "num_train_epochs": 3, **more}
    )
    trainer = transformers.Trainer(
        model=network,
        args=arguments,
        train_dataset=encoded(tokenizer, rows, names, length),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def encoded(tokenizer: Any, table: list[Row], names: list[str], length: int) -> Any:
    texts = tokenizer([row["text"] for row in table], truncation=True, max_length=length)
    return [
        {**{name: column[i] for name, column in texts.items()}, "labels": names.index(row["label"])}
        for i, row in enumerate(table)
    ]


class FirstAnswer(logging.Handler):
    """What the run said first, and when."""

    first: Mapping[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if said := re.match(r"After (\d+) s: accuracy (\S+) on", record.getMessage()):
            self.first = {"first_seconds": float(said[1]), "first_accuracy": float(said[2])}


def table_by_ours(model: Path, rows: list[Row], dev: list[Row], seed: int) -> dict[str, float]:
    import malmoi

    first = FirstAnswer()
    log = logging.getLogger("malmoi")
    log.addHandler(first)
    log.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as out:
        result = malmoi.finetune(model, "classification", rows, out, dev, seed=seed)
    log.removeHandler(first)
    return {"accuracy": result.metrics["accuracy"], "updates": result.steps, **first.first}


def table_by_theirs(model: Path, rows: list[Row], dev: list[Row], seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        trainer = guide_trainer(model, rows, Path(out), seed=seed)
        trainer.train()
        names = sorted({row["label"] for row in rows})
        judged = encoded(trainer.data_collator.tokenizer, dev, names, 512)
        scores = trainer.predict(judged).predictions.argmax(-1)
    right = sum(int(s) == row["labels"] for s, row in zip(scores, judged, strict=True))
    return {"accuracy": right / len(dev), "updates": trainer.state.global_step}


def read_table(path: Path, count: int, seed: int) -> list[Row]:
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{"text": row["text"], "label": row["label"]} for row in csv.DictReader(file)]
    return random.Random(seed).sample(rows, min(count, len(rows)))


def compare_on_table(given: argparse.Namespace) -> None:
    """Both in turn, alone on the machine, timed."""
    be_quiet()
    logging.disable(logging.NOTSET)  # ours says its first accuracy there
    rows = read_table(given.data, given.rows, given.seed)
    dev = read_table(given.dev, given.judged, 0)
    ways = {"malmoi": table_by_ours, "trainer": table_by_theirs}
    for way in given.ways or ways:
        began, worked = time.perf_counter(), processor_time()
        result = ways[way](given.model, rows, dev, given.seed)
        spent = {"seconds": time.perf_counter() - began, "cpu_seconds": processor_time() - worked}
        numbers = {key: round(value, 4) for key, value in {**result, **spent}.items()}
        print(json.dumps({"way": way, **numbers}), flush=True)


# ------------------------------------------------------------------ a folder of data sets


@dataclass(frozen=True)
class Job:
    """One run: who learns what, from which model and seed."""

    way: str  # malmoi, trainer, or a variant's name
    task: str
    seed: int
    model: str
    data: Path
    out: Path
    options: dict[str, Any] = field(default_factory=dict)
    tiny: bool = False
    sweep: bool = False

    @property
    def name(self) -> str:
        return f"{self.way}-{self.task}-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / self.name.replace(" ", "-")


def run_job(job: Job) -> dict[str, Any]:
    began = time.perf_counter()
    metrics = (train_theirs if job.way == "trainer" else train_ours)(job)
    value = 100 * metrics[METRICS.get(job.task, "accuracy")]
    spent = round(time.perf_counter() - began, 2)
    return {"way": job.way, "task": job.task, "value": value, "seconds": spent, "metrics": metrics}


def rows_of(job: Job) -> tuple[Any, Any, Any]:
    """The task, its training file and the one that judges, cut to a few rows if it is tiny."""
    from malmoi.evaluation.tasks import named_task

    train, dev = (job.data / file for file in FILES[job.task])
    task = named_task(job.task)
    if not job.tiny:
        return task, train, dev
    from malmoi.evaluation.examples import load_examples
    from malmoi.evaluation.task import Task
    from malmoi.text.rows import DataRow

    every = load_examples(task, train).rows
    kept = every[:: len(every) // TINY_ROWS]
    place = job.out / f"{job.folder.name}.rows"
    place.write_text("", "utf-8")
    small = Task(
        task.name,
        task.kind,
        lambda path: (DataRow({"at": i}, f"{path}:{i}") for i in range(len(kept))),
        lambda row: kept[row["at"]],
        metrics=task.metrics,
        labels=task.labels,
    )
    return small, place, place


def train_ours(job: Job) -> dict[str, float]:
    import malmoi

    task, train, dev = rows_of(job)
    options = {"length": LENGTHS.get(job.task, 128), "seed": job.seed, **job.options}
    if job.tiny:
        options |= {"steps": 1, "length": 64}
    judge = None if job.sweep else dev  # none: a tenth of the training rows judges
    result = malmoi.finetune(job.model, task, train, job.folder, judge, overwrite=True, **options)
    return dict(result.metrics)


def train_theirs(job: Job) -> dict[str, float]:
    import torch
    import transformers

    import malmoi
    from malmoi.checkpoint import read_checkpoint
    from malmoi.evaluation.examples import label_names, load_examples
    from malmoi.evaluation.features import FeatureView
    from malmoi.evaluation.kinds import encode_examples, head_kind

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(job.seed)
    task, train, dev = rows_of(job)
    examples = load_examples(task, train).rows
    labels = label_names(task, examples)
    tokenizer = read_checkpoint(job.model).tokenizer
    assert tokenizer is not None
    length = 64 if job.tiny else LENGTHS.get(job.task, 128)
    items = encode_examples(task, examples, FeatureView(tokenizer, labels, length))
    kind = head_kind(task)
    classes = {
        "tag": transformers.AutoModelForTokenClassification,
        "span": transformers.AutoModelForQuestionAnswering,
    }
    named = {"id2label": dict(enumerate(labels)), "num_labels": len(labels)} if labels else {}
    named |= {"problem_type": kind.output.problem_type} if kind.output.problem_type else {}
    network = classes.get(kind.head, transformers.AutoModelForSequenceClassification)
    network = network.from_pretrained(job.model, **named, dtype=torch.float32)
    settings = transformers.TrainingArguments(
        output_dir=str(job.folder),
        per_device_train_batch_size=32 if job.task in LARGE else 16,
        seed=job.seed,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=1 if job.tiny else -1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        model=network,
        args=settings,
        train_dataset=items,
        data_collator=lambda some: collated(some, kind.head),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    network.float().save_pretrained(job.folder)
    tokenizer.save(job.folder)
    metrics = malmoi.evaluate(job.folder, task, dev)
    return {name: value for name, value in metrics.items() if name != "examples"}


def collated(some: Sequence[Any], head: str) -> dict[str, Any]:
    """A batch of our items with transformers' names."""
    import torch

    rows = [item.rows[0] for item in some]
    width = max(len(row.tokens) for row in rows)

    def padded(values: Iterable[Sequence[int]], fill: int) -> Any:
        return torch.tensor([[*map(int, row), *[fill] * (width - len(row))] for row in values])

    batch = {
        "input_ids": padded([row.tokens for row in rows], 0),
        "token_type_ids": padded([row.segments for row in rows], 0),
        "attention_mask": padded([[1] * len(row.tokens) for row in rows], 0),
    }
    labels = [item.label for item in some]
    if head == "span":
        start, end = torch.tensor([list(label) for label in labels]).unbind(1)
        return batch | {"start_positions": start, "end_positions": end}
    return batch | {"labels": padded(labels, -100) if head == "tag" else torch.tensor(labels)}


def chosen_jobs(given: argparse.Namespace) -> list[Job]:
    """The first seed of all tasks comes first."""
    shared: Any = dict(
        model=str(given.model), data=given.data, out=given.out, tiny=bool(given.limit)
    )
    seeds = 1 if given.limit else given.seeds
    tasks = given.tasks or [*SMALL, *LARGE]
    if given.sweep:
        return [
            Job(name, task, seed, options=options, sweep=True, **shared)
            for seed in range(seeds)
            for task in tasks
            for name, options in VARIANTS.items()
        ]
    return [
        Job(way, task, seed, **shared)
        for seed in range(seeds)
        for task in tasks
        if not seed or given.tasks or task not in LARGE
        for way in given.ways or ("trainer", "malmoi")
    ]


def print_points(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line for each way: mean and deviation of each task."""
    points: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if "value" in row:
            points.setdefault(row["way"], {}).setdefault(row["task"], []).append(row["value"])
    for way, tasks in points.items():
        spread = {t: statistics.stdev(v) if len(v) > 1 else 0.0 for t, v in tasks.items()}
        means = {t: statistics.mean(v) for t, v in tasks.items()}
        cells = [f"{t} {means[t]:.2f} ± {spread[t]:.2f} ({len(tasks[t])})" for t in tasks]
        if all(task in means for task in SMALL):
            cells.append(f"mean of four {statistics.mean(means[task] for task in SMALL):.2f}")
        print(f"{way:16} {'; '.join(cells)}", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the folder of the encoder")
    parser.add_argument("--data", type=Path, required=True, help="a table, or a folder of sets")
    parser.add_argument("--ways", nargs="+", choices=("malmoi", "trainer"), help="[both]")
    parser.add_argument("--dev", type=Path, help="the table that judges")
    parser.add_argument("--rows", type=int, default=1000, help="of the table")
    parser.add_argument("--judged", type=int, default=500, help="of the other table")
    parser.add_argument("--seed", type=int, default=0, help="with a table")
    parser.add_argument("--out", type=Path, help="with a folder")
    parser.add_argument("--tasks", nargs="+", choices=FILES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mps", action="store_true", help="let processes' kernels overlap (MPS)")
    parser.add_argument("--sweep", action="store_true", help="compare settings of ours")
    parser.add_argument("--limit", choices=("tiny",), help="a few rows and steps: a dry run")
    given = parser.parse_args()
    if given.data.is_file():
        if not given.dev:
            parser.error("give the table that judges: --dev FILE")
        compare_on_table(given)
        return
    if not given.out:
        parser.error("give a folder for the rows: --out DIR")
    # workers share the cores; torch would start a thread per core in each of them
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("RAYON_NUM_THREADS", "2")
    if given.mps:
        start_mps(given.out)
    jobs = {job.name: job for job in chosen_jobs(given)}
    rows = run_jobs(run_job, jobs, given.out, lanes=[None] * given.workers)
    print_points(rows.values())
    if failed := [name for name, row in rows.items() if "error" in row]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
