"""The planner beside the card: memory and step time as `malmoi plan` predicts them, and measured.

    PYTHONPATH=src python bench/gpu_plan.py --out OUT [--gpu h200] [--steps 8] [--limit tiny]

Each size trains some steps on random tokens, as `malmoi pretrain` does (bf16, compiled, the passes
of a step added up), in a process of its own. Memory is torch's peak of allocated bytes, the step
time the median. The table is printed last and written to OUT/plan.json. `--limit tiny` shrinks the
models for a processor, where memory is not measured.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.model import Network, initialise
from malmoi.planning.gpus import GPUS
from malmoi.planning.plan import Fleet, plan_run
from malmoi.training.estimate import resolve_for_estimate
from malmoi.training.feed import PhaseFeed
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe
from malmoi.training.recipes import named_recipe
from malmoi.training.run import TrainingRun
from malmoi.training.trainer import Trainer

# recipe, length, rows of a step, rows of a pass
SIZES = {
    "bert-base, 128 tokens": ("bert-base", 128, 512, 256),
    "gpt2-small, 1024 tokens": ("gpt2-small", 1024, 64, 32),
    "gpt2-medium, 1024 tokens": ("gpt2-medium", 1024, 32, 16),
}
TINY = dict.fromkeys(("model.width", "model.context"), 64) | {
    "model.depth": 2,
    "model.heads": 2,
    "model.vocab": 500,
}
WARM_STEPS = 3  # compilation and first allocations
WITHIN = {"memory": 0.10, "seconds": 0.20}
TARGET_STEPS = 100_000  # of a run that never ends here


def sized_recipe(name: str, *, tiny: bool) -> Recipe:
    base, length, batch, micro = SIZES[name]
    settings: dict[str, Any] = {
        "data.lengths": [32 if tiny else length],
        "data.shares": [1.0],
        "train.batch": 4 if tiny else batch,
        "train.micro": 2 if tiny else micro,
        "train.steps": TARGET_STEPS,
        "train.tokens": 0,
        "train.epochs": 0,
    }
    return resolve_for_estimate(named_recipe(base).override(settings | (TINY if tiny else {})))


def random_pass(recipe: Recipe, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of one pass, as the loader makes them."""
    c = recipe.train
    length = recipe.phases[0][0]
    vocab = recipe.model.vocab
    tokens = torch.randint(vocab, (c.micro, length), device=device)
    if recipe.objective == "lm":
        return {"tokens": tokens, "lm_labels": torch.randint_like(tokens, vocab)}
    slots = torch.randperm(tokens.numel(), device=device)
    slots = slots[: round(recipe.data.mask_rate * tokens.numel())].sort().values
    return {
        "tokens": tokens,
        "segments": torch.arange(length, device=device).expand_as(tokens) // (length // 2 + 1),
        "mlm_slots": slots,
        "mlm_labels": torch.randint(vocab, slots.shape, device=device),
        "nsp_labels": torch.randint(2, (c.micro,), device=device),
    }


def measure(name: str, device: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Peak bytes and seconds of a step."""
    place = torch.device(device)
    recipe = sized_recipe(name, tiny=tiny)
    heads = {"lm": 0} if recipe.objective == "lm" else {"mlm": 0, "nsp": 2}
    network = initialise(Network(recipe.model, heads), 0)
    nothing = PhaseFeed(lambda share: NotImplemented, recipe.phases[0][0], 1)
    passes = recipe.train.batch // recipe.train.micro
    with tempfile.TemporaryDirectory() as folder:
        group = ProcessGroup(device=place)
        checkpoint = Checkpoint(network, None)
        run = TrainingRun(recipe, checkpoint, [nothing], [], Path(folder), group)
        trainer = Trainer(run)
        spent = []
        for number in range(WARM_STEPS + steps):
            if number == WARM_STEPS and place.type == "cuda":
                torch.cuda.reset_peak_memory_stats(place)
            given = [random_pass(recipe, place) for _ in range(passes)]
            _wait(place)
            began = time.perf_counter()
            trainer.step(given)
            _wait(place)
            spent.append(time.perf_counter() - began)
    cuda = place.type == "cuda"
    return {
        "memory": torch.cuda.max_memory_allocated(place) if cuda else None,
        "reserved": torch.cuda.max_memory_reserved(place) if cuda else None,
        "seconds": statistics.median(spent[WARM_STEPS:]),
        "first_seconds": spent[0],
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predict(name: str, gpu: str, *, tiny: bool) -> dict[str, float]:
    recipe = sized_recipe(name, tiny=tiny)
    plan = plan_run(recipe, Fleet(GPUS[gpu]))
    return {"memory": plan.memory.total, "seconds": plan.seconds / plan.steps}


def ratio(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else predicted / measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", choices=["tiny"])
    given = parser.parse_args()
    tiny = given.limit == "tiny"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in SIZES:
        predicted = predict(name, given.gpu, tiny=tiny)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(measure, (name, device, given.steps, tiny))
        row = {"size": name, "predicted": predicted, "measured": measured}
        row["ratio"] = {part: ratio(predicted[part], measured[part]) for part in WITHIN}
        rows.append(row)
        print(json.dumps(row), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts = {"device": card, "torch": torch.__version__, "tiny": tiny, "rows": rows}
    (given.out / "plan.json").write_text(json.dumps(facts, indent=2) + "\n")
    print_rows(rows)


def print_rows(rows: list[dict[str, Any]]) -> None:
    print("| size | GB predicted | GB measured | ratio | ms predicted | ms measured | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [row["size"]]
        for part, unit, form in (("memory", 1e9, ".1f"), ("seconds", 1e-3, ".0f")):
            for which in ("predicted", "measured"):
                value = row[which][part]
                cells.append("–" if value is None else format(value / unit, form))
            found = row["ratio"][part]
            held = "–" if found is None else format(found, ".2f")
            outside = found is not None and abs(found - 1) > WITHIN[part]
            cells.append(held + (" (outside)" if outside else ""))
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
