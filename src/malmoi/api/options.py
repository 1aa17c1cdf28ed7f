"""The keyword options of the public functions, for editors, type checkers and `check_options`."""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar

from malmoi.config import RENAMED_FIELDS, current_fields, field_comments
from malmoi.errors import UsageError, nearest

if TYPE_CHECKING:
    from malmoi.adapters import AdapterConfig
    from malmoi.evaluation.tasks import Task
    from malmoi.text.rows import RowSource

Files = str | Path | Sequence[str | Path]
Settings = Mapping[str, object]  # by path: {"train.floor": 0.1}


class SharedRunOptions(TypedDict, total=False):
    """Options of every training run besides its settings."""

    device: str | None  # cpu, cuda, cuda:1, mps; None: a GPU if there is one
    overwrite: bool  # discard the run in the folder and start over, instead of resuming it
    settings: Settings  # any setting by its path: {"train.floor": 0.1}


class RecipeOptions(TypedDict, total=False):
    """The most frequently changed settings of a recipe; pass others through `settings`."""

    # the budget: one of these
    steps: int  # the budget in updates
    tokens: int  # the budget in tokens
    epochs: float  # the budget in epochs of the text
    minutes: float  # the budget in minutes
    # optimization
    batch: int  # sequences per step
    optimizer: Literal["adamw", "muon"]
    lr: float  # peak learning rate
    decay: float  # weight decay of matrices and embeddings
    clip: float  # maximum gradient norm; 0: off
    schedule: str  # linear, cosine, wsd, constant, or a plugin's
    warmup: float  # share of the budget
    seed: int
    precision: Literal["auto", "fp32", "bf16"]
    compile: bool | None  # None: if it is faster
    micro: int  # sequences in one pass; 0: as many as fit
    gradient_checkpointing: bool  # less memory, more time
    parallel: Literal["ddp", "fsdp"]
    # checkpoints and logging
    save_every: int  # steps between saved states
    keep: int  # saved states to keep
    valid_every: int  # steps between validations
    valid_batches: int
    log_every: int  # steps between rows of metrics.jsonl
    prompt: str  # prompt of the sample generated at each validation
    tensorboard: bool
    track: str | Sequence[str]  # tensorboard, wandb, mlflow, trackio
    # data
    lengths: tuple[int, ...]  # tokens per sample in each phase; empty: the model's context
    shares: tuple[float, ...]  # share of the budget for each phase
    weights: tuple[float, ...]  # weight of each source in the mixture; empty: by size
    valid: float  # share of the documents kept for validation
    documents: Literal["auto", "blank", "blanks", "line", "file"]  # what separates documents
    text: str  # the column or key that holds the text
    document_mask: bool  # packed documents do not attend to each other
    mask_rate: float  # share of the tokens to predict (MLM)
    whole_word: bool  # mask whole words
    vocab: int  # vocabulary size of the trained tokenizer
    # the model
    context: int  # tokens
    width: int
    depth: int  # layers
    heads: int
    attention: tuple[str, ...]  # patterns, one per layer in turn: ("causal", "causal & local:256")
    dropout: float


class PretrainOptions(SharedRunOptions, RecipeOptions, total=False):
    """The options of `pretrain`.

    Examples:
        >>> options: malmoi.PretrainOptions = {"minutes": 3, "lr": 1e-3}
    """

    tokenizer: str | Path | None  # an existing tokenizer instead of a new one
    start: str | Path | None  # a model to continue from instead of random weights


class ColumnOptions(TypedDict, total=False):
    """The columns of a table; columns that are not given are detected."""

    text: str
    pair: str  # the second text of each row
    label: str | Sequence[str]  # several: one 0/1 column per label
    choices: Sequence[str]  # the columns of the choices
    separator: str  # between the labels of a row, if they are one string


