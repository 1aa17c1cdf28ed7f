"""GPT-2 table 3: zero-shot language modelling by model size."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from malmoi.evaluation.evaluate import evaluate_model
from malmoi.evaluation.tasks import metric_names, named_task
from malmoi.inference import load
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import bits_per_byte, zero_shot
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.training.recipe import Recipe

# width as a share of the scale's → the paper's sizes: millions of weights, LAMBADA's accuracy, and
# perplexities of LAMBADA, WikiText-2 and PTB
SIZES = {
    "S": (1 / 3, (117, 45.99, 35.13, 29.41, 65.85)),
    "M": (2 / 3, (345, 55.48, 15.60, 22.76, 47.33)),
    "L": (1, (762, 60.12, 10.87, 19.93, 40.31)),
    "XL": (5 / 3, (1542, 63.24, 8.63, 18.34, 35.76)),
}
COLUMNS = (
    "millions of weights",
    "LAMBADA",
    "LAMBADA perplexity",
    "WikiText perplexity",
    "PTB perplexity",
)
# (column, task, pattern of its file)
TEXTS = (
    ("WikiText perplexity", "wikitext", "*wikitext*test*"),
    ("PTB perplexity", "ptb", "*ptb*test*"),
)


def sized_gpt(plan: StudyPlan, size: str, seed: int) -> Recipe:
    """Recipe of one of the four sizes: narrower or wider, with heads of the same width."""
    base = plan.scale.recipe("gpt", seed)
    share, _ = SIZES[size]
    heads = max(1, round(share * base.model.heads))
    width = heads * (base.model.width // base.model.heads)
    return base.override({"model.width": width, "model.heads": heads, "model.hidden": 0})


def millions(judged: JudgedModel) -> dict[str, float]:
    return {COLUMNS[0]: judged.facts()["parameters"] / 1e6}


def text_perplexity(judged: JudgedModel, task: str, path: Path, column: str) -> dict[str, float]:
    """Perplexity per word, with the data set's markup removed as in GPT-2 §3.1."""
    model = load(judged.folder, device=judged.device)
    return {column: evaluate_model(model, task, path)[metric_names(named_task(task))[0]]}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    found = [(column, task, plan.data.file(pattern)) for column, task, pattern in TEXTS]
    judges = [partial(millions), partial(bits_per_byte, text=plan.data.held_out)]
    judges += [partial(zero_shot, task=task) for task in plan.tasks("last word")]
    judges += [
        partial(text_perplexity, task=task, path=path, column=column)
        for column, task, path in found
        if path is not None
    ]
    for seed in plan.seeds:
        for size in SIZES:
            recipe = sized_gpt(plan, size, seed)
            for judge in judges:
                yield Cell(size, seed, judge, recipe, plan.data.text)


def _claims(results: StudyResults) -> list[Claim]:
    better = Words("The larger model is better, {}", "큰 모델이 더 낫다, {}")
    return [
        Claim(Words(better.en.format(c), better.ko.format(c)), "XL", "S", c)
        for c in results.columns
        if c != COLUMNS[0]
    ]


STUDY = Study(
    "gpt2-zeroshot",
    Words(
        "zero-shot language modelling, by model size",
        "크기에 따른, 학습하지 않은 텍스트의 언어 모델링",
    ),
    "Radford et al. 2019, table 3",
    _cells,
    _claims,
    caption=Words(
        "Bits per byte of held-out text and perplexity per word of the data sets given, by size; "
        "bars are one standard deviation over seeds.",
        "크기에 따른, 따로 둔 텍스트의 바이트당 비트와 데이터 집합의 단어당 퍼플렉서티. 막대는 "
        "시드에 따른 표준편차 하나.",
    ),
    theirs={row: dict(zip(COLUMNS, theirs, strict=True)) for row, (_, theirs) in SIZES.items()},
)
