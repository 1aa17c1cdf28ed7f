"""Multi30k English to German: the small Transformer trained for a minute, BLEU on test 2016; and a
masked language model of both languages, with and without reading pairs side by side (TLM).

PYTHONPATH=src python bench/gpu_translation.py --data DIR --out DIR [--limit tiny]
    [--recipe transformer-tiny] [--minutes 3] [--set train.batch=32 …] [--masked-steps 0]
    [--variants all|NAME,NAME]

DIR holds multi30k.{train,val,test_2016_flickr}.{en,de}.gz. Copying the source and the same network
before training are there for scale. BLEU is of cased, detokenised text (13a); "lower" ignores case.
Retrieval: for each English sentence of val, is its translation the nearest German vector by cosine?
Vectors are means over tokens, of the middle and of the last layer.

`--variants` trains the named settings of VARIANTS beside one another, each in a process of its own,
and writes OUT/variants.json; they share the machine, so compare them with one another only.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from malmoi.checkpoint import Checkpoint
from malmoi.evaluation.translation import ReferencePairs, corpus_bleu
from malmoi.inference import Model
from malmoi.model import Network, count_parameters, initialise
from malmoi.system.run_folder import read_metrics
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

LINEAR = {"train.schedule": "linear", "train.warmup": 0.1, "train.warmup_steps": 0}
WIDE = {"model.width": 256, "model.hidden": 1024}
VARIANTS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "batch-24": {"train.batch": 24},
    "linear": {"train.batch": 24, "train.lr": 0.003, **LINEAR},
    "linear-less-dropout": {"train.batch": 24, "train.lr": 0.003, "model.dropout": 0.1, **LINEAR},
    "wide": {"train.batch": 24, "train.lr": 0.0015, **LINEAR, **WIDE},
    "wide-vocab-6000": {
        "train.batch": 24, "train.lr": 0.0015, "tokenizer.vocab": 6000, **LINEAR, **WIDE,
    },
}  # fmt: skip


def files(data: Path, part: str) -> list[Path]:
    return [data / f"multi30k.{part}.{language}.gz" for language in LANGUAGES]


def scores(targets: list[str], said: list[str]) -> dict[str, Any]:
    bleu, signature = corpus_bleu(targets, said)
    lower, _ = corpus_bleu([t.lower() for t in targets], [s.lower() for s in said])
    return {"bleu": round(bleu, 2), "lower": round(lower, 2), "signature": signature}


def timed(model: Model, pairs: ReferencePairs, beams: int) -> dict[str, Any]:
    began = time.perf_counter()
    said = model.translate(pairs.sources, beams=beams)
    seconds = round(time.perf_counter() - began, 2)
    return scores(pairs.targets, said) | {"seconds": seconds, "first": said[0]}


def untrained(model: Model) -> Model:
    network = Network(model.config, {"lm": 0})
    initialise(network, seed=1)
    words = model.checkpoint.tokenizer
    return Model(Checkpoint(network.to(model.network.device), words))


def train(given: argparse.Namespace, changes: dict[str, Any]) -> Model:
    budgets = ("train.steps", "train.tokens", "train.epochs")
    budget = {} if set(budgets) & changes.keys() else {"train.minutes": given.minutes}
    return run_pretraining(
        given.recipe,
        data=files(given.data, "train"),
        out=given.out / "en-de",
        **{"train.valid_every": 2000, **budget, **changes},
    )


def train_masked(data: Path, out: Path, together: float, changes: dict[str, Any]) -> Model:
    """An MLM of both languages; `together` is the share of rows that are pairs."""
    return run_pretraining(
        "xlm-small",
        data=files(data, "train"),
        out=out,
        **{
            "data.together": together,
            "train.lr": 1e-3,
            "train.compile": False,
            "train.valid_every": 0,
            **changes,
        },
    )


def retrieval(model: Model, pairs: ReferencePairs, layer: int) -> dict[str, float]:
    """How near translations are: top-1 accuracy, and the mean cosine of pairs and of others."""
    one, other = (
        model.embed(texts, layers=(layer,), language=language)
        for language, texts in enumerate((pairs.sources, pairs.targets))
    )
    one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
    cosines = one @ other.T
    pair = np.diag(cosines)
    rest = (cosines.sum() - pair.sum()) / (cosines.size - len(pair))
    right = cosines.argmax(1) == np.arange(len(pair))
    return {
        "accuracy": round(float(right.mean()), 4),
        "pairs": round(float(pair.mean()), 4),
        "others": round(float(rest), 4),
    }


def compare_masked(given: argparse.Namespace) -> dict[str, Any]:
    """TLM and plain MLM for the same steps, and the network before training."""
    tiny = {"train.steps": 10, "train.batch": 4, "tokenizer.vocab": 2000, "model.depth": 2}
    changes = tiny if given.limit else {"train.steps": given.masked_steps, "train.batch": 128}
    val = ReferencePairs.read(files(given.data, "val")).first(50 if given.limit else None)
    found: dict[str, Any] = {"examples": len(val.sources), "chance": 1 / len(val.sources)}
    for name, together in (("mlm", 0.0), ("tlm", 0.5)):
        began = time.perf_counter()
        model = train_masked(given.data, given.out / name, together, changes)
        middle = model.config.depth // 2
        found[name] = {
            "middle": retrieval(model, val, middle),
            "last": retrieval(model, val, -1),
            "seconds": round(time.perf_counter() - began, 1),
        }
    return found


def compare_variants(given: argparse.Namespace) -> None:
    """Runs each variant in a process of its own, all at once, and prints one row for each."""
    names = list(VARIANTS) if given.variants == "all" else given.variants.split(",")
    if unknown := set(names) - VARIANTS.keys():
        raise SystemExit(f"There is no variant {', '.join(unknown)}: {', '.join(VARIANTS)}.")
    running = {name: subprocess.Popen(variant_command(given, name)) for name in names}
    failed = [name for name, process in running.items() if process.wait()]
    found = {
        name: json.loads((given.out / name / "translation.json").read_text())
        for name in names
        if name not in failed
    }
    (given.out / "variants.json").write_text(json.dumps(found, indent=2, ensure_ascii=False))
    print(f"{'':20} {'weights':>10} {'steps':>6} {'s':>5} {'ppl':>6} {'greedy':>6} {'beams':>6}")
    for name, result in found.items():
        greedy, beams = (result["rows"][row]["bleu"] for row in ("greedy", "beams 4, alpha 0.6"))
        print(
            f"{name:20} {result['weights']:10,} {result['steps']:6} "
            f"{result['training_seconds']:5.0f} {result['valid_perplexity'] or 0:6.1f} "
            f"{greedy:6.2f} {beams:6.2f}"
        )
    if failed:
        raise SystemExit(f"These variants failed: {', '.join(failed)}.")


def variant_command(given: argparse.Namespace, name: str) -> list[str]:
    kept = set(TINY) if given.limit else set()  # a dry run stays small
    changes = [f"{key}={value}" for key, value in VARIANTS[name].items() if key not in kept]
    limit = ["--limit", given.limit] if given.limit else []
    common = ["--data", given.data, "--out", given.out / name, "--recipe", given.recipe]
    common += ["--minutes", given.minutes, "--masked-steps", 0, *limit]
    sets = [part for change in (*changes, *given.set) for part in ("--set", change)]
    return [sys.executable, __file__, *map(str, common), *sets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", choices=("tiny",), help="a dry run on a CPU")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--recipe", default="transformer-small")
    parser.add_argument(
        "--masked-steps", type=int, default=4000, help="of each masked model; 0: none"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--variants", help="all, or names separated by commas")
    given = parser.parse_args()
    if given.variants:
        compare_variants(given)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    changes: dict[str, Any] = dict(TINY) if given.limit else {}
    changes |= dict(text.split("=", 1) for text in given.set)
    began = time.perf_counter()
    model = train(given, changes)
    trained = round(time.perf_counter() - began, 1)
    test = ReferencePairs.read(files(given.data, "test_2016_flickr")).first(
        20 if given.limit else None
    )
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
        "masked": compare_masked(given) if given.masked_steps else {},
    }
    (given.out / "translation.json").write_text(json.dumps(result, indent=2, ensure_ascii=False))
    print(json.dumps({k: v for k, v in result.items() if k not in ("rows", "masked")}))
    print(f"{'':20} {'BLEU':>6} {'lower':>6} {'s':>6}")
    for name, row in rows.items():
        print(f"{name:20} {row['bleu']:6.2f} {row['lower']:6.2f} {row.get('seconds', 0):6.2f}")
    print(rows["beams 4, alpha 0.6"]["signature"])
    for name in ("mlm", "tlm") if result["masked"] else ():
        for layer in ("middle", "last"):
            row = result["masked"][name][layer]
            print(
                f"{name} {layer:6} layer: nearest {row['accuracy']:.3f}, cosine of pairs "
                f"{row['pairs']:.3f}, of others {row['others']:.3f}"
            )


if __name__ == "__main__":
    main()
