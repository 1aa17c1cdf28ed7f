"""How large a study is: models, text, steps and rows of tasks, for minutes on a CPU or a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.model import preset
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from malmoi.training.recipes import MODERN_GPT, named_recipe

RARELY = 10**6  # steps between saves and validations of runs of seconds
# BERT's segments and pooler with the layers of the demo's models, which learn in few updates
MODERN_TRUNK: dict[str, Any] = MODERN_GPT | dict(
    norm="pre", norm_kind="layer", embed_norm=False, final_norm=True, init="normal", eps=1e-6
)


@dataclass(frozen=True)
class Scale:
    """The size of models and budgets; `paper` takes the recipes as the papers have them."""

    name: str
    seeds: int
    width: int = 0
    depth: int = 0
    heads: int = 0
    context: int = 0
    vocab: int = 0
    characters: int = 0  # of text; 0: all
    batch: int = 0
    steps: int = 0  # of pre-training
    train_rows: int = 0  # of a task; 0: all
    dev_rows: int = 0
    tune_steps: int = 0  # of fine-tuning; 0: three epochs
    tune_lr: float = 0.0  # 0: the paper's

    @property
    def faithful(self) -> bool:
        return self.name == "paper"

    def recipe(self, kind: str, seed: int, **settings: Any) -> Recipe:
        """A BERT ("bert") or a GPT ("gpt") of this scale with settings by their paths.

        At `paper` it is BERT-base or GPT-1; at other scales both have the same layers.
        """
        base = self._paper(kind) if self.faithful else self._small(kind)
        return base.override({"train.seed": seed, **settings})

    def _paper(self, kind: str) -> Recipe:
        return named_recipe({"bert": "bert-base", "gpt": "gpt1"}[kind])

    def _small(self, kind: str) -> Recipe:
        shape = dict(
            vocab=self.vocab,
            context=self.context,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
        )
        bert = kind == "bert"
        return Recipe(
            name=f"study-{kind}",
            model=preset("bert-tiny" if bert else "gpt2-small", **shape, **MODERN_TRUNK),
            objective="mlm+nsp" if bert else "lm",
            tokenizer=TokenizerConfig(kind="wordpiece" if bert else "byte-bpe", vocab=self.vocab),
            data=DataConfig(valid=0.02),
            train=self.training(),
        )

    def training(self) -> TrainConfig:
        """Muon and a linear decay over a number of steps; too short to compile or save midway."""
        return TrainConfig(
            steps=self.steps,
            batch=self.batch,
            optimizer="muon",
            lr=3e-3,
            betas=(0.9, 0.95),
            decay=0.0,
            clip=0.0,
            schedule="linear",
            warmup=0.0,
            warmup_steps=20,
            valid_every=RARELY,
            save_every=RARELY,
            keep=1,
            compile=False,
        )

    def tuning(self, seed: int) -> dict[str, Any]:
        """Options of `run_finetuning`: the paper's own, or a number of updates at a higher rate."""
        if self.faithful:
            return {"seed": seed}
        return {
            "seed": seed,
            "steps": self.tune_steps,
            "lr": self.tune_lr,
            "batch": 16 if self.name == "cpu" else 32,
            "length": self.context,
        }

    def feature_tuning(self, seed: int, features: str = "last4") -> dict[str, Any]:
        """Options for a small model on frozen features (BERT §5.3)."""
        if self.faithful:
            return {"seed": seed, "features": features}
        width = max(16, self.width)
        options = {"features": features, "recurrent": width, "lr": 2e-3}
        return self.tuning(seed) | options


SCALES = {
    scale.name: scale
    for scale in (
        # checks that a study runs; its numbers mean nothing
        Scale(
            "tiny", 1, width=32, depth=2, heads=2, context=32, vocab=400, characters=300_000,
            batch=8, steps=4, train_rows=24, dev_rows=24, tune_steps=3, tune_lr=1e-3,
        ),
        Scale(
            "cpu", 2, width=96, depth=2, heads=2, context=64, vocab=2000, characters=3_000_000,
            batch=32, steps=150, train_rows=400, dev_rows=300, tune_steps=60, tune_lr=1e-3,
        ),
        Scale(
            "gpu-minutes", 3, width=384, depth=6, heads=6, context=128, vocab=8000, batch=128,
            steps=1500, train_rows=8000, dev_rows=1000, tune_steps=400, tune_lr=3e-4,
        ),
        Scale("paper", 5),
    )
}  # fmt: skip


def named_scale(name: str, changes: Mapping[str, Any] | None = None) -> Scale:
    if name not in SCALES:
        raise UsageError(
            f"There is no scale {name!r}.{nearest(name, SCALES)} Choose cpu, gpu-minutes or paper."
        )
    return replace(SCALES[name], **(changes or {}))
