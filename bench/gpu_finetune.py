"""Fine-tuning points on a GPU: ours beside transformers' Trainer, with the same weights and rows.

    python bench/gpu_finetune.py --model MINILM --data DATA --out OUT [--limit tiny] [--sweep]

CoLA, RTE, STS-B and SICK-E with five seeds, SST-2, CoNLL-2003 and SQuAD 1.1 with one, and RTE after
the NLI rows. The Trainer has its own defaults (5e-5, three epochs, linear decay) and our tokens.
Both are judged by `malmoi.evaluate` on the development rows, by which neither selects. Several
processes share the card, so that only RTE's first two runs, which are alone, are timed. `--sweep`
tries settings of ours instead, judged on a tenth of the training rows; `--best` adds `best=True` in
the time that the Trainer takes.
"""

import argparse
import atexit
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = {
    "cola": "matthews",
    "rte": "accuracy",
    "stsb": "spearman",
    "sick": "accuracy",
    "sst2": "accuracy",
    "conll2003": "entity_f1",
    "squad": "span_f1",
}
SMALL = ("cola", "rte", "stsb", "sick")
LARGE = ("sst2", "conll2003", "squad")
FILES = {
    "cola": ("glue/CoLA/train.tsv.xz", "glue/CoLA/dev.tsv.xz"),
    "rte": ("glue/RTE/train.tsv.xz", "glue/RTE/dev.tsv.xz"),
    "stsb": ("glue/STS-B/train.tsv.xz", "glue/STS-B/dev.tsv.xz"),
    "sick": ("nli/SICK_train.txt", "nli/SICK_test_annotated.txt"),
    "sst2": ("glue/SST-2/train.tsv.xz", "glue/SST-2/dev.tsv.xz"),
    "conll2003": ("ner/conll2003.train.txt.xz", "ner/conll2003.testa.txt.xz"),
    "squad": ("squad/train-part-v1.1.json.xz", "squad/dev-v1.1.json.xz"),
}
NLI = ("nli/mnli.train.jsonl.xz", "nli/xnli.train.jsonl.xz")
NLI_DEV = ("nli/mnli.valid.jsonl.xz", "nli/xnli.valid.jsonl.xz")
LENGTHS = {"squad": 384}
# settings of ours that --sweep compares
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "r-drop": {"rdrop": 1.0},
    "top layer new": {"layers_transferred": -1},
    "r-drop, top new": {"rdrop": 1.0, "layers_transferred": -1},
    "r-drop 3, top new": {"rdrop": 3.0, "layers_transferred": -1},
    "batch 32": {"batch": 32, "lr": 1.2e-4},
    "rate 2e-4": {"lr": 2e-4},
    "rate 5e-4": {"lr": 5e-4},
    "no averaging": {"average": 0.0},
    "no layer decay": {"layer_decay": 1.0},
    "5 epochs": {"epochs": 5},
    "10 epochs": {"epochs": 10},
    "10 epochs, r-drop 3": {"epochs": 10, "rdrop": 3.0},
    "10 epochs, no r-drop": {"epochs": 10, "rdrop": 0.0},
    "20 epochs": {"epochs": 20},
    "20 epochs, r-drop": {"epochs": 20, "rdrop": 1.0},
}
TINY_ROWS = 6


@dataclass(frozen=True)
class Job:
    """One run: who learns what, from which model and seed."""

    way: str  # malmoi, trainer, or a variant's name
    task: str
    seed: int
    model: str
    out: str
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # of the task in the table, if it has another

    @property
    def folder(self) -> Path:
        return Path(self.out, f"{self.way}-{self.label}-{self.seed}".replace(" ", "-"))

    @property
    def label(self) -> str:
        return self.name or self.task


@dataclass(frozen=True)
class Plan:
    """What all jobs share."""

    data: Path
    tiny: bool
    sweep: bool
    trainer_batch: int


PLAN: Plan


