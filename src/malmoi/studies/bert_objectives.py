"""BERT table 5: without NSP, left-to-right, and with a BiLSTM on top."""

from collections.abc import Iterator

from malmoi.studies.grid import Cell, Study, StudyPlan
from malmoi.studies.judges import tuned_cell
from malmoi.studies.table import Claim, StudyResults, Words

BERT = "BERT"
NO_NSP = "no NSP"
LTR = "left to right, no NSP"
BILSTM = "left to right, no NSP, + BiLSTM"
COLUMNS = ("MNLI", "QNLI", "MRPC", "SST-2", "SQuAD")
THEIRS = {
    BERT: (84.4, 88.4, 86.7, 92.7, 88.5),
    NO_NSP: (83.9, 84.9, 86.5, 92.6, 87.9),
    LTR: (82.1, 84.3, 77.5, 92.1, 77.8),
    BILSTM: (82.1, 84.1, 75.7, 91.6, 84.9),
}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        bert = plan.scale.recipe("bert", seed)
        ltr = plan.scale.recipe("ltr", seed)
        rows = {BERT: bert, NO_NSP: bert.override({"objective": "mlm"}), LTR: ltr}
        for row, recipe in rows.items():
            for task in plan.tasks("sentence", "pair", "tokens", "span"):
                yield tuned_cell(plan, row, recipe, task, lm=0.0)
        for task in plan.tasks("tokens"):
            yield tuned_cell(plan, BILSTM, ltr, task, lm=0.0, **plan.scale.bilstm)


def _claims(results: StudyResults) -> list[Claim]:
    pair = results.first_column("MNLI", "SICK", "RTE", "next sentence")
    tokens = results.first_column("CoNLL-2003", "capitals")
    span = results.first_column("SQuAD")
    two_way = Words(
        "Reading both ways beats left to right on token tasks",
        "토큰 과제에서는 양방향이 왼쪽에서 오른쪽으로만 읽는 모델보다 낫다",
    )
    return [
        Claim(two_way, BERT, LTR, tokens),
        *([Claim(two_way, BERT, LTR, span)] if span else []),
        Claim(
            Words(
                "Next-sentence prediction helps sentence-pair tasks",
                "다음 문장 예측은 문장 쌍 과제에 도움이 된다",
            ),
            BERT,
            NO_NSP,
            pair,
        ),
        Claim(
            Words(
                "A BiLSTM on top helps a left-to-right model on token tasks",
                "위에 얹은 BiLSTM은 왼쪽에서 오른쪽으로만 읽는 모델의 토큰 과제에 도움이 된다",
            ),
            BILSTM,
            LTR,
            tokens,
        ),
    ]


STUDY = Study(
    "bert-objectives",
    Words(
        "what next-sentence prediction and bidirectionality add",
        "다음 문장 예측과 양방향 읽기의 효과",
    ),
    "Devlin et al. 2019, table 5",
    _cells,
    _claims,
    caption=Words(
        "Score after fine-tuning by pre-training objective, one panel per task; bars are one "
        "standard deviation over seeds.",
        "사전 학습 목표에 따른 미세 조정 점수, 과제마다 한 칸. 막대는 시드에 따른 표준편차 하나.",
    ),
    theirs={row: dict(zip(COLUMNS, values, strict=True)) for row, values in THEIRS.items()},
)
