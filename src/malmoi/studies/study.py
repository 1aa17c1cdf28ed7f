"""A study: a paper's table or figure as cells, and what papers.toml says about it.

A new study is a function from a plan and a seed to cells, a name in `MODULES`, and an entry in
papers.toml: the paper, its numbers, its findings and the words of the page.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from malmoi.errors import require_known
from malmoi.model import preset
from malmoi.studies.data import StudyData, StudyTask
from malmoi.system.untrusted import read_object
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


# study → the module with its cells, and its own figure and notes if it has any
MODULES = {
    **dict.fromkeys(("bert-masking", "bert-objectives", "bert-size", "bert-features"), "tables"),
    **dict.fromkeys(("gpt1-transfer", "gpt1-zeroshot", "gpt1-ablation", "gpt2-zeroshot"), "tables"),
    **{"in-context": "in_context", "gpt3-scaling": "tables", "gpt3-contamination": "tables"},
    **{"gpt3-sparse": "tables", "bert-vs-gpt": "tables", "korean": "korean"},
    "compression": "compression",
}


class Words(NamedTuple):
    """A text of a page in both languages."""

    en: str
    ko: str

    def format(self, **values: object) -> "Words":
        return Words(*(text.format(**values) for text in self))


@dataclass(frozen=True)
class JudgedModel:
    """Input of a measure: the folder of the pre-trained model, and a scratch folder."""

    folder: Path
    scratch: Path
    seed: int
    device: str | None = None

    def facts(self) -> dict[str, Any]:
        """Parameters, tokens, steps, seconds and valid_loss of the pre-training."""
        return dict(read_object(self.folder / "facts.json"))


Measure = Callable[..., dict[str, float]]


@dataclass(frozen=True)
class Cell:
    """One row of the table with one seed: a recipe, its training text, and a measure.

    The measure is `partial(function, **options)` of a function at the top of a module, called with
    a `JudgedModel`; it returns a number for each of its columns. Without a recipe nothing is
    pre-trained, and the model's `folder` is its scratch folder.
    """

    row: str
    seed: int
    measure: "partial[dict[str, float]]"
    recipe: Recipe | None = None
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyPlan:
    """Everything that the cells of a study depend on."""

    scale: Scale
    data: StudyData

    def tasks(self, *roles: str) -> list[StudyTask]:
        """The first available task of each role, cut to the rows that the scale uses."""
        return self.data.of(*roles, train_rows=self.scale.train_rows, dev_rows=self.scale.dev_rows)

    def cell(self, row: str, recipe: Recipe, measure: Measure, **options: Any) -> Cell:
        """A cell whose model is trained on the study's text."""
        return Cell(row, recipe.train.seed, partial(measure, **options), recipe, self.data.text)

    def tuned(
        self, row: str, recipe: Recipe, tasks: Iterable[StudyTask], column: str = "", **options: Any
    ) -> Iterator[Cell]:
        """Cells whose model is fine-tuned, by the scale's settings and these options."""
        from malmoi.studies.measures import fine_tuned

        settings = self.scale.tuning(recipe.train.seed) | options
        for task in tasks:
            named = column.format(task.name)
            yield self.cell(row, recipe, fine_tuned, task=task, options=settings, column=named)


@dataclass(frozen=True)
class Study:
    """A paper's table or figure: its words and numbers, as papers.toml has them."""

    name: str
    paper: str
    about: Words
    caption: Words
    findings: Sequence[Mapping[str, Any]]
    notes: Sequence[Words] = ()
    theirs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # row → its numbers

    def cells(self, plan: StudyPlan, seeds: Iterable[int]) -> list[Cell]:
        make = self.part("cells")
        return [cell for seed in seeds for cell in make(plan, seed)]

    def part(self, what: str) -> Any:
        """The study's own function that makes its "cells", draws its "figure" or fills its "notes".

        bert-size has `bert_size_cells`; None if it has no such function.
        """
        module = import_module(f"malmoi.studies.{MODULES[self.name]}")
        return getattr(module, f"{self.name.replace('-', '_')}_{what}", None)


@cache
def _records() -> dict[str, Any]:
    return tomllib.loads((files("malmoi.studies") / "papers.toml").read_text("utf-8"))


def named_study(name: str) -> Study:
    require_known(name, MODULES, "There is no study {name!r}.{hint} `malmoi study` lists them.")
    record = _records()[name]
    words = {key: Words(*record[key]) for key in ("about", "caption")}
    notes = [Words(*note) for note in record.get("notes", ())]
    return Study(name, **(record | words | {"notes": notes}))
