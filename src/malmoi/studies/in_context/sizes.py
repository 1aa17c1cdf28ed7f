"""The GPTs of the in-context study: three sizes that differ only in width, depth and rate."""

from dataclasses import dataclass, replace

from malmoi.model import preset
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig
from malmoi.training.recipes import fast_gpt

CONTEXT_CHARACTERS = 512  # sixteen examples and a question
TEXT_SHARE = 0.1  # share of natural text; the rest are documents of hidden rules


@dataclass(frozen=True)
class StudySize:
    """Width, depth and learning rate, which falls as models grow (GPT-3 table 2.1)."""

    depth: int
    width: int
    heads: int
    lr: float
    muon_lr: float


SIZES = {
    "small": StudySize(2, 64, 2, 5e-3, 0.03),
    "medium": StudySize(4, 192, 6, 3e-3, 0.025),
    "large": StudySize(8, 512, 8, 2e-3, 0.02),
}  # in order


def size_recipe(name: str, texts: int, seed: int) -> Recipe:
    """The recipe of one size: fast GPT, characters, and a share of natural text."""
    size = SIZES[name]
    model = preset(
        "gpt2-small",
        vocab=256,
        context=CONTEXT_CHARACTERS,
        width=size.width,
        depth=size.depth,
        heads=size.heads,
    )
    base = fast_gpt(Recipe(name=f"in-context-{name}", model=model))
    train = replace(
        base.train, lr=size.lr, muon_lr=size.muon_lr, seed=seed, valid_every=1000, save_every=5000
    )
    return replace(
        base,
        tokenizer=TokenizerConfig(kind="char", vocab=256),
        data=DataConfig(weights=(*(TEXT_SHARE / texts,) * texts, 1 - TEXT_SHARE)),
        train=train,
    )
