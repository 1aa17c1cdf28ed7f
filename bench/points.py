"""Fine-tuning points: ours as typed beside transformers' Trainer, on any folder of labelled tables.

    malmoi bench points --model MINILM DIR [--out OUT] [--seeds 5] [--rows 1000] [--limit tiny]

A set is a file with `train` in its name and one beside it with `test`, `testa`, `dev` or `valid` in
its place: CSV, TSV, JSONL, CoNLL… or a published format, compressed or not. MINILM is the folder of
an encoder. Ours is `malmoi finetune TRAIN --dev TEST`, nothing set; the Trainer has our tokens,
three epochs, batches of 16 (32 from 20,000 rows on) and each of --rates; the best of its rates by
the test rows stands beside ours, a choice that ours is not given. Both are judged by
`malmoi.evaluate` on the test rows, by which neither selects. `--rows` learns from so many random
rows. `--workers` processes share the card; OUT keeps every row, and one that is there is not run
again.
"""

import argparse
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _shared import benchmark_parser, run_jobs, start_mps

TRAIN = re.compile(r"(?<![a-z])train(?![a-z])")
JUDGES = ("test", "testa", "dev", "valid", "validation")
RATES = (2e-5, 5e-5, 1e-4)
LARGE = 20_000  # rows
LENGTH = 128
LENGTHS = {"span": 384}
TINY_ROWS = 12
OURS = "malmoi"
Row = dict[str, str]


