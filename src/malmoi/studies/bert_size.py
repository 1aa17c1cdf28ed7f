"""BERT table 6: depth, width and heads."""

import math
from collections.abc import Iterator
from functools import partial

from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import tuned_cell
from malmoi.studies.table import Claim, StudyResults, Words

MIN_DEPTH = 4  # so that a quarter of the base's layers is one layer
COLUMNS = ("perplexity", "MNLI", "MRPC", "SST-2")
# (depth, width, heads) as shares of the base's → the paper's row
SIZES = {
    "¼ of the layers": ((1 / 4, 1, 1), (5.84, 77.9, 79.8, 88.4)),
    "½ of the layers, ¼ of the heads": ((1 / 2, 1, 1 / 4), (5.24, 80.6, 82.2, 90.7)),
    "½ of the layers": ((1 / 2, 1, 1), (4.68, 81.9, 84.8, 91.3)),
    "base": ((1, 1, 1), (3.99, 84.4, 86.7, 92.9)),
    "⁴⁄₃ wider": ((1, 4 / 3, 4 / 3), (3.54, 85.7, 86.9, 93.3)),
    "⁴⁄₃ wider, twice the layers": ((2, 4 / 3, 4 / 3), (3.23, 86.6, 87.8, 93.7)),
}


def mlm_perplexity(judged: JudgedModel) -> dict[str, float]:
    """Perplexity of masked words in the validation text."""
    return {"perplexity": math.exp(judged.facts()["mlm_loss"])}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        base = plan.scale.recipe("bert", seed)
        depth = max(MIN_DEPTH, base.model.depth)
        for row, ((deep, wide, many), _) in SIZES.items():
            shape = {
                "model.depth": round(deep * depth),
                "model.width": round(wide * base.model.width),
                "model.heads": max(1, round(many * base.model.heads)),
            }
            hidden = {"model.hidden": 0}  # four times the width again
            recipe = base.override(shape | hidden)
            yield Cell(row, seed, partial(mlm_perplexity), recipe, plan.data.text)
            for task in plan.tasks("pair", "sentence"):
                yield tuned_cell(plan, row, recipe, task)


def _claims(results: StudyResults) -> list[Claim]:
    small, base, large = "¼ of the layers", "base", "⁴⁄₃ wider, twice the layers"
    better = Words("Larger models predict better", "모델이 클수록 더 잘 예측한다")
    tasks = Words("Larger models do better on tasks", "모델이 클수록 과제 점수가 높다")
    columns = [column for column in results.columns if column != "perplexity"]
    return [
        Claim(better, base, small, "perplexity"),
        Claim(better, large, base, "perplexity"),
        *(Claim(tasks, base, small, column) for column in columns),
    ]


STUDY = Study(
    "bert-size",
    Words("the effect of depth, width and heads", "층 수, 너비, 헤드 수의 효과"),
    "Devlin et al. 2019, table 6",
    _cells,
    _claims,
    caption=Words(
        "Perplexity of masked words and score after fine-tuning, by size; bars are one standard "
        "deviation over seeds.",
        "크기에 따른 가린 단어의 퍼플렉서티와 미세 조정 점수. 막대는 시드에 따른 표준편차 하나.",
    ),
    theirs={row: dict(zip(COLUMNS, theirs, strict=True)) for row, (_, theirs) in SIZES.items()},
)
