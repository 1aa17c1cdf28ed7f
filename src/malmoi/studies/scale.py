"""Scales of a study: sizes of models, text, steps and task rows."""

import math
from dataclasses import dataclass, replace
from typing import Any

from malmoi.errors import require_known
from malmoi.model import preset
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from malmoi.training.recipes import MODERN_GPT, named_recipe

RARELY = 10**6  # steps between saves and validations of runs of seconds
# BERT's segments and pooler with the demo's blocks, which learn in few updates
MODERN_TRUNK: dict[str, Any] = MODERN_GPT | dict(
    norm="pre", norm_kind="layer", embed_norm=False, final_norm=True, init="normal", eps=1e-6
)

# what a study trains: BERT, BERT read from left to right, GPT, both in one, ELECTRA, an LSTM
OBJECTIVES = {
    "bert": "mlm+nsp",
    "ltr": "lm",
    "gpt": "lm",
    "both": "both",
    "electra": "electra",
    "lstm": "lm",
}
PAPER_RECIPES = {
    "bert": "bert-base",
    "ltr": "bert-base",
    "gpt": "gpt1",
    "both": "gpt1",
    "electra": "electra-base",
    "lstm": "lstm-gpt1",
}


@dataclass(frozen=True)
class Scale:
    """Sizes of models and budgets; `paper` uses the published recipes."""

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
    minutes: float = 0.0  # of pre-training, where models are compared at equal time
    train_rows: int = 0  # of a task; 0: all
    dev_rows: int = 0
    tune_steps: int = 0  # of fine-tuning; 0: three epochs
    tune_lr: float = 0.0  # 0: the paper's

    @property
    def faithful(self) -> bool:
        return self.name == "paper"

    def recipe(self, kind: str, seed: int, **settings: Any) -> Recipe:
        """A model of this scale, with settings by their paths: see `OBJECTIVES`.

        At `paper` it is the paper's own (BERT-base, GPT-1…); at other scales all have the same
        layers, but for the LSTM, which has as many weights.
        """
        base = self._faithful(kind) if self.faithful else self._small(kind)
        return base.override({"train.seed": seed, **settings})

    def _faithful(self, kind: str) -> Recipe:
        changes: dict[str, dict[str, Any]] = {
            "ltr": {"model.attention": ("causal",), "model.pool": "last", "objective": "lm"},
            "both": {"model.both_ways": True, "objective": "both"},
        }
        return named_recipe(PAPER_RECIPES[kind]).override(changes.get(kind, {}))

    def _small(self, kind: str) -> Recipe:
        reads = kind in ("bert", "electra", "ltr")
        shape = dict(vocab=self.vocab, context=self.context, width=self.width)
        if kind == "lstm":
            # two layers of 8·units² weights, as many as `depth` layers of 12·width²
            units = 2 * round(self.width * math.sqrt(0.75 * self.depth) / 2)
            model = preset(
                "lstm", **(shape | dict(width=units, embed_width=self.width)), dropout=0.0
            )
        else:
            shape |= dict(depth=self.depth, heads=self.heads)
            model = preset("bert-tiny" if reads else "gpt2-small", **shape, **MODERN_TRUNK)
        if kind == "ltr":  # the first token attends only to itself
            model = replace(model, attention=("causal",), pool="last", pooler="none")
        train = self.training()
        if kind == "lstm":
            train = replace(train, optimizer="adamw")
        if kind == "gpt":  # one study needs snapshots, and others share its model
            train = replace(train, snapshots=True)
        return Recipe(
            name=f"study-{kind}",
            model=replace(model, both_ways=kind == "both"),
            objective=OBJECTIVES[kind],
            tokenizer=TokenizerConfig(kind="wordpiece" if reads else "byte-bpe", vocab=self.vocab),
            data=DataConfig(valid=0.02, packed=False),  # packing would have to be compiled
            train=train,
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
        """Options of `run_finetuning`: the paper's, or a number of updates at a higher rate."""
        if self.faithful:
            return {"seed": seed, "max_minutes": 0.0}
        return {
            "seed": seed,
            "steps": self.tune_steps,
            "lr": self.tune_lr,
            "batch": 16 if self.name == "cpu" else 32,
            "length": self.context,
        }

    @property
    def bilstm(self) -> dict[str, Any]:
        """Options for a new BiLSTM on the last layer, all of it fine-tuned (BERT table 5)."""
        width = {} if self.faithful else {"recurrent": max(16, self.width)}
        tuned = {} if not self.faithful else {"lr": 5e-5, "batch": 32, "epochs": 3.0}
        return {"features": "last", "tune_features": True, **width, **tuned}

    def feature_tuning(self, seed: int, features: str = "last4") -> dict[str, Any]:
        """Options for a small model on frozen features (BERT §5.3)."""
        if self.faithful:
            return {**self.tuning(seed), "features": features}
        width = max(16, self.width)
        # a new BiLSTM learns more slowly than a pre-trained model, and its steps are cheap
        options = {"features": features, "recurrent": width, "lr": max(2e-3, 3 * self.tune_lr)}
        options |= {"steps": 3 * self.tune_steps}
        return self.tuning(seed) | options


SCALES = {
    scale.name: scale
    for scale in (
        # a smoke test: its numbers are meaningless
        Scale(
            "tiny", 1, width=48, depth=2, heads=3, context=128, vocab=2000, characters=300_000,
            batch=8, steps=4, minutes=0.02, train_rows=24, dev_rows=24, tune_steps=3, tune_lr=1e-3,
        ),
        Scale(
            "cpu", 2, width=96, depth=2, heads=3, context=64, vocab=2000, characters=3_000_000,
            batch=16, steps=100, minutes=0.15, train_rows=400, dev_rows=150, tune_steps=100,
            tune_lr=1e-3,
        ),
        Scale(
            "gpu-minutes", 3, width=288, depth=4, heads=6, context=128, vocab=8000,
            characters=24_000_000, batch=64, steps=1000, minutes=1.0, train_rows=8000,
            dev_rows=1000, tune_steps=300, tune_lr=5e-4,
        ),
        Scale("paper", 5),
    )
}  # fmt: skip


def named_scale(name: str) -> Scale:
    require_known(
        name, SCALES, "There is no scale {name!r}.{hint} Choose cpu, gpu-minutes or paper."
    )
    return SCALES[name]
