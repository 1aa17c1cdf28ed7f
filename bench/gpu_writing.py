"""A decoder-only GPT that learns to translate from pairs: English captions into German, on a GPU.

    PYTHONPATH=src python bench/gpu_writing.py --data DIR --out DIR [--limit tiny]

Pre-trains a GPT for 20 seconds on the captions of both languages and a sample of books, fine-tunes
it for writing on Multi30k's pairs, and judges BLEU, chrF and answer loss on test_2016_flickr,
beside copying the prompt, the model before fine-tuning, and the same network from random weights in
the same time. DIR has mt/multi30k.{train,val,test_2016_flickr}.{en,de}.gz and lm/books.en.txt.xz.
`--limit tiny` is a dry run on a CPU.
"""

import argparse
import gzip
import json
import logging
import lzma
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import malmoi


@dataclass(frozen=True)
class Size:
    """How much is done."""

    pairs: int
    judged: int
    book_lines: int
    pretrain_minutes: float
    finetune_minutes: float
    model: dict[str, Any]


SIZES = {
    "full": Size(
        29_000, 1000, 40_000, 20 / 60, 22 / 60,
        {"width": 512, "depth": 6, "heads": 8, "context": 256, "vocab": 10_000, "batch": 128},
    ),
    "tiny": Size(
        200, 20, 200, 4 / 60, 4 / 60,
        {"width": 64, "depth": 2, "heads": 2, "context": 128, "vocab": 1000, "batch": 4},
    ),
}  # fmt: skip


def captions(data: Path, split: str, language: str) -> list[str]:
    with gzip.open(data / "mt" / f"multi30k.{split}.{language}.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def rows(data: Path, split: str, most: int) -> list[dict[str, str]]:
    pairs = zip(captions(data, split, "en"), captions(data, split, "de"), strict=True)
    return [{"prompt": en, "answer": de} for en, de in islice(pairs, most)]


def write_corpus(data: Path, size: Size, path: Path) -> None:
    """Captions of both languages, a few to a document, and the beginning of the books."""
    with lzma.open(data / "lm" / "books.en.txt.xz", "rt", encoding="utf-8") as books:
        lines = list(islice(books, size.book_lines))
    for language in ("en", "de"):
        some = captions(data, "train", language)[: size.pairs]
        for i in range(0, len(some), 8):
            lines.append(" ".join(some[i : i + 8]) + "\n\n")
    path.write_text("".join(lines), "utf-8")


def timed(name: str, work: Callable[[], Any], seconds: dict[str, float]) -> Any:
    began = time.perf_counter()
    done = work()
    seconds[name] = round(time.perf_counter() - began, 1)
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", choices=SIZES, default="full")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    size = SIZES[args.limit]
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.out / "corpus.txt"
    write_corpus(args.data, size, corpus)
    train = rows(args.data, "train", size.pairs)
    test = rows(args.data, "test_2016_flickr", size.judged)
    seconds: dict[str, float] = {}
    gpt = args.out / "gpt"
    timed(
        "pretrain",
        lambda: malmoi.pretrain(
            "gpt2-small", data=corpus, out=gpt, overwrite=True, minutes=size.pretrain_minutes,
            lr=2e-3, compile=False, **size.model,
        ),
        seconds,
    )  # fmt: skip
    found = {}
    for name, scratch in (("fine-tuned", False), ("from random weights", True)):
        options: Any = {"from_scratch": scratch, "batch": 64 if size.pairs > 1000 else 8}
        done = timed(
            name,
            lambda options=options, name=name: malmoi.finetune(
                gpt, "writing", train, args.out / name.replace(" ", "-"), test, overwrite=True,
                minutes=size.finetune_minutes, lr=1e-3, length=128, **options,
            ),
            seconds,
        )  # fmt: skip
        found[name] = done.metrics | {"steps": done.steps}
        samples = [(row["prompt"], row["answer"]) for row in test[:3]]
        for prompt, answer in samples:
            print(f"{prompt}\n  reference: {answer}\n  {name}: {done.model.predict(prompt).text}")
    (args.out / "gpu_writing.json").write_text(
        json.dumps({"metrics": found, "seconds": seconds}, indent=2) + "\n", "utf-8"
    )
    tuned = found["fine-tuned"]
    print(f"\n{'':24}{'BLEU':>8}{'chrF':>8}{'answer loss':>13}{'seconds':>9}")
    print(f"{'copying the prompt':24}{tuned['bleu_copying']:8.2f}")
    print(
        f"{'before fine-tuning':24}{tuned['bleu_untuned']:8.2f}{'':8}"
        f"{tuned['answer_loss_untuned']:13.3f}"
    )
    for name, metrics in found.items():
        print(
            f"{name:24}{metrics['bleu']:8.2f}{metrics['chrf']:8.2f}{metrics['answer_loss']:13.3f}"
            f"{seconds[name]:9.1f}"
        )
    print(f"pre-training: {seconds['pretrain']} s; rows judged: {len(test):,}")


if __name__ == "__main__":
    main()
