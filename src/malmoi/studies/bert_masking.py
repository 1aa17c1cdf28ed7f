"""BERT table 8: masking strategies."""

from collections.abc import Iterator

from malmoi.studies.grid import Cell, Study, StudyPlan
from malmoi.studies.judges import tuned_cell
from malmoi.studies.table import Claim, StudyResults, Words

# share of [MASK], of the token itself, of a random token → MNLI, NER fine-tuned, NER features
THEIRS = {
    (80, 10, 10): (84.2, 95.4, 94.9),
    (100, 0, 0): (84.3, 94.9, 94.0),
    (80, 0, 20): (84.1, 95.2, 94.6),
    (80, 20, 0): (84.4, 95.2, 94.7),
    (0, 20, 80): (83.7, 94.8, 94.6),
    (0, 0, 100): (83.6, 94.9, 94.6),
}


def _name(shares: tuple[int, int, int]) -> str:
    mask, same, other = shares
    return f"{mask}% [MASK], {same}% same, {other}% random"


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    scale = plan.scale
    for seed in plan.seeds:
        for mask, same, other in THEIRS:
            row = _name((mask, same, other))
            recipe = scale.recipe(
                "bert", seed, **{"data.mask_token": mask / 100, "data.mask_random": other / 100}
            )
            for task in plan.tasks("pair", "tokens"):
                yield tuned_cell(plan, row, recipe, task)
            for task in plan.tasks("tokens"):
                features = scale.feature_tuning(seed)
                yield tuned_cell(plan, row, recipe, task, f"{task.name}, features", **features)


def _claims(results: StudyResults) -> list[Claim]:
    tokens = results.first_column("CoNLL-2003", "capitals")
    best = _name((80, 10, 10))
    return [
        Claim(
            Words(
                "On token tasks the mixed strategy beats masks alone",
                "토큰 과제에서는 섞어 쓰는 방식이 [MASK]만 쓰는 방식보다 낫다",
            ),
            best,
            _name((100, 0, 0)),
            f"{tokens}, features",
        ),
        Claim(
            Words("Random tokens alone do worse", "무작위 토큰만 쓰면 나빠진다"),
            best,
            _name((0, 0, 100)),
            tokens,
        ),
    ]


STUDY = Study(
    "bert-masking",
    Words(
        "masking strategies: masked, random or unchanged tokens",
        "예측할 토큰을 가리거나 바꾸거나 그대로 두는 비율",
    ),
    "Devlin et al. 2019, table 8",
    _cells,
    _claims,
    caption=Words(
        "Score after fine-tuning, and on frozen features, by masking strategy; bars are one "
        "standard deviation over seeds.",
        "고른 토큰을 어떻게 바꾸었는지에 따른 미세 조정 점수와 고정 특징 점수. 막대는 시드에 따른 "
        "표준편차 하나.",
    ),
    theirs={
        _name(shares): dict(zip(("MNLI", "NER fine-tuned", "NER features"), values, strict=True))
        for shares, values in THEIRS.items()
    },
)
