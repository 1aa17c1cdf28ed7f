"""Texts with several labels: ours beside a sigmoid head by hand in transformers, the same encoder.

    python bench/multilabel.py --data DIR [--rows 1500] [--judged 500] [--json]

DIR has ko/unsmile.{train,valid}.tsv.xz: Korean comments with eleven labels. Both start from one
random BERT with a vocabulary of these rows, and take our settings for this many rows (epochs,
batch, peak rate, linear schedule). By hand every label needs a probability of 0.5; ours chooses its
threshold on rows held out of the training set, which it does not learn from. Judged on rows of the
validation file by micro and macro F1.
"""

import logging
import lzma
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import malmoi
from _timing import benchmark_parser, print_found
from finetune import save_bert
from malmoi.metrics import score_predictions
from malmoi.tokenizer import train_tokenizer

SHAPE = (2, 64, 2)  # layers, width, heads
LENGTH = 48
EPOCHS, BATCH, RATE = 6, 16, 2e-3
Row = dict[str, Any]


def read_rows(path: Path, count: int) -> tuple[list[Row], list[str]]:
    """The first rows, and the names of the labels."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        header, *lines = (line.rstrip("\n").split("\t") for line in file)
    names = header[1:]
    rows = [line for line in lines if len(line) == len(header)][:count]
    return [
        {"text": line[0], "label": [n for n, v in zip(names, line[1:], strict=True) if v == "1"]}
        for line in rows
    ], names


def write_encoder(folder: Path, rows: list[Row]) -> None:
    tokenizer = train_tokenizer([row["text"] for row in rows], kind="wordpiece", vocab=3000)
    more = dict(vocab_size=tokenizer.vocab_size, max_position_embeddings=LENGTH)
    save_bert(folder, tokenizer, SHAPE, transformers.BertModel, **more, initializer_range=0.05)


def ours(folder: Path, train: list[Row], judged: list[Row], out: Path) -> list[tuple[str, ...]]:
    done = malmoi.finetune(
        folder, "multilabel", train, out, judged, text="text", label="label", epochs=EPOCHS,
        batch=BATCH, lr=RATE, length=LENGTH, device="cpu",
    )  # fmt: skip
    return [one.labels for one in done.model.predict([row["text"] for row in judged])]


def by_hand(
    folder: Path, train: list[Row], judged: list[Row], names: list[str]
) -> list[tuple[str, ...]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(names), problem_type="multi_label_classification"
    )
    steps = EPOCHS * -(-len(train) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    def encoded(rows: list[Row]) -> Any:
        texts = [row["text"] for row in rows]
        return tokenizer(
            texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )

    order = np.random.default_rng(0)
    network.train()
    for _ in range(EPOCHS):
        places = order.permutation(len(train))
        for start in range(0, len(train), BATCH):
            some = [train[i] for i in places[start : start + BATCH]]
            gold = torch.tensor([[float(n in row["label"]) for n in names] for row in some])
            network(**encoded(some), labels=gold).loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    network.eval()
    found: list[tuple[str, ...]] = []
    with torch.inference_mode():
        for start in range(0, len(judged), 64):
            chances = network(**encoded(judged[start : start + 64])).logits.sigmoid()
            for row in (chances >= 0.5).tolist():
                found.append(tuple(n for n, held in zip(names, row, strict=True) if held))
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--judged", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    transformers.logging.set_verbosity_error()
    train, names = read_rows(chosen.data / "ko/unsmile.train.tsv.xz", chosen.rows)
    judged, _ = read_rows(chosen.data / "ko/unsmile.valid.tsv.xz", chosen.judged)
    gold = [tuple(row["label"]) for row in judged]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as beside:
        folder = Path(beside, "encoder")
        write_encoder(folder, train)
        for way in ("malmoi", "by_hand"):
            began = time.perf_counter()
            said = (
                ours(folder, train, judged, Path(beside, "out"))
                if way == "malmoi"
                else by_hand(folder, train, judged, names)
            )
            scores = score_predictions(("f1_micro", "f1_macro"), gold, said, names)
            found |= {f"{way}_{name}": round(value, 4) for name, value in scores.items()}
            found[f"{way}_seconds"] = round(time.perf_counter() - began, 1)
    print_found(found, as_json=chosen.json)


if __name__ == "__main__":
    main()
