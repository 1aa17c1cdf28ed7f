"""GPT-1 figure 2, right: tasks without fine-tuning, along pre-training."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import bits_per_byte, zero_shot
from malmoi.studies.table import Claim, StudyResults, Words, curve_figure, lower_is_better

MOST_UPDATES = 2**17  # of GPT-1's hundred epochs, looked at


def _name(step: int) -> str:
    return f"{step} updates"


def snapshot_zero_shot(judged: JudgedModel, step: int, task: StudyTask) -> dict[str, float]:
    return zero_shot(_snapshot(judged, step), task)


def snapshot_bits(judged: JudgedModel, step: int, text: Path) -> dict[str, float]:
    return bits_per_byte(_snapshot(judged, step), text)


def _snapshot(judged: JudgedModel, step: int) -> JudgedModel:
    return replace(judged, folder=judged.folder / "snapshots" / f"{step:06d}")


def cells(plan: StudyPlan) -> Iterator[Cell]:
    tasks = plan.data.of(
        "acceptability", "minimal pairs", "last word", dev_rows=plan.scale.dev_rows
    )
    for seed in plan.seeds:
        recipe = plan.scale.recipe("gpt", seed, **{"train.snapshots": True})
        most = recipe.train.steps or MOST_UPDATES
        steps = [2**power for power in range(24) if 2**power <= most]
        for step in steps:
            judges = [partial(snapshot_bits, step=step, text=plan.data.held_out)]
            judges += [partial(snapshot_zero_shot, step=step, task=_zero(task)) for task in tasks]
            for judge in judges:
                yield Cell(_name(step), seed, judge, recipe, plan.data.text)


def _zero(task: StudyTask) -> StudyTask:
    """CoLA by the likelihood of a sentence alone, as in GPT-1 §5."""
    return replace(task, task="cola-likelihood") if task.task == "cola" else task


def claims(results: StudyResults) -> list[Claim]:
    rows = results.rows
    return [
        Claim(
            Words(
                f"{column} improves with pre-training, without any fine-tuning",
                f"{column}: 미세 조정 없이도 사전 학습이 길수록 나아진다",
            ),
            rows[-1],
            rows[0],
            column,
        )
        for column in results.columns
    ]


def figure(results: StudyResults) -> str:
    """Shares alone: bits per byte have another axis."""
    shares = [
        {**record, "values": {c: v for c, v in record["values"].items() if not lower_is_better(c)}}
        for record in results.records
    ]
    kept = StudyResults(shares)
    return curve_figure(
        kept, "updates of pre-training", _updates, up="score without tuning, %", even=True
    )


def _updates(row: str) -> float:
    return float(row.split()[0])


STUDY = Study(
    "gpt1-zeroshot",
    Words(
        "tasks without fine-tuning improve along pre-training",
        "사전 학습이 길어지면 미세 조정 없이도 나아지는 과제",
    ),
    "Radford et al. 2018, figure 2 right (all tasks rise steadily)",
    cells,
    claims,
    caption=Words(
        "Score without fine-tuning after each number of updates; bars are one standard deviation "
        "over seeds.",
        "업데이트 횟수에 따른, 미세 조정 없는 점수. 막대는 시드에 따른 표준편차 하나.",
    ),
    figure=figure,
)
