"""Settings of the public functions and commands that no other record has. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from malmoi.api.run_options import (
    BuildOptions,
    DeviceOptions,
    LoadOptions,
    RecipeSettings,
    RunOptions,
)
from malmoi.compression.options import (
    DistilOptions,
    JudgedOptions,
    PruneOptions,
    QuantizeOptions,
    ShareOptions,
)
from malmoi.config import ModelConfig
from malmoi.corpus.config import CorpusConfig
from malmoi.finetuning.config import FinetuneConfig
from malmoi.planning.gpus import PlanSettings
from malmoi.server.config import ServeConfig
from malmoi.settings import described, option, setting, settings_of
from malmoi.training.recipe import DataConfig, TokenizerConfig, TrainConfig

if TYPE_CHECKING:
    from malmoi.evaluation.task import Task
    from malmoi.text.rows import RowSource

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """What a pre-training run starts from."""

    tokenizer: str | Path | None = option(
        None, "Existing tokenizer.", shown="train a new one", metavar="DIR", typed=Path
    )
    start: str | Path | None = option(
        None, "Model to continue from.", shown="new weights", metavar="DIR", typed=str
    )


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """The columns of a table; columns that are not given are detected."""

    text: str = option("", "Column of the text.", metavar="COLUMN")
    pair: str = option("", "Column of a second text or a context.", metavar="COLUMN")
    label: str | Sequence[str] = option(
        "",
        "Column of the label; for multilabel also A,B,… holding 0 and 1.",
        metavar="COLUMN",
        typed=str,
    )
    choices: Sequence[str] = option(
        (), "Columns of the choices, comma-separated.", metavar="A,B,…", typed=str
    )
    separator: str = option(
        "", "Separator between a row's labels (multilabel).", shown=",", metavar="TEXT"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(DeviceOptions):
    skip_bad: bool = option(False, "Skip bad rows instead of stopping at the first.")
    train: "RowSource | None" = option(None, "Rows to draw the examples from.", typed=list[Path])
    seed: int = option(0, "Random seed of the examples.")
    limit: int | None = option(None, "Evaluate at most this many items.")
    score: str = option(
        "total",
        "Compare choices by total, token, byte or unconditional likelihood; BERT: cloze_total…",
    )
    template: str | None = option(None, "Another prompt template, by name or from a .toml file.")
    beams: int = option(4, "Beams of a translation model; 1 is greedy.")
    reading: Literal["causal", "masked"] | None = option(
        None, "Reading mode of a model trained both ways: causal or masked.", typed=str
    )
    out: str | Path | None = option(
        None,
        "Write curve.json and curve.svg here.",
        flags=("--out", "-o"),
        metavar="DIR",
        typed=Path,
    )
    harness: Literal["lm-eval"] | None = option(
        None, "Evaluate with lm-eval; TASK may be one of its YAML files.", typed=str
    )


@dataclass(frozen=True, kw_only=True)
class DetailedSettings:
    """Options of `evaluate` that add tables to its metrics."""

    per_label: bool = setting(False, "Also return metrics per label.")
    contamination: Sequence[str] = option(
        (),
        "Training text; items that overlap with it are scored separately (GPT-3 §4).",
        metavar="CORPUS",
        typed=list[str],
    )


@dataclass(frozen=True, kw_only=True)
class DistilInputs:
    data: Files = field(metadata=described("Text, or rows of the task, to train the student on."))
    dev: Files | None = setting(None, "Evaluation rows.", shown="a tenth of --data")
    task: "str | Task | None" = setting(None, "Task of the rows in data.")


@dataclass(frozen=True, kw_only=True)
class CorpusInputs(BuildOptions):
    """What a corpus is built with, and where."""

    quality_reference: Sequence[str] = option(
        (),
        "Reference text: documents unlike it are mostly dropped (GPT-3's classifier).",
        typed=list[str],
    )
    decontaminate: Sequence[str] = option(
        (), "Test sets: text that overlaps with them is removed.", metavar="FILE", typed=list[str]
    )
    workers: int = option(
        1, "Worker processes.", ge=1, shown="one per core on the command line, else 1"
    )
    executor: Literal["processes", "ray"] = option(
        "processes",
        "Where shards are worked on: processes, or ray (a Ray cluster).",
        metavar="NAME",
    )
    part: str = option(
        "", "Do only this part of the shards, as one of several cluster jobs.", metavar="I/N"
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"] = option(
        "wordpiece", "wordpiece (BERT), bpe (GPT-1), byte-bpe (GPT-2) or char.", metavar="KIND"
    )
    vocab: int = option(30_000, "Vocabulary size.")
    lowercase: bool | None = option(
        None,
        "Lowercase the text first.",
        flags=("--lowercase/--no-lowercase",),
        shown="depends on the kind",
    )
    min_frequency: int = option(2, "Merge only pairs that occur at least this often.")
    special: Literal["none", "mask", "pad"] = setting(
        "none", "Extra token of a byte-bpe tokenizer: mask or padding."
    )
    morphemes: Literal["none", "kiwi"] = option(
        "none", "kiwi: split Korean words into morphemes first (pip install kiwipiepy)."
    )


@dataclass(frozen=True, kw_only=True)
class StudySettings(DeviceOptions):
    scale: str = option(
        "cpu", "Scale of the study: cpu, gpu-minutes, gpu-hour or paper.", metavar="NAME"
    )
    seeds: int = option(
        0, "Runs of each row, with different seeds.", metavar="N", shown="the scale's"
    )
    workers: int = option(
        1,
        "Cells to run in parallel, each in its own process.",
        shown="one per core on the command line, else 1",
    )


# the records whose settings each function takes as keywords; tools/keywords.py writes their types
RECORDS: dict[str, tuple[type, ...]] = {
    "PretrainOptions": (
        RunOptions,
        StartOptions,
        TrainConfig,
        DataConfig,
        TokenizerConfig,
        ModelConfig,
    ),
    "ColumnOptions": (ColumnOptions,),
    "FinetuneOptions": (ColumnOptions, RunOptions, FinetuneConfig),
    "EvaluateOptions": (ColumnOptions, EvaluateSettings),
    "DetailedEvaluateOptions": (ColumnOptions, EvaluateSettings, DetailedSettings),
    "QuantizeOptions": (QuantizeOptions, JudgedOptions),
    "PruneOptions": (PruneOptions, JudgedOptions),
    "ShareOptions": (ShareOptions,),
    "DistilOptions": (DistilInputs, DistilOptions, ColumnOptions, RunOptions, FinetuneConfig),
    "PlanOptions": (PlanSettings, RecipeSettings),
    "CorpusOptions": (CorpusInputs, CorpusConfig),
    "TokenizerOptions": (TokenizerSettings,),
    "ServeOptions": (ServeConfig, LoadOptions),
    "StudyOptions": (StudySettings,),
}
SETTINGS = {name: settings_of(*records) for name, records in RECORDS.items()}
