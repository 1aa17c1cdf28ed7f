"""GPT-3's banded layers and the Sparse Transformer's patterns against dense, at equal compute."""

from collections.abc import Iterator
from functools import partial

import torch

from malmoi.model import Network
from malmoi.planning.flops import flops, keys_seen
from malmoi.studies.grid import Cell, JudgedModel, Study, StudyPlan
from malmoi.studies.judges import bits_per_byte
from malmoi.studies.table import Claim, StudyResults, Words
from malmoi.training.recipe import Recipe, read_recipe

LONGER = 4  # times the scale's context with fewer rows: sparsity saves nothing on short texts
STRIDE = 8  # a context has this many strides
SUMMARY = 4  # a stride has this many summary columns (Child et al. 2019: c of 8 to 32 for l of 128)


def patterns(context: int) -> dict[str, list[str]]:
    """The layers' attention, in a cycle."""
    stride = context // STRIDE
    return {
        "dense": ["causal"],
        "banded": ["causal", f"causal & local:{stride}"],
        "strided": [f"causal & strided:{stride}"],
        "fixed": [f"causal & fixed:{stride},{max(1, stride // SUMMARY)}"],
    }


def training_flops(recipe: Recipe) -> float:
    """FLOPs per token."""
    with torch.device("meta"):
        network = Network(recipe.model, {"lm": 0})
    return flops(network, recipe).exact


def attended(judged: JudgedModel) -> dict[str, float]:
    """Mean number of keys per token, and the number of tokens trained on."""
    c = read_recipe(judged.folder / "recipe.json").model
    seen = [keys_seen(text, c.heads, c.context) for text in c.attention]
    return {"keys seen": sum(seen) / len(seen), "million tokens": judged.facts()["tokens"] / 1e6}


def _cells(plan: StudyPlan) -> Iterator[Cell]:
    for seed in plan.seeds:
        base = plan.scale.recipe("gpt", seed)
        if not plan.scale.faithful:
            longer = LONGER * base.model.context
            fewer = max(1, base.train.batch // LONGER)
            base = base.override({"model.context": longer, "train.batch": fewer})
        dense = training_flops(base)
        for row, attention in patterns(base.model.context).items():
            sparse = base.override({"model.attention": attention})
            steps = round(base.train.steps * dense / training_flops(sparse))
            recipe = sparse.override({"train.steps": steps})
            for judge in (partial(bits_per_byte, text=plan.data.held_out), partial(attended)):
                yield Cell(row, seed, judge, recipe, plan.data.text)


def _claims(results: StudyResults) -> list[Claim]:
    as_good = Words(
        "At equal compute {} layers lose nothing against dense ones",
        "같은 연산량에서 {} 어텐션은 조밀한 어텐션에 뒤지지 않는다",
    )
    return [
        Claim(Words(as_good.en.format(row), as_good.ko.format(row)), row, "dense", "bits per byte")
        for row in results.rows
        if row != "dense"
    ]


STUDY = Study(
    "gpt3-sparse",
    Words(
        "dense, banded, strided and fixed attention at equal compute",
        "같은 연산량에서 조밀한, 띠, 보폭, 고정 어텐션",
    ),
    "Brown et al. 2020, §2.1; Child et al. 2019, §4",
    _cells,
    _claims,
    caption=Words(
        "Bits per byte of held-out text, keys that a token sees, and tokens learnt from at equal "
        "compute; bars are one standard deviation over seeds.",
        "따로 둔 텍스트의 바이트당 비트, 한 토큰이 보는 키의 수, 같은 연산량으로 학습한 토큰 수. "
        "막대는 시드에 따른 표준편차 하나.",
    ),
)
