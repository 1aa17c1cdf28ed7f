"""GPT-1 figure 2, left: task score by the number of transferred layers."""

from collections.abc import Iterator
from functools import partial

from malmoi.messages import plural
from malmoi.studies.grid import Cell, Study, StudyPlan
from malmoi.studies.judges import tuned_cell
from malmoi.studies.table import Claim, StudyResults, Words, curve_figure

MIN_DEPTH = 4  # fewer layers are too few for a curve
SCRATCH = "nothing transferred"


def _name(layers: int) -> str:
    return f"embeddings + {plural(layers, 'layer')}"


def _layers(row: str) -> float | None:
    return None if row == SCRATCH else float(row.split()[2])


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        base = plan.scale.recipe("gpt", seed)
        depth = max(MIN_DEPTH, base.model.depth)
        recipe = base.override({"model.depth": depth})
        for task in plan.tasks("sentence", "pair"):
            yield tuned_cell(plan, SCRATCH, recipe, task, from_scratch=True)
            for layers in range(depth + 1):
                yield tuned_cell(plan, _name(layers), recipe, task, layers_transferred=layers)


def _claims(results: StudyResults) -> list[Claim]:
    kept = [row for row in results.rows if row != SCRATCH]
    found = []
    for column in results.columns:
        about = Words(
            f"{column}: all layers transferred beat the embeddings alone",
            f"{column}: 모든 층을 옮기면 임베딩만 옮길 때보다 낫다",
        )
        scratch = Words(
            f"{column}: pre-training beats none", f"{column}: 사전 학습이 없는 것보다 낫다"
        )
        found.append(Claim(about, kept[-1], kept[0], column))
        found.append(Claim(scratch, kept[-1], SCRATCH, column))
    return found


STUDY = Study(
    "gpt1-transfer",
    Words("more transferred layers give better task scores", "옮긴 사전 학습 층 수와 과제 점수"),
    "Radford et al. 2018, figure 2 left (each layer adds, up to 9 points on MNLI)",
    _cells,
    _claims,
    caption=Words(
        "Score after fine-tuning by the number of pre-trained layers that are kept; the others "
        "start at random. Bars are one standard deviation over seeds.",
        "남긴 사전 학습 층 수에 따른 미세 조정 점수. 나머지 층은 무작위로 시작한다. 막대는 "
        "시드에 따른 표준편차 하나.",
    ),
    figure=partial(curve_figure, across="layers transferred", x=_layers, up="score, %"),
)
