"""Labelling a file of short texts: ours beside transformers' pipeline and a loop by hand, one run.

    malmoi bench predict [--rows N] [--rounds N] [--json]

A random BERT classifier and N made-up texts (default 10,000) of 3 to 50 words in a CSV file. Each
way reads the file, predicts, and writes a CSV with labels and scores; loading the model is not
timed. The pipeline and the loop take batches of 32 in the order of the file, padded to the longest
in the batch; the rounds alternate, and the fastest of each counts. A ratio above 1 means that we
are faster. Labels must be the same.
"""

import csv
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import malmoi
from _timing import benchmark_parser, fewest, print_found
from finetune import SHAPES, made_up_texts, save_bert
from malmoi.cli.prediction_file import predict_file
from malmoi.tokenizer import train_tokenizer

BATCH = 32
Label = Callable[[Path, Path], None]


def write_rows(path: Path, count: int) -> list[str]:
    texts = made_up_texts(count)
    path.write_text("id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
    return texts


def write_model(folder: Path, texts: list[str]) -> None:
    tokenizer = train_tokenizer(texts[:2000], kind="wordpiece", vocab=400)
    labels = {0: "bad", 1: "good", 2: "mixed"}
    names = {name: i for i, name in labels.items()}
    kind = transformers.BertForSequenceClassification
    more = dict(id2label=labels, label2id=names, initializer_range=0.1)
    save_bert(folder, tokenizer, SHAPES["cpu"], kind, **more)


def read_texts(data: Path) -> list[dict[str, str]]:
    with data.open(newline="") as file:
        return list(csv.DictReader(file))


def write_labels(out: Path, rows: list[dict[str, str]], found: list[tuple[str, float]]) -> None:
    with out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "text", "prediction", "score"])
        for row, one in zip(rows, found, strict=True):
            table.writerow([row["id"], row["text"], *one])


def ours(folder: Path) -> Label:
    model = malmoi.load(folder, device="cpu")

    def label(data: Path, out: Path) -> None:
        predict_file(model, data, out, text="text")

    return label


def pipeline(folder: Path) -> Label:
    classify: Any = transformers.pipeline("text-classification", str(folder), device="cpu")

    def label(data: Path, out: Path) -> None:
        rows = read_texts(data)
        found = classify([row["text"] for row in rows], batch_size=BATCH)
        write_labels(out, rows, [(one["label"], one["score"]) for one in found])

    return label


def by_hand(folder: Path) -> Label:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    names = network.config.id2label

    @torch.inference_mode()
    def label(data: Path, out: Path) -> None:
        rows = read_texts(data)
        found: list[tuple[str, float]] = []
        for start in range(0, len(rows), BATCH):
            texts = [row["text"] for row in rows[start : start + BATCH]]
            batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            best = network(**batch).logits.softmax(-1).max(-1)
            scores = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found += [(names[i], score) for i, score in scores]
        write_labels(out, rows, found)

    return label


def labels_of(out: Path) -> list[str]:
    return [row["prediction"] for row in read_texts(out)]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as beside:
        here = Path(beside)
        texts = write_rows(here / "rows.csv", chosen.rows)
        write_rows(here / "warm.csv", 4 * BATCH)
        write_model(here / "model", texts)
        ways = {"malmoi": ours, "pipeline": pipeline, "by_hand": by_hand}
        ready = {name: way(here / "model") for name, way in ways.items()}
        for name, label in ready.items():
            label(here / "warm.csv", here / f"{name}-warm.csv")
        works = {
            name: partial(label, here / "rows.csv", here / f"{name}.csv")
            for name, label in ready.items()
        }
        seconds = fewest(works, chosen.rounds)
        same = labels_of(here / "malmoi.csv")
        equal = all(labels_of(here / f"{name}.csv") == same for name in ready)
    found: dict[str, Any] = {
        f"{name}_rows_per_second": round(chosen.rows / spent, 1) for name, spent in seconds.items()
    }
    for name in ("pipeline", "by_hand"):
        found[f"ratio_{name}"] = round(seconds[name] / seconds["malmoi"], 2)
    found["identical"] = equal
    print_found(found, as_json=chosen.json)


if __name__ == "__main__":
    main()
