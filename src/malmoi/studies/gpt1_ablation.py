"""GPT-1 table 5: without the auxiliary language model, without pre-training, with an LSTM."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from malmoi.studies.grid import Cell, Study, StudyPlan
from malmoi.studies.judges import tuned_cell
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.training.recipe import Recipe

FULL = "Transformer, auxiliary LM"
NO_LM = "no auxiliary LM"
SCRATCH = "no pre-training"
LSTM = "LSTM, auxiliary LM"
THEIRS = {FULL: 74.7, SCRATCH: 59.9, NO_LM: 75.0, LSTM: 69.1}
SHARES = (1 / 16, 1)  # of the training rows: the auxiliary LM helps only large sets


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        gpt = plan.scale.recipe("gpt", seed)
        lstm = plan.scale.recipe("lstm", seed)
        rows: dict[str, tuple[Recipe, dict[str, Any]]] = {
            FULL: (gpt, {}),
            NO_LM: (gpt, {"lm": 0.0}),
            SCRATCH: (gpt, {"from_scratch": True}),
            LSTM: (lstm, {}),
        }
        for task in plan.tasks("sentence", "pair"):
            sizes = [round(share * task.train_rows) for share in SHARES] if task.train_rows else [0]
            for size in sizes:
                some = replace(task, train_rows=size)
                column = f"{task.name}, {size:,} rows" if size else task.name
                for row, (recipe, options) in rows.items():
                    yield tuned_cell(plan, row, recipe, some, column, **options)


def _claims(results: StudyResults) -> list[Claim]:
    found = []
    for column in results.columns:
        claims = (
            (FULL, SCRATCH, "pre-training beats none", "사전 학습이 없는 것보다 낫다"),
            (FULL, LSTM, "the Transformer beats the LSTM", "트랜스포머가 LSTM보다 낫다"),
        )
        found += [
            Claim(Words(f"{column}: {en}", f"{column}: {ko}"), better, worse, column)
            for better, worse, en, ko in claims
        ]
    if results.columns:
        large = Words(
            "The auxiliary LM helps the larger set",
            "보조 언어 모델 손실은 큰 데이터에서 도움이 된다",
        )
        small = Words(
            "The auxiliary LM does not help the smaller set",
            "보조 언어 모델 손실은 작은 데이터에서는 도움이 되지 않는다",
        )
        found.append(Claim(large, FULL, NO_LM, results.columns[len(SHARES) - 1]))
        found.append(Claim(small, NO_LM, FULL, results.columns[0]))
    return found


STUDY = Study(
    "gpt1-ablation",
    Words(
        "what pre-training, the auxiliary LM and the Transformer add",
        "사전 학습, 보조 언어 모델, 트랜스포머 각각의 효과",
    ),
    "Radford et al. 2018, table 5",
    _cells,
    _claims,
    caption=Words(
        "Score after fine-tuning by model and by the number of training rows; bars are one "
        "standard deviation over seeds.",
        "모델과 학습 행 수에 따른 미세 조정 점수. 막대는 시드에 따른 표준편차 하나.",
    ),
    theirs={row: {"average": value} for row, value in THEIRS.items()},
)
