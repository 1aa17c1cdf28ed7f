"""What a Transformer-XL's memory is good for: perplexity of unseen pages of a book.

    PYTHONPATH=src python bench/gpu_xl.py --data DIR --out results [--limit tiny]

DIR holds lm/books.en.txt.xz. A Transformer-XL is trained on the books but the last, then reads the
last one with no memory, with that of its training, and with longer ones: the same weights. The last
table is also written to OUT/xl.json.
"""

import argparse
import json
import lzma
import time
from pathlib import Path

import torch

import malmoi

SIZES = {
    "": {
        "model.width": 512, "model.depth": 8, "model.heads": 8, "model.hidden": 2048,
        "model.context": 128, "model.memory": 128,
        "model.attention": ["causal & local:129"], "train.batch": 64, "tokenizer.vocab": 8000,
    },
    "tiny": {
        "model.width": 64, "model.depth": 2, "model.heads": 2, "model.hidden": 128,
        "model.context": 32, "model.memory": 32,
        "model.attention": ["causal & local:33"], "train.batch": 8, "tokenizer.vocab": 1000,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--limit", choices=["tiny"], default="")
    parser.add_argument("--minutes", type=float, default=0.6)
    given = parser.parse_args()
    tiny = bool(given.limit)
    given.out.mkdir(parents=True, exist_ok=True)
    with lzma.open(given.data / "lm/books.en.txt.xz", "rt", encoding="utf-8") as file:
        books = file.read()
    *training, last = books.split("\n\n\n")
    text = given.out / "books.txt"
    text.write_text("\n\n\n".join(training)[: 400_000 if tiny else None], "utf-8")
    settings = {
        **SIZES[given.limit],
        "train.lr": 1e-3,
        "train.warmup_steps": 50,
        "train.valid_every": 0,
        "data.documents": "blanks",
    }
    budget = {"steps": 100} if tiny else {"minutes": given.minutes}
    run = given.out / "xl"
    model = malmoi.pretrain("transformer-xl-small", data=str(text), out=run, **budget, **settings)
    own = model.config.memory
    page = last[: 8_000 if tiny else 200_000]
    rows = []
    for memory in (0, own // 2, own, 2 * own, 4 * own):
        begin = time.perf_counter()
        value = model.perplexity(page, memory=memory)
        rows.append({"memory": memory, "perplexity": value})
        rows[-1]["seconds"] = time.perf_counter() - begin
    (given.out / "xl.json").write_text(json.dumps(rows, indent=1))
    print(
        f"context {model.config.context}, device {'cuda' if torch.cuda.is_available() else 'cpu'}"
    )
    print("| memory | perplexity of the unseen book | s |\n|---|---|---|")
    for row in rows:
        print(f"| {row['memory']} | {row['perplexity']:.2f} | {row['seconds']:.1f} |")


if __name__ == "__main__":
    main()
