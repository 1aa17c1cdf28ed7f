"""Few labels and retrieval with a real sentence encoder, on a GPU: what each setting gives.

PYTHONPATH=src python bench/gpu_labels.py --data DATA --model MINILM --out OUT

DATA has glue/SST-2, glue/STS-B, squad and lm/reviews.en.txt.xz; MINILM is the folder of
all-MiniLM-L6-v2. Sixteen phrases of SST-2's training set (eight a label, ten draws) are learnt by
plain fine-tuning, by the contrastive stage with several rates and numbers of passes, and after the
encoder was adapted to unlabelled film reviews (the two halves of a review belong together). Then
SQuAD's questions and paragraphs and STS-B before and after `finetune similarity`. Writes
labels.json; `--limit tiny` is a trial of everything on a CPU.
"""

import argparse
import json
import lzma
import random
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import malmoi

RATES = (2e-5, 5e-5, 1e-4, 2e-4)
PASSES = (10, 20, 40)


def read_table(path: Path) -> list[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        header, *lines = file.read().splitlines()
    names = header.split("\t")
    return [dict(zip(names, line.split("\t"), strict=False)) for line in lines]


def sixteen(rows: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Eight phrases of each label that are whole sentences."""
    draw = random.Random(seed)
    whole = [row for row in rows if len(row["sentence"].split()) >= 8]
    by_label = {label: [row for row in whole if row["label"] == label] for label in "01"}
    return [row for some in by_label.values() for row in draw.sample(some, 8)]


def halves(path: Path, count: int) -> list[dict[str, str]]:
    """Reviews cut in two: the halves are of one opinion about one film."""
    found = []
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if len(words) >= 40:
                middle = min(len(words) // 2, 60)
                first, second = words[:middle], words[middle : 2 * middle]
                found.append({"anchor": " ".join(first), "positive": " ".join(second)})
            if len(found) == count:
                break
    return found


class Bench:
    def __init__(self, out: Path, device: str) -> None:
        self.out = out
        self.device = device
        self.table: list[dict[str, Any]] = []
        self.runs = 0

    def finetune(self, model: Any, task: Any, data: Any, dev: Any, **options: Any) -> Any:
        self.runs += 1
        folder = self.out / f"run-{self.runs}"
        return malmoi.finetune(
            model, task, data, folder, dev, device=self.device, overwrite=True, **options
        )

    def few_labels(self, name: str, model: Any, draws: list[Any], dev: Any, **options: Any) -> None:
        began = time.monotonic()
        found = [
            self.finetune(model, "sst2", rows, dev, **options).metrics["accuracy"] for rows in draws
        ]
        spread = stdev(found) if len(found) > 1 else 0.0
        self.add(name, accuracy=mean(found), deviation=spread, began=began, runs=found)

    def add(self, name: str, *, began: float, **values: Any) -> None:
        row = {"name": name, "seconds": round(time.monotonic() - began, 1), **values}
        self.table.append(row)
        (self.out / "labels.json").write_text(json.dumps(self.table, indent=1))
        shown = (f"{k} {v:.4f}" for k, v in values.items() if isinstance(v, float))
        print(f"{name:44} {row['seconds']:6.1f} s  {', '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default=None)
    parser.add_argument("--limit", choices=("tiny",))
    given = parser.parse_args()
    tiny = given.limit == "tiny"
    given.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.out, given.device or ("cpu" if tiny else "cuda"))
    model = malmoi.load(given.model, device=bench.device)
    sst = given.data / "glue" / "SST-2"
    train = read_table(sst / "train.tsv.xz")
    dev = read_table(sst / "dev.tsv.xz")[: 8 if tiny else None]
    draws = [sixteen(train, seed) for seed in range(1 if tiny else 10)]
    short = {"length": 16} if tiny else {}
    bench.few_labels("plain fine-tuning", model, draws, dev, contrastive=False, **short)
    for rate in RATES[: 1 if tiny else None]:
        for passes in (1,) if tiny else PASSES:
            name = f"contrastive, lr {rate:g}, {passes} passes"
            bench.few_labels(name, model, draws, dev, lr=rate, epochs=passes, **short)
    began = time.monotonic()
    pairs = halves(given.data / "lm" / "reviews.en.txt.xz", 12 if tiny else 40_000)
    judged = pairs[: len(pairs) // 10]
    options = {"batch": 4, "steps": 1, "length": 16} if tiny else {"batch": 128, "length": 96}
    done = bench.finetune(
        model, "retrieval", pairs[len(judged) :], judged, lr=5e-5, **({"epochs": 1} | options)
    )
    bench.add("reviews' halves", began=began, **done.metrics)
    for rate in (5e-5, 1e-4) if not tiny else ():
        name = f"adapted, contrastive, lr {rate:g}, 20 passes"
        bench.few_labels(name, done.model, draws, dev, lr=rate, epochs=20)
    retrieval(bench, model, given.data, tiny=tiny)


def retrieval(bench: Bench, model: Any, data: Path, *, tiny: bool) -> None:
    """SQuAD's paragraphs by their questions and STS-B, before and after learning from each."""
    files = {
        "squad-retrieval": [
            data / "squad" / f"{n}.json.xz" for n in ("train-part-v1.1", "dev-v1.1")
        ],
        "stsb": [data / "glue" / "STS-B" / f"{name}.tsv.xz" for name in ("train", "dev")],
    }
    for task, (train, dev) in files.items():
        began = time.monotonic()
        if tiny and task == "squad-retrieval":
            continue
        if not tiny:
            bench.add(f"{task}, before", began=began, **_numbers(malmoi.evaluate(model, task, dev)))
        began = time.monotonic()
        kind: Any = task
        if task == "stsb":
            rows = [read_table(file) for file in (train, dev)]
            kind = malmoi.custom_task(
                "similarity", text="sentence1", pair="sentence2", label="score"
            )
            train, dev = (some[: 16 if tiny else None] for some in rows)  # type: ignore[assignment]
        options = {"steps": 1} if tiny else {"epochs": 2}
        done = bench.finetune(model, kind, train, dev, lr=3e-5, batch=64, **options)
        bench.add(f"{task}, after", began=began, **_numbers(done.metrics))


def _numbers(found: Any) -> dict[str, float]:
    return {name: value for name, value in found.items() if isinstance(value, float)}


if __name__ == "__main__":
    main()