def found_sets(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Name → the file that teaches and the one that judges."""
    found = {}
    for train in sorted(path for path in folder.rglob("*") if TRAIN.search(path.name.lower())):
        for judge in JUDGES:
            pattern = f"{TRAIN.sub(judge, train.name.lower(), count=1)}"
            beside = [one for one in train.parent.iterdir() if one.name.lower() == pattern]
            if beside:
                found[_name(train, folder)] = (train, beside[0])
                break
    return found


def readable(sets: Mapping[str, tuple[Path, Path]]) -> dict[str, tuple[Path, Path]]:
    """The sets whose task shows in their rows; says which others there are."""
    from malmoi.errors import MalmoiError
    from malmoi.evaluation.guess import guess_task

    found = {}
    for name, files in sets.items():
        try:
            guess_task(None, str(files[0]))
            found[name] = files
        except MalmoiError as error:
            print(f"left out: {name}: {str(error)[:100]}", flush=True)
    return found


def _name(train: Path, folder: Path) -> str:
    """ner/conll2003.train.txt.xz → ner-conll2003."""
    stem = train.name.split(".")
    words = [*train.parent.relative_to(folder).parts, *(w for w in stem if not TRAIN.search(w))]
    kept = [
        word for word in words if word not in ("csv", "tsv", "txt", "jsonl", "json", "xz", "gz")
    ]
    return "-".join(kept) or "rows"


@dataclass(frozen=True)
class Job:
    """One run: who learns which set, with which seed."""

    way: str  # malmoi, or trainer and its rate
    task: str
    seed: int
    model: str
    files: tuple[Path, Path]
    rows: int = 0  # to learn from; 0: all
    tiny: bool = False

    @property
    def name(self) -> str:
        return f"{self.way}-{self.task}-{self.seed}"


def run_job(job: Job) -> dict[str, Any]:
    from malmoi.evaluation.guess import guess_task
    from malmoi.evaluation.task import metric_names

    task, _ = guess_task(None, str(job.files[0]))
    if job.rows:
        task = _cut(task, job)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        metrics = (train_ours if job.way == OURS else train_theirs)(job, task, Path(out))
    spent = round(time.perf_counter() - began, 2)
    # plain tags are judged by other measures than entities: what the rows hold decides
    measure = next((name for name in metric_names(task) if name in metrics), next(iter(metrics)))
    value = 100 * metrics[measure]
    return {"way": job.way, "task": job.task, "measure": measure, "value": value, "seconds": spent}


def _cut(task: Any, job: Job) -> Any:
    """The task with fewer training rows, other ones for each seed."""

    def rows(path: Path) -> Iterable[Any]:
        every = list(task.rows(path))
        if Path(path) != job.files[0] and not job.tiny:
            return every
        return random.Random(job.seed).sample(every, min(job.rows, len(every)))

    return replace(task, rows=rows)


def train_ours(job: Job, task: Any, out: Path) -> Mapping[str, float]:
    import malmoi

    options: dict[str, Any] = {"steps": 1} if job.tiny else {}
    train, judge = map(str, job.files)
    done = malmoi.finetune(job.model, task, train, out / "run", judge, seed=job.seed, **options)
    return done.metrics


def train_theirs(job: Job, task: Any, out: Path) -> Mapping[str, float]:
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
    train, judge = map(str, job.files)
    examples = load_examples(task, train).rows
    labels = label_names(task, examples)
    malmoi.load(job.model).save(out / "base")  # as transformers opens it
    tokenizer = read_checkpoint(out / "base").tokenizer
    assert tokenizer is not None
    kind = head_kind(task)
    view = FeatureView(tokenizer, labels, LENGTHS.get(kind.head, LENGTH))
    items = encode_examples(task, examples, view)
    classes = {
        "tag": transformers.AutoModelForTokenClassification,
        "span": transformers.AutoModelForQuestionAnswering,
    }
    named = {"id2label": dict(enumerate(labels)), "num_labels": len(labels)} if labels else {}
    named |= {"problem_type": kind.output.problem_type} if kind.output.problem_type else {}
    network = classes.get(kind.head, transformers.AutoModelForSequenceClassification)
    network = network.from_pretrained(out / "base", **named, dtype=torch.float32)
    settings = transformers.TrainingArguments(
        output_dir=str(out),
        learning_rate=float(job.way.split()[1]),
        per_device_train_batch_size=32 if len(examples) >= LARGE else 16,
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
    network.float().save_pretrained(out / "run")
    tokenizer.save(out / "run")
    return malmoi.evaluate(out / "run", task, judge)


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
    texts = tokenizer([row["text"] for row in rows], truncation=True, max_length=length)
    data = [
        {**{name: column[i] for name, column in texts.items()}, "labels": names.index(row["label"])}
        for i, row in enumerate(rows)
    ]
    trainer = transformers.Trainer(
        model=network,
        args=arguments,
        train_dataset=data,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def chosen_jobs(given: argparse.Namespace) -> Iterator[Job]:
    """The first seed of all sets comes first."""
    sets = readable(found_sets(given.folder))
    if unknown := set(given.sets or ()) - set(sets):
        raise SystemExit(f"no set {', '.join(unknown)}; the folder has: {', '.join(sets)}")
    ways = [OURS, *(f"trainer {rate:g}" for rate in given.rates)]
    for seed in range(1 if given.limit else given.seeds):
        for name in given.sets or sets:
            for way in ways if not given.ours else [OURS]:
                rows = TINY_ROWS if given.limit else given.rows
                yield Job(way, name, seed, given.model, sets[name], rows, bool(given.limit))


def print_points(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line for each set: ours, the Trainer's best rate, the difference, and seconds."""
    points: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if "value" in row:
            points.setdefault(row["task"], {}).setdefault(row["way"], []).append(row)
    gains = []
    for task, ways in points.items():
        means = {way: statistics.mean(r["value"] for r in some) for way, some in ways.items()}
        others = [way for way in means if way != OURS]
        shown = [OURS, *([max(others, key=means.__getitem__)] if others else [])]
        cells = [_cell(way, ways[way]) for way in shown if way in ways]
        if len(shown) > 1 and OURS in means:
            gains.append(means[OURS] - means[shown[1]])
            cells.append(f"{gains[-1]:+.2f}")
        measure = next(iter(ways.values()))[0]["measure"]
        print(f"{task:28} {measure:10} {' | '.join(cells)}", flush=True)
    if gains:
        print(f"mean of {len(gains)} sets: {statistics.mean(gains):+.2f}, least {min(gains):+.2f}")


def _cell(way: str, some: Sequence[Mapping[str, Any]]) -> str:
    values = [row["value"] for row in some]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    seconds = statistics.mean(row["seconds"] for row in some)
    return f"{way} {statistics.mean(values):.2f} ± {spread:.2f} ({len(values)}) {seconds:.0f} s"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("folder", type=Path, help="with train and test files")
    parser.add_argument("--model", default="malmoi-bert", help="the folder of an encoder")
    parser.add_argument("--out", type=Path, help="keeps the rows")
    parser.add_argument("--sets", nargs="+", help="by their names [all]")
    parser.add_argument("--rows", type=int, default=0, help="to learn from [all]")
    parser.add_argument("--rates", nargs="*", type=float, default=RATES, help="of the Trainer")
    parser.add_argument("--ours", action="store_true", help="without the Trainer")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--mps", action="store_true", help="let processes' kernels overlap (MPS)")
    parser.add_argument("--limit", choices=("tiny",), help="a few rows and steps: a dry run")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp())
    # workers share the cores; torch would start a thread per core in each of them
    if given.workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        os.environ.setdefault("RAYON_NUM_THREADS", "2")
    if given.mps:
        start_mps(out)
    jobs = {job.name: job for job in chosen_jobs(given)}
    if not jobs:
        raise SystemExit(f"{given.folder} has no file with train in its name and one to judge")
    rows = run_jobs(run_job, jobs, out, lanes=[None] * given.workers)
    print_points(rows.values())
    if failed := [name for name, row in rows.items() if "error" in row]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