class FinetuneOptions(ColumnOptions, SharedRunOptions, total=False):
    """The options of `finetune`: the columns, and the fields of its settings.

    Examples:
        >>> options: malmoi.FinetuneOptions = {"text": "review", "epochs": 4}
    """

    epochs: float  # passes over the rows; default: 2–30 by rows, ended after 4 minutes, on a GPU 10
    steps: int  # updates, instead of epochs
    minutes: float  # time budget, instead of both
    max_minutes: float  # time limit beside epochs or steps
    frozen_first: bool  # start with a linear layer on the frozen model, and keep the better one
    batch: int  # examples per step; default: 8–64 by rows and kind
    lr: float  # peak learning rate; default: by model and kind
    decay: float  # weight decay
    clip: float  # maximum gradient norm; 0: off
    schedule: str  # linear, cosine, wsd, constant, or a plugin's
    warmup: float  # share of the steps
    length: int  # maximum tokens per row; 0: the context, up to 512
    stride: int  # between the windows over a long context
    lm: float  # weight of the language-model loss (λ of GPT-1 eq. 5); default: 0.5 for a GPT
    freeze: bool  # train only the new layer
    freeze_layers: int  # freeze the embeddings and the first n layers
    features: str  # a small model on frozen layers: last4, weighted-all, layers=8,9
    recurrent: int  # width of a tagger's BiLSTM on features
    tune_features: bool  # train the layers below too (BERT table 5: + BiLSTM)
    adapter: "Literal['none', 'lora', 'prompt', 'prefix'] | AdapterConfig"
    words: bool | None  # train label words instead of a new layer
    contrastive: bool | None  # contrastive training as in SetFit; None: with few rows
    prompt: bool | None  # label words after a prompt, not trained; None: with few rows and a GPT
    layer_decay: float  # each layer's learning rate relative to the layer above
    layers_transferred: int | None  # keep only the first n pre-trained layers
    rdrop: float  # weight of the divergence of two passes with different dropout
    class_weights: bool | None  # weight rare labels more; None: if labels are imbalanced
    label_thresholds: bool  # multi-label: one threshold per label, not one for all
    from_scratch: bool  # random initial weights, as a baseline for pre-training
    holdout: float  # share of the rows held out for selection and, without dev, for evaluation
    metric: str  # metric used for selection and reported first
    average: float  # share of the run, at its end, whose weights are averaged
    evaluations: int  # per epoch, on the held-out rows
    patience: int  # stop after this many evaluations without improvement; 0: never
    seed: int
    seeds: int  # number of runs; the first is kept
    init_seed: int | None  # of the new layer's weights; None: the seed
    best: bool  # search settings for `minutes`, and average the best models
    grid: bool  # search BERT's learning rates, batch sizes and epochs; the best is kept
    precision: Literal["auto", "fp32", "bf16"]
    compile: bool
    skip_bad: bool  # skip bad rows instead of stopping at the first
    track: str | Sequence[str]  # tensorboard, wandb, mlflow, trackio


class EvaluateOptions(ColumnOptions, total=False):
    """The options of `evaluate`.

    Examples:
        >>> options: malmoi.EvaluateOptions = {"label": "stars", "limit": 100}
    """

    device: str | None
    skip_bad: bool  # skip bad rows instead of stopping at the first
    train: "RowSource | None"  # rows to draw few-shot examples from
    seed: int
    limit: int | None  # evaluate at most this many rows
    score: str  # how choices are compared: total, token, byte, unconditional
    template: str | None  # name or .toml file of another prompt template
    beams: int  # of a translation model; default 4
    reading: Literal["causal", "masked"]  # for a model trained both ways
    out: str | Path | None  # a folder for curve.json and curve.svg
    harness: Literal["lm-eval"] | None


class DetailedEvaluateOptions(EvaluateOptions, total=False):
    """The options of `evaluate`, with those that add tables to its metrics."""

    per_label: bool  # also return metrics per label
    contamination: Sequence[str]  # training text; items that occur in it are scored separately


class DistilOptions(FinetuneOptions, total=False):
    """The options of `compress(…, "distil")`, in addition to those of `finetune`."""

    data: Files
    dev: Files | None
    task: "str | Task | None"
    layers: int | Sequence[int] | None
    student: str | Path | None
    temperature: float
    soft: float | None  # weight of the teacher's scores in the loss; None: 5/7, for a task 1/2


class PlanOptions(TypedDict, total=False):
    """The options of `plan`."""

    gpu_memory: float  # GB of one GPU
    gpu_tflops: float  # its dense bf16 peak
    gpu_watts: float
    utilisation: float  # share of the peak that training reaches
    price: float | None  # of one GPU-hour
    pue: float  # power usage effectiveness of the data centre
    settings: Settings  # of the recipe, by path


class CorpusOptions(TypedDict, total=False):
    """The options of `build_corpus`."""

    quality_reference: Sequence[str]  # good text that the quality classifier learns from
    decontaminate: Sequence[str]  # test sets whose text is removed
    workers: int  # processes
    executor: Literal["processes", "ray"]  # ray: tasks on a Ray cluster
    part: str  # "3/16": only every 16th shard from the third on, as one of several cluster jobs
    overwrite: bool  # discard the build in the folder and start over, instead of resuming it
    steps: tuple[str, ...]  # processing steps, in order
    documents: str  # how plain text is split into documents
    text: str  # column or key that holds the text
    seed: int
    language: str  # en, ko, …; empty: any
    min_words: int
    max_words: int  # 0: no limit
    links: str  # .csv, .tsv, .jsonl with url and score: only these pages are kept
    min_score: float  # minimum score of a link
    block_domains: tuple[str, ...]  # domains to exclude; default with links: wikipedia.org
    weights: str  # web=0.6,books=0.4: shares of the output's characters
    size: int  # characters of the output; 0: as many as before mixing
    settings: Settings  # any setting by its name


