"""The keyword options of the public functions, for editors, type checkers and `check_options`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from malmoi.config import RENAMED_FIELDS
from malmoi.errors import UsageError, nearest

if TYPE_CHECKING:
    from malmoi.adapters import AdapterConfig
    from malmoi.evaluation.tasks import Task

Files = str | Path | Sequence[str | Path]
Settings = Mapping[str, object]  # by path: {"train.floor": 0.1}


class RunOptions(TypedDict, total=False):
    """What every training run takes beside its settings."""

    device: str | None  # cpu, cuda, cuda:1, mps; None: a GPU if there is one
    settings: Settings  # any setting by its path


class RecipeOptions(TypedDict, total=False):
    """The settings of a recipe that are changed most often; `settings` reaches the others."""

    # the budget: one of these
    steps: int
    tokens: int
    minutes: float
    # how the weights learn
    batch: int
    optimizer: Literal["adamw", "muon"]
    lr: float
    decay: float
    clip: float
    schedule: Literal["linear", "cosine", "wsd", "constant"]
    warmup: float
    seed: int
    precision: Literal["auto", "fp32", "bf16"]
    compile: bool | None
    micro: int
    gradient_checkpointing: bool
    parallel: Literal["ddp", "fsdp"]
    # what is kept and watched
    save_every: int
    keep: int
    valid_every: int
    valid_batches: int
    log_every: int
    prompt: str
    tensorboard: bool
    # how text becomes samples
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    weights: tuple[float, ...]
    valid: float
    documents: Literal["auto", "blank", "blanks", "line", "file"]
    text: str
    document_mask: bool
    mask_rate: float
    whole_word: bool
    vocab: int  # of the tokenizer that is learnt
    # the model
    context: int
    width: int
    depth: int
    heads: int
    attention: tuple[str, ...]
    dropout: float


class PretrainOptions(RunOptions, RecipeOptions, total=False):
    """The options of `pretrain`."""

    tokenizer: str | Path | None  # a ready vocabulary instead of one learnt from the text
    start: str | Path | None  # a model to continue from instead of new weights


class FinetuneOptions(RunOptions, total=False):
    """The options of `finetune`: the fields of its settings."""

    restart: bool  # discard the run in the folder and start over
    epochs: float
    steps: int
    minutes: float
    batch: int
    lr: float
    decay: float
    clip: float
    schedule: Literal["linear", "cosine", "constant"]
    warmup: float
    length: int
    stride: int
    lm: float
    freeze: bool
    freeze_layers: int
    features: str
    recurrent: int
    adapter: "Literal['none', 'lora', 'prompt', 'prefix'] | AdapterConfig"
    words: bool | None
    layer_decay: float
    class_weights: bool
    label_thresholds: bool
    from_scratch: bool
    holdout: float
    evaluations: int
    patience: int
    seed: int
    seeds: int
    grid: bool
    precision: Literal["auto", "fp32", "bf16"]
    compile: bool
    skip_bad: bool


class EvaluateOptions(TypedDict, total=False):
    """The options of `evaluate`."""

    device: str | None
    skip_bad: bool  # leave bad rows out instead of stopping at the first
    train: Files | None  # rows that the examples of a prompt are drawn from
    seed: int
    limit: int | None  # only so many rows
    score: str  # how the likelihoods of choices are compared
    template: str | None  # another prompt
    per_label: bool  # the metrics of each label too
    reading: Literal["causal", "masked"]  # of a model that was trained both ways
    out: str | Path | None  # a folder for curve.json and curve.svg
    harness: Literal["lm-eval"] | None


class DistilOptions(FinetuneOptions, total=False):
    data: Files
    dev: Files | None
    task: "str | Task | None"
    layers: int | Sequence[int] | None
    student: str | Path | None
    temperature: float
    soft: float


class PlanOptions(TypedDict, total=False):
    """The options of `plan`."""

    gpu_memory: float  # GB of one GPU
    gpu_tflops: float  # its dense bf16 peak
    gpu_watts: float
    utilisation: float
    price: float | None  # of one GPU-hour
    pue: float
    settings: Settings  # of the recipe, by path


class CorpusOptions(TypedDict, total=False):
    """The options of `build_corpus`."""

    quality_reference: Sequence[str]  # good text that the quality classifier learns from
    decontaminate: Sequence[str]  # test sets whose words must go
    workers: int
    restart: bool
    steps: tuple[str, ...]
    documents: str
    text: str
    seed: int
    language: str
    min_words: int
    max_words: int
    weights: str
    size: int
    settings: Settings


class ServeOptions(TypedDict, total=False):
    """The options of `serve`."""

    host: str
    port: int
    api_key: str | None
    cors: tuple[str, ...]
    slots: int
    queue: int
    timeout: float
    max_tokens: int
    max_read_tokens: int
    max_body: int
    body_timeout: float
    stall_timeout: float
    time_slice: float
    runs: Path | None
    device: str | None
    dtype: str | None


class StudyOptions(TypedDict, total=False):
    """The options of `study`."""

    sizes: tuple[str, ...]
    minutes: float
    tokens: int
    seed: int
    device: str | None
    settings: Settings


def check_options(verb: str, given: Iterable[str], known: type, *also: str) -> None:
    """Refuses an option that the function does not have, and names the nearest; `also` are those
    that are parameters of its own. Paths and former names are the settings' to check.
    """
    names = {*known.__annotations__, *also}
    former = {name for renamed in RENAMED_FIELDS.values() for name in renamed}
    for name in given:
        if name not in names | former and "." not in name:
            raise UsageError(f"{verb} has no option {name!r}.{nearest(name, names)}")


def merge_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Options with those under `settings` beside them."""
    inner = given.get("settings") or {}
    if not isinstance(inner, Mapping):
        raise UsageError('settings must be a mapping, such as {"train.floor": 0.1}.')
    return {**{name: value for name, value in given.items() if name != "settings"}, **inner}
