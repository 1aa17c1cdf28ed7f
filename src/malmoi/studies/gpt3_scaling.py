"""GPT-3 figure 3.1: the loss falls with compute by a power law, L = (C / C₀)^−α."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from malmoi.inference import load
from malmoi.planning.flops import flops
from malmoi.report.chart import Line, chart, standalone_svg
from malmoi.studies.gpt2_zeroshot import SIZES, sized_gpt
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import BITS_CHARACTERS
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.training.recipe import read_recipe

# steps as a share of the scale's: larger models get more text, as on the frontier of the figure
STEPS = {"S": 1 / 8, "M": 1 / 4, "L": 1 / 2, "XL": 1}
COMPUTE = "GFLOPs"
LOSS = "held-out loss"
PF_DAY = 1e15 * 86_400 / 1e9  # in GFLOPs
THEIR_EXPONENT = 0.048  # L = 2.57 · C^−0.048, C in PF-days
RESAMPLES = 1000


@dataclass(frozen=True)
class PowerLaw:
    """L = (C / C₀)^−α: α, its bootstrap standard error, and C₀."""

    exponent: float
    error: float
    scale: float

    def loss(self, compute: float) -> float:
        return float((compute / self.scale) ** -self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Least squares of log L over log C; the error is the spread over resampled points."""
    slope, offset = _line([(math.log(c), math.log(loss)) for c, loss in points])
    rng = random.Random(0)
    slopes = []
    for _ in range(RESAMPLES):
        some = rng.choices(points, k=len(points))
        if len({c for c, _ in some}) > 1:  # a slope needs two values of compute
            slopes.append(_line([(math.log(c), math.log(loss)) for c, loss in some])[0])
    mean = sum(slopes) / len(slopes)
    error = math.sqrt(sum((one - mean) ** 2 for one in slopes) / max(1, len(slopes) - 1))
    return PowerLaw(-slope, error, math.exp(-offset / slope))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and offset of a line."""
    x = sum(a for a, _ in points) / len(points)
    y = sum(b for _, b in points) / len(points)
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return slope, y - slope * x


def loss_by_compute(judged: JudgedModel, text: Path) -> dict[str, float]:
    """The loss per token of held-out text, and the FLOPs of the training."""
    model = load(judged.folder, device=judged.device)
    each = flops(model.network, read_recipe(judged.folder / "recipe.json")).exact
    held_out = text.read_text("utf-8")[:BITS_CHARACTERS]
    return {
        LOSS: math.log(model.perplexity(held_out)),
        COMPUTE: each * judged.facts()["tokens"] / 1e9,
    }


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        for size in SIZES:
            recipe = sized_gpt(plan, size, seed)
            steps = max(1, round(STEPS[size] * recipe.train.steps))
            judge = partial(loss_by_compute, text=plan.data.held_out)
            yield Cell(size, seed, judge, recipe.override({"train.steps": steps}), plan.data.text)


def _points(results: StudyResults) -> list[tuple[float, float]]:
    return [(r["values"][COMPUTE], r["values"][LOSS]) for r in results.records]


def _notes(results: StudyResults) -> list[Words]:
    if len(results.rows) < 2:
        return []
    law = fit_power_law(_points(results))
    found = f"α = {law.exponent:.3f} ± {law.error:.3f}"
    return [
        Words(
            f"Fitted: L = (C / C₀)^−α with {found} and C₀ = {law.scale / PF_DAY:.2g} PF-days "
            f"(error by bootstrap over runs); the paper has α = {THEIR_EXPONENT}.",
            f"맞춘 식: L = (C / C₀)^−α, {found}, C₀ = {law.scale / PF_DAY:.2g} PF-days(오차는 "
            f"실행을 다시 뽑은 부트스트랩). 논문의 α는 {THEIR_EXPONENT}.",
        )
    ]


def _claims(results: StudyResults) -> list[Claim]:
    better = Words("More compute, lower loss", "연산량이 많을수록 손실이 낮다")
    return [
        Claim(better, larger, smaller, LOSS)
        for smaller, larger in zip(results.rows, results.rows[1:], strict=False)
    ]


def _figure(results: StudyResults) -> str:
    """log₁₀ L over log₁₀ C: a power law is a line."""
    lines: dict[str, Line] = {}
    points = sorted(_points(results))
    if len(results.rows) > 1:
        law = fit_power_law(points)
        ends = [points[0][0], points[-1][0]]
        name = f"α = {law.exponent:.3f} ± {law.error:.3f}"
        lines[name] = Line([(math.log10(c), math.log10(law.loss(c))) for c in ends])
    for row in results.rows:
        found = results.at(row, LOSS)
        compute = results.at(row, COMPUTE)
        assert found is not None
        assert compute is not None
        error = found.deviation / found.mean / math.log(10)
        lines[row] = Line([(math.log10(compute.mean), math.log10(found.mean))], [error])
    across = "log₁₀ of training GFLOPs"
    return standalone_svg(chart(lines, across, "log₁₀ of loss", size=(820, 340)))


STUDY = Study(
    "gpt3-scaling",
    Words("the power law of the loss over compute", "연산량에 따른 손실과 거듭제곱 법칙"),
    "Brown et al. 2020, figure 3.1",
    _cells,
    _claims,
    caption=Words(
        "Loss per token of held-out text over the FLOPs of training, both as log₁₀, with the "
        "fitted power law; bars are one standard deviation over seeds.",
        "학습 연산량에 따른, 따로 둔 텍스트의 토큰당 손실(둘 다 log₁₀)과 맞춘 거듭제곱 법칙. "
        "막대는 시드에 따른 표준편차 하나.",
    ),
    figure=_figure,
    notes=_notes,
)
