"""GPT-1 figure 2, right: zero-shot scores during pre-training."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from malmoi.messages import plural
from malmoi.studies.data import StudyTask
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import bits_per_byte, zero_shot
from malmoi.studies.table import Claim, StudyResults, Words, curve_figure, lower_is_better

MOST_UPDATES = 2**17  # of GPT-1's 100 epochs, that are evaluated


def _name(step: int) -> str:
    return plural(step, "update")


def snapshot_scores(
    judged: JudgedModel, step: int, tasks: Sequence[StudyTask], text: Path
) -> dict[str, float]:
    """Bits per byte and task scores of the model after a step (0: the final model)."""
    folder = judged.folder / "snapshots" / f"{step:06d}" if step else judged.folder
    then = replace(judged, folder=folder)
    scores = bits_per_byte(then, text)
    for task in tasks:
        scores |= zero_shot(then, task)
    return scores


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    rows = plan.scale.dev_rows
    tasks = [
        _zero(task)
        for task in plan.data.of("acceptability", "minimal pairs", "last word", dev_rows=rows)
    ]
    for seed in plan.seeds:
        recipe = plan.scale.recipe("gpt", seed, **{"train.snapshots": True})
        updates = recipe.train.steps or MOST_UPDATES
        steps = {_name(4**power): 4**power for power in range(12) if 4**power < updates}
        end = {_name(recipe.train.steps) if recipe.train.steps else "the end": 0}
        for row, step in (steps | end).items():
            judge = partial(snapshot_scores, step=step, tasks=tasks, text=plan.data.held_out)
            yield Cell(row, seed, judge, recipe, plan.data.text)


def _zero(task: StudyTask) -> StudyTask:
    """CoLA by the likelihood of a sentence alone, as in GPT-1 §5."""
    return replace(task, task="cola-likelihood") if task.task == "cola" else task


def _claims(results: StudyResults) -> list[Claim]:
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


def _figure(results: StudyResults) -> str:
    """Plots scores in percent only: bits per byte would need another axis."""
    shares = [
        {**record, "values": {c: v for c, v in record["values"].items() if not lower_is_better(c)}}
        for record in results.records
    ]
    kept = StudyResults(shares)
    return curve_figure(
        kept, "updates of pre-training", _updates, up="score without tuning, %", even=True
    )


def _updates(row: str) -> float | None:
    return None if row == "the end" else float(row.split()[0].replace(",", ""))


STUDY = Study(
    "gpt1-zeroshot",
    Words(
        "zero-shot scores improve during pre-training",
        "사전 학습이 길어지면 미세 조정 없이도 나아지는 과제",
    ),
    "Radford et al. 2018, figure 2 right (all tasks rise steadily)",
    _cells,
    _claims,
    caption=Words(
        "Score without fine-tuning after each number of updates; bars are one standard deviation "
        "over seeds.",
        "업데이트 횟수에 따른, 미세 조정 없는 점수. 막대는 시드에 따른 표준편차 하나.",
    ),
    figure=_figure,
)
