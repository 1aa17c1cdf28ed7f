"""Multi30k English to German: the small Transformer trained for a minute, BLEU on test 2016.

PYTHONPATH=src python bench/gpu_translation.py --data DIR --out DIR [--limit tiny]

DIR holds multi30k.{train,val,test_2016_flickr}.{en,de}.gz. Copying the source and the same network
before training are there for scale. BLEU is of cased, detokenised text (13a); "lower" ignores case.
"""

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.translation import Pairs, corpus_bleu
from malmoi.inference import Model
from malmoi.model import Network, count_parameters, initialise
from malmoi.training.log import read_metrics
from malmoi.training.pretrain import run_pretraining

LANGUAGES = ("en", "de")
# a CPU's half minute; the batch is one unit of 256 tokens
TINY: dict[str, Any] = {
    "model.depth": 1,
    "model.encoder_depth": 1,
    "tokenizer.vocab": 2000,
    "data.lengths": (256,),
    "train.batch": 1,
    "train.steps": 20,
}


def files(data: Path, part: str) -> list[Path]:
    return [data / f"multi30k.{part}.{language}.gz" for language in LANGUAGES]


def scores(targets: list[str], said: list[str]) -> dict[str, Any]:
    bleu, signature = corpus_bleu(targets, said)
    lower, _ = corpus_bleu([t.lower() for t in targets], [s.lower() for s in said])
    return {"bleu": round(bleu, 2), "lower": round(lower, 2), "signature": signature}


def timed(model: Model, pairs: Pairs, beams: int) -> dict[str, Any]:
    began = time.perf_counter()
    said = model.translate(pairs.sources, beams=beams)
    seconds = round(time.perf_counter() - began, 2)
    return scores(pairs.targets, said) | {"seconds": seconds, "first": said[0]}


def untrained(model: Model) -> Model:
    network = Network(model.config, {"lm": 0})
    initialise(network, seed=1)
    words = model.checkpoint.tokenizer
    return Model(Checkpoint(network.to(model.network.device), words))


def train(data: Path, out: Path, minutes: float, changes: dict[str, Any]) -> Model:
    budget = {} if "train.steps" in changes else {"train.minutes": minutes}
    return run_pretraining(
        "transformer-small",
        data=files(data, "train"),
        out=out,
        **{
            "train.batch": 8,
            "train.compile": False,
            "train.valid_every": 2000,
            **budget,
            **changes,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", choices=("tiny",), help="a dry run on a CPU")
    parser.add_argument("--minutes", type=float, default=1.2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    changes: dict[str, Any] = dict(TINY) if given.limit else {}
    changes |= dict(text.split("=", 1) for text in given.set)
    began = time.perf_counter()
    model = train(given.data, given.out / "en-de", given.minutes, changes)
    trained = round(time.perf_counter() - began, 1)
    test = Pairs.read(files(given.data, "test_2016_flickr")).first(20 if given.limit else None)
    few = test.first(50)
    rows = {
        "copy": scores(test.targets, test.sources),
        "untrained, greedy": timed(untrained(model), few, 1),
        "greedy": timed(model, test, 1),
        "beams 4, alpha 0.6": timed(model, test, 4),
    }
    last = read_metrics(given.out / "en-de" / "metrics.jsonl")[-1]
    result = {
        "device": str(model.network.device),
        "torch": torch.__version__,
        "weights": count_parameters(model.network),
        "steps": last["step"],
        "target_tokens": last["tokens"],
        "training_seconds": round(last["seconds"], 1),
        "wall_seconds": trained,
        "valid_perplexity": last.get("perplexity"),
        "examples": len(test.sources),
        "rows": rows,
    }
    (given.out / "translation.json").write_text(json.dumps(result, indent=2, ensure_ascii=False))
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
    print(f"{'':20} {'BLEU':>6} {'lower':>6} {'s':>6}")
    for name, row in rows.items():
        print(f"{name:20} {row['bleu']:6.2f} {row['lower']:6.2f} {row.get('seconds', 0):6.2f}")
    print(rows["beams 4, alpha 0.6"]["signature"])


if __name__ == "__main__":
    main()
