"""BERT table 7: features from different frozen layers, compared with fine-tuning."""

from collections.abc import Iterator

from malmoi.studies.grid import Cell, Study, StudyPlan
from malmoi.studies.judges import tuned_cell
from malmoi.studies.table import Claim, StudyResults, Words

FINE_TUNED = "fine-tuned"
# row → (layers, the paper's F1 on CoNLL-2003 dev)
FEATURES = {
    "embeddings": ("embeddings", 91.0),
    "second-to-last layer": ("second-to-last", 95.6),
    "last layer": ("last", 94.9),
    "weighted sum of the last four": ("weighted-last4", 95.9),
    "concatenation of the last four": ("last4", 96.1),
    "weighted sum of all layers": ("weighted-all", 95.5),
}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        recipe = plan.scale.recipe("bert", seed)
        for task in plan.tasks("tokens"):
            yield tuned_cell(plan, FINE_TUNED, recipe, task)
            for row, (layers, _) in FEATURES.items():
                options = plan.scale.feature_tuning(seed, layers)
                yield tuned_cell(plan, row, recipe, task, **options)


def _claims(results: StudyResults) -> list[Claim]:
    column = results.columns[0] if results.columns else ""
    last4 = "concatenation of the last four"
    return [
        Claim(
            Words(
                "Contextual features beat the embeddings alone",
                "문맥 특징이 임베딩만 쓰는 것보다 낫다",
            ),
            last4,
            "embeddings",
            column,
        ),
        Claim(
            Words("Fine-tuning is at least as good as features", "미세 조정이 특징보다 낮지 않다"),
            FINE_TUNED,
            last4,
            column,
        ),
    ]


STUDY = Study(
    "bert-features",
    Words("which frozen layers make the best features", "작은 모델이 읽을 고정된 층 고르기"),
    "Devlin et al. 2019, table 7",
    _cells,
    _claims,
    caption=Words(
        "F1 of a BiLSTM on frozen layers, compared with fine-tuning; bars are one standard "
        "deviation over seeds.",
        "고정된 층 위의 BiLSTM의 F1과 미세 조정의 F1. 막대는 시드에 따른 표준편차 하나.",
    ),
    theirs={
        FINE_TUNED: {"CoNLL-2003": 96.4},
        **{row: {"CoNLL-2003": f1} for row, (_, f1) in FEATURES.items()},
    },
)
