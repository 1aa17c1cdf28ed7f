"""GPT-3: the power law of the loss over compute, L = (C / C₀)^−α, and sparse layers."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from malmoi.inference import load
from malmoi.model import Network
from malmoi.planning.flops import flops, keys_seen
from malmoi.report.chart import Line, chart, standalone_svg
from malmoi.studies.measures import BITS_CHARACTERS, held_out_bits
from malmoi.studies.report import StudyResults
from malmoi.studies.study import Cell, JudgedModel, StudyPlan, Words
from malmoi.studies.tables import sized_gpt
from malmoi.training.recipe import Recipe, read_recipe

# steps as a share of the scale's: larger models get more text, as on the frontier of the figure
STEPS = {"S": 1 / 8, "M": 1 / 4, "L": 1 / 2, "XL": 1}
COMPUTE = "GFLOPs"
LOSS = "held-out loss"
PF_DAY = 1e15 * 86_400 / 1e9  # in GFLOPs
RESAMPLES = 1000
LONGER = 4  # times the scale's context with fewer rows: sparsity saves nothing on short texts
STRIDE = 8  # a context has this many strides
SUMMARY = 4  # a stride has this many summary columns (Child et al. 2019: c of 8 to 32 for l of 128)


# ------------------------------------------------------------------ the power law


@dataclass(frozen=True)
class PowerLaw:
    """L = (C / C₀)^−α: α, its bootstrap standard error, and C₀."""

    exponent: float
    error: float
    scale: float

    def __str__(self) -> str:
        return f"α = {self.exponent:.3f} ± {self.error:.3f}"

    def loss(self, compute: float) -> float:
        return float((compute / self.scale) ** -self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Least squares of log L over log C; the error is the spread over resampled points."""
    slope, offset = _line(points)
    rng = random.Random(0)
    slopes = []
    for _ in range(RESAMPLES):
        some = rng.choices(points, k=len(points))
        if len({c for c, _ in some}) > 1:  # a slope needs two values of compute
            slopes.append(_line(some)[0])
    mean = sum(slopes) / len(slopes)
    error = math.sqrt(sum((one - mean) ** 2 for one in slopes) / max(1, len(slopes) - 1))
    return PowerLaw(-slope, error, math.exp(-offset / slope))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and offset of log L over log C."""
    logs = [(math.log(c), math.log(loss)) for c, loss in points]
    x, y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope = sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)
    return slope, y - slope * x


def loss_by_compute(judged: JudgedModel, text: Path) -> dict[str, float]:
    """The loss per token of held-out text, and the FLOPs of the training."""
    model = load(judged.folder, device=judged.device)
    each = flops(model.network, read_recipe(judged.folder / "recipe.json")).exact
    held_out = text.read_text("utf-8")[:BITS_CHARACTERS]
    loss = math.log(model.perplexity(held_out))
    return {LOSS: loss, COMPUTE: each * judged.facts()["tokens"] / 1e9}


def gpt3_scaling_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    for size, share in STEPS.items():
        recipe = sized_gpt(plan, size, seed)
        recipe = recipe.override({"train.steps": max(1, round(share * recipe.train.steps))})
        yield plan.cell(size, recipe, loss_by_compute, text=plan.data.held_out)


def _points(results: StudyResults) -> list[tuple[float, float]]:
    return sorted((r["values"][COMPUTE], r["values"][LOSS]) for r in results.records)


def _scaling_notes(results: StudyResults, notes: Sequence[Words]) -> list[Words]:
    if len(results.rows) < 2:
        return []
    law = fit_power_law(_points(results))
    return [note.format(law=law, days=law.scale / PF_DAY) for note in notes]


def _scaling_figure(results: StudyResults) -> str:
    """log₁₀ L over log₁₀ C: a power law is a line."""
    lines: dict[str, Line] = {}
    points = _points(results)
    if len(results.rows) > 1:
        law = fit_power_law(points)
        ends = (points[0][0], points[-1][0])
        lines[str(law)] = Line([(math.log10(c), math.log10(law.loss(c))) for c in ends])
    for row in results.rows:
        loss, compute = results.at(row, LOSS), results.at(row, COMPUTE)
        assert loss is not None
        assert compute is not None
        error = loss.deviation / loss.mean / math.log(10)
        lines[row] = Line([(math.log10(compute.mean), math.log10(loss.mean))], [error])
    across = "log₁₀ of training GFLOPs"
    return standalone_svg(chart(lines, across, "log₁₀ of loss", size=(820, 340)))


# ------------------------------------------------------------------ sparse layers at equal compute


def patterns(context: int) -> dict[str, list[str]]:
    """The layers' attention, in a cycle."""
    stride = context // STRIDE
    return {
        "dense": ["causal"],
        "banded": ["causal", f"causal & local:{stride}"],
        "strided": [f"causal & strided:{stride}"],
        "fixed": [f"causal & fixed:{stride},{max(1, stride // SUMMARY)}"],
    }


def training_flops(recipe: Recipe) -> float:
    """FLOPs per token."""
    with torch.device("meta"):
        network = Network(recipe.model, {"lm": 0})
    return flops(network, recipe).exact


def attended(judged: JudgedModel) -> dict[str, float]:
    """Mean number of keys per token, and the number of tokens trained on."""
    c = read_recipe(judged.folder / "recipe.json").model
    seen = [keys_seen(text, c.heads, c.context) for text in c.attention]
    return {"keys seen": sum(seen) / len(seen), "million tokens": judged.facts()["tokens"] / 1e6}


def gpt3_sparse_cells(plan: StudyPlan, seed: int) -> Iterator[Cell]:
    base = plan.scale.recipe("gpt", seed)
    if not plan.scale.faithful:
        longer = LONGER * base.model.context
        fewer = max(1, base.train.batch // LONGER)
        base = base.override({"model.context": longer, "train.batch": fewer})
    dense = training_flops(base)
    for row, attention in patterns(base.model.context).items():
        sparse = base.override({"model.attention": attention})
        steps = round(base.train.steps * dense / training_flops(sparse))
        recipe = sparse.override({"train.steps": steps})
        yield plan.cell(row, recipe, held_out_bits, text=plan.data.held_out)
        yield plan.cell(row, recipe, attended)


SHOWN = {
    ("gpt3-scaling", "figure"): _scaling_figure,
    ("gpt3-scaling", "notes"): _scaling_notes,
}