def begin_worker(plan: Plan) -> None:
    global PLAN  # a spawned process has nothing else to keep it in
    PLAN = plan
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def run_job(job: Job) -> dict[str, Any]:
    """The job's metrics and seconds; a failure is told and does not end the others."""
    began = time.perf_counter()
    try:
        metrics = (train_theirs if job.way == "trainer" else train_ours)(job)
        facts = {"metrics": metrics, "value": 100 * metrics[METRICS.get(job.task, "accuracy")]}
    except Exception as error:  # the others' results must not be lost
        facts = {"error": f"{type(error).__name__}: {error}"}
    spent = round(time.perf_counter() - began, 2)
    return {"way": job.way, "task": job.label, "seed": job.seed, "seconds": spent, **facts}


def rows_of(job: Job) -> tuple[Any, Any, Any]:
    """The task, its training files and those that judge, cut to a few rows if it is tiny."""
    from malmoi import custom_task
    from malmoi.evaluation.tasks import named_task

    if job.task == "nli":
        files: tuple[Any, Any] = (
            [PLAN.data / file for file in NLI],
            [PLAN.data / file for file in NLI_DEV],
        )
        task = custom_task("classification", text="premise", pair="hypothesis", label="label")
    else:
        train, dev = FILES[job.task]
        files = (PLAN.data / train, PLAN.data / dev)
        task = named_task(job.task)
    if not PLAN.tiny:
        return task, *files
    from malmoi.evaluation.examples import load_examples
    from malmoi.evaluation.task import Task
    from malmoi.text.rows import DataRow

    every = load_examples(task, files[0]).rows
    kept = every[:: len(every) // TINY_ROWS]
    folder = Path(job.out)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{job.folder.name}.rows"
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
    if options.get("layers_transferred", 0) < 0:  # counted from the top
        options["layers_transferred"] += malmoi.load(job.model).config.depth
    if PLAN.tiny and not options.get("best"):
        options |= {"steps": 1, "length": 64}
    dev = None if PLAN.sweep else dev  # none: a tenth of the training rows judges
    done = malmoi.finetune(job.model, task, train, job.folder, dev, overwrite=True, **options)
    return dict(done.metrics)


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
    length = 64 if PLAN.tiny else LENGTHS.get(job.task, 128)
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

    def collate(some: Sequence[Any]) -> dict[str, Any]:
        return collated(some, kind.head)

    settings = transformers.TrainingArguments(
        output_dir=str(job.folder),
        per_device_train_batch_size=32 if job.task in LARGE else PLAN.trainer_batch,
        seed=job.seed,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=1 if PLAN.tiny else -1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        model=network, args=settings, train_dataset=items, data_collator=collate
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    network.float().save_pretrained(job.folder)
    tokenizer.save(job.folder)
    found = malmoi.evaluate(job.folder, task, dev)
    return {name: value for name, value in found.items() if name != "examples"}


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


# ------------------------------------------------------------------ the table


def summarise(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of each way on each task."""
    rows = []
    for task in dict.fromkeys(one["task"] for one in found):
        for way in dict.fromkeys(one["way"] for one in found):
            values = [
                o["value"] for o in found if (o["task"], o["way"]) == (task, way) and "value" in o
            ]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                mean = statistics.mean(values)
                rows.append(
                    {"task": task, "way": way, "n": len(values), "mean": mean, "std": spread}
                )
    return rows


def tell(rows: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
    ways = dict.fromkeys(row["way"] for row in rows)
    for way in ways:
        cells = [
            f"{row['task']} {row['mean']:.2f} ± {row['std']:.2f} ({row['n']})"
            for row in rows
            if row["way"] == way
        ]
        mine = {row["task"]: row for row in rows if row["way"] == way}
        if all(task in mine for task in SMALL):
            mean = statistics.mean(mine[task]["mean"] for task in SMALL)
            std = statistics.mean(mine[task]["std"] for task in SMALL)
            cells.append(f"mean of four {mean:.2f}, of their deviations {std:.2f}")
        print(f"{way:16} {'; '.join(cells)}", flush=True)
    for one in found:
        if "error" in one:
            print(f"failed: {one['way']} {one['task']} {one['seed']}: {one['error']}", flush=True)


def chosen_jobs(given: argparse.Namespace, seconds: float) -> list[Job]:
    """All jobs but RTE after NLI; the first seed of all tasks comes first."""
    out = str(given.out)
    seeds = range(1 if given.limit else given.seeds)
    if given.sweep:
        count = range(1 if given.limit else given.sweep_seeds)
        return [
            Job(name, task, seed, given.model, out, options)
            for seed in count
            for task in given.tasks
            for name, options in VARIANTS.items()
            if not given.variants or name in given.variants
        ]
    jobs: list[Job] = []
    if "nli" in given.parts:
        jobs.append(Job("malmoi", "nli", 0, given.model, out))
    for seed in seeds if "small" in given.parts else ():
        for task in given.tasks:
            jobs += [Job(way, task, seed, given.model, out) for way in ("trainer", "malmoi")]
            if given.best:
                budget = {"best": True, "minutes": seconds / 60}
                jobs.append(Job("malmoi best", task, seed, given.model, out, budget))
    for task in LARGE if "large" in given.parts else ():
        jobs += [Job(way, task, 0, given.model, out) for way in ("trainer", "malmoi")]
    return jobs


def told(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints each result as it comes, so that a run that is stopped has shown the others."""
    found = []
    for one in results:
        found.append(one)
        print(json.dumps(one), flush=True)
    return found


def start_mps(out: Path) -> None:
    """NVIDIA's multi-process service: without it, processes take turns on the card."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("There is no nvidia-cuda-mps-control here: processes take turns.", flush=True)
        return
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        os.environ[name] = str(out.resolve() / "mps")
    Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).mkdir(parents=True, exist_ok=True)
    subprocess.run([control, "-d"], check=True, timeout=30)
    atexit.register(subprocess.run, [control], input=b"quit\n", timeout=30, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="the folder of the encoder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", choices=("tiny",), help="a few rows and steps: a dry run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--trainer-batch", type=int, default=16)
    parser.add_argument(
        "--parts", nargs="+", choices=("small", "nli", "large"), default=["small", "nli", "large"]
    )
    parser.add_argument("--tasks", nargs="+", choices=SMALL, default=list(SMALL))
    parser.add_argument("--sweep-seeds", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="of --sweep [all]")
    parser.add_argument("--mps", action="store_true", help="let processes' kernels overlap (MPS)")
    parser.add_argument("--sweep", action="store_true", help="compare settings of ours")
    parser.add_argument("--best", action="store_true", help="also best=True in the Trainer's time")
    parser.add_argument("--results", type=Path, help="the JSON file [OUT/gpu_finetune.json]")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(given.data, given.limit == "tiny", given.sweep, given.trainer_batch)
    began = time.perf_counter()
    # workers share the cores; torch would start a thread per core in each of them
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("RAYON_NUM_THREADS", "2")
    if given.mps:
        start_mps(given.out)
    context = multiprocessing.get_context("spawn")
    out = str(given.out)
    alone: list[dict[str, Any]] = []
    if not given.sweep and "small" in given.parts:
        with context.Pool(1, begin_worker, (plan,)) as pool:
            pool.apply(run_job, (Job("malmoi", "rte", 99, given.model, f"{out}/warm"),))
            for way in ("trainer", "malmoi"):
                alone.append(
                    pool.apply(run_job, (Job(way, "rte", 0, given.model, f"{out}/alone"),))
                )
    theirs = next((one["seconds"] for one in alone if one["way"] == "trainer"), 60.0)
    with context.Pool(given.workers, begin_worker, (plan,)) as pool:
        found = told(pool.imap_unordered(run_job, chosen_jobs(given, theirs), chunksize=1))
        if "nli" in given.parts and not given.sweep:
            nli = str(Job("malmoi", "nli", 0, given.model, out).folder)
            after = [
                Job("malmoi", "rte", seed, nli, out, name="rte after nli")
                for seed in range(1 if given.limit else given.seeds)
            ]
            found += told(pool.imap_unordered(run_job, after, chunksize=1))
    rows = summarise(found)
    facts = {"table": rows, "alone": alone, "runs": found, "seconds": time.perf_counter() - began}
    path = given.results or given.out / "gpu_finetune.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    for one in alone:
        print(f"alone: {one['way']} RTE {one['seconds']} s {one.get('error', '')}", flush=True)
    tell(rows, found)
    print(f"{facts['seconds']:.0f} s; {path}", flush=True)
    sys.exit(any("error" in one for one in found))


if __name__ == "__main__":
    main()