class TokenizerOptions(TypedDict, total=False):
    """The options of `train_tokenizer`."""

    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"]  # BERT's (default), GPT-1's, GPT-2's
    vocab: int  # 30,000
    lowercase: bool | None  # None: only bpe lowercases
    min_frequency: int  # 2: merge only pairs that occur at least this often
    special: Literal["none", "mask", "pad"]  # extra token of a byte-bpe tokenizer: mask or padding
    morphemes: Literal["none", "kiwi"]  # kiwi: split Korean into morphemes first (kiwipiepy)


class ServeOptions(TypedDict, total=False):
    """The options of `serve`."""

    host: str  # 127.0.0.1: reachable from this machine only
    port: int  # 8000; 0: any free port
    api_key: str | None
    cors: tuple[str, ...]  # allowed CORS origins
    slots: int  # sequences decoded at the same time
    queue: int  # maximum number of waiting requests
    timeout: float  # seconds per request
    max_tokens: int  # maximum new tokens per request
    max_read_tokens: int  # maximum tokens that the model reads per request
    max_body: int  # maximum bytes of a request
    body_timeout: float  # seconds for a request body to arrive
    stall_timeout: float  # extra seconds for a client that reads slowly
    time_slice: float  # seconds of computation before another client's turn
    runs: Path | None  # folder of training runs for the studio
    pairs: tuple[Path, ...]  # files of minimal pairs for the studio
    served_model_name: tuple[str, ...]  # names in the API instead of the folder's
    log_level: Literal["debug", "info", "warning", "error"]  # info
    device: str | None
    dtype: str | None  # fp32, bf16, fp16, int8


class StudyOptions(TypedDict, total=False):
    """The options of `study`."""

    scale: str  # cpu, gpu-minutes or paper
    seeds: int  # runs per row; 0: default of the scale
    workers: int  # cells to run in parallel, each in its own process
    device: str | None


# ------------------------------------------------------------------ checks, and help()

PublicFunction = TypeVar("PublicFunction", bound=Callable[..., object])


class _Default:
    """Placeholder in a signature for a default that the recipe, the model or the server sets."""

    def __repr__(self) -> str:
        return "…"


def lists_options(options: type) -> Callable[[PublicFunction], PublicFunction]:
    """Adds every option to the signature and the docstring, for `help()` and notebooks."""

    def listed(function: PublicFunction) -> PublicFunction:
        found = inspect.signature(function)
        own = [one for one in found.parameters.values() if one.kind is not one.VAR_KEYWORD]
        comments = _all_comments(options)
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_Default()
            )
            for name, kind in options.__annotations__.items()
        ]
        function.__signature__ = found.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        lines = [f"        {name}: {comments[name]}" for name in comments if comments[name]]
        before, examples, after = (function.__doc__ or "").partition("    Examples:")
        function.__doc__ = "\n".join([f"{before}    Options:", *lines, "", f"{examples}{after}"])
        return function

    return listed


def _all_comments(options: type) -> dict[str, str]:
    """Returns the comment of each option, including those of base classes."""
    found: dict[str, str] = {}
    definition = ast.parse(inspect.getsource(options)).body[0]
    assert isinstance(definition, ast.ClassDef)
    for base in map(ast.unparse, definition.bases):  # a TypedDict drops its bases before 3.12
        if base != "TypedDict":
            found |= _all_comments(globals()[base])
    return found | field_comments(options)


def check_options(verb: str, given: Iterable[str], known: type, *also: str) -> None:
    """Refuses an option that the function does not have, and names the nearest; `also` are those
    that are parameters of its own. Paths and former names are the settings' to check.
    """
    names = {*known.__annotations__, *also}
    former = {name for renamed in RENAMED_FIELDS.values() for name in renamed}
    for name in given:
        if name not in names | former and "." not in name:
            raise UsageError(
                "{verb} has no option {name!r}.{hint}",
                verb=verb,
                name=name,
                hint=nearest(name, names),
            )


def merge_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Returns the options merged with those under `settings`."""
    given = current_fields("options", given)
    inner = given.pop("settings", None) or {}
    if not isinstance(inner, Mapping):
        raise UsageError('settings must be a mapping, such as {"train.floor": 0.1}.')
    return {**given, **inner}
