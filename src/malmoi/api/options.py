"""The keywords of the public functions. Written by tools/keywords.py; do not edit."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from malmoi.adapters.config import AdapterConfig
from malmoi.api.records import Files, Settings
from malmoi.server.config import LogLevel

if TYPE_CHECKING:
    from malmoi.evaluation.task import Task
    from malmoi.text.rows import RowSource


class PretrainOptions(TypedDict, total=False):
    """The options of `pretrain`.

    Examples:
        >>> options: malmoi.PretrainOptions = {"minutes": 3, "lr": 1e-3}
    """

    device: str | None
    overwrite: bool
    settings: Settings
    tokenizer: str | Path | None
    start: str | Path | None
    steps: int
    tokens: int
    epochs: float
    minutes: float
    stretch: float
    max_epochs: float
    batch: int
    fit_batch: bool
    batch_start: int
    batch_ramp: float
    optimizer: Literal["adamw", "muon"]
    lr: float
    muon_lr: float
    betas: tuple[float, ...]
    eps: float
    decay: float
    muon_decay: float | None
    cautious_decay: bool
    clip: float
    label_smoothing: float
    schedule: str
    warmup: float
    warmup_steps: int
    floor: float
    decay_until: float
    cooldown: float
    ema: float
    seed: int
    precision: Literal["auto", "fp32", "bf16"]
    compile: bool | None
    micro: int
    gradient_checkpointing: bool
    save_every: int
    keep: int
    snapshots: bool
    valid_every: int
    valid_batches: int
    log_every: int
    prompt: str
    parallel: Literal["ddp", "fsdp"]
    tensorboard: bool
    track: str | Sequence[str]
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    weights: tuple[float, ...]
    valid: float
    fraction: float
    documents: Literal["auto", "blank", "blanks", "line", "file"]
    text: str
    pairs: bool
    source: str
    target: str
    features: str
    together: float
    sentences: Literal["rules", "kiwi"]
    document_mask: bool
    shuffle: Literal["windows", "documents"]
    short: float
    causal_share: float
    masked_length: int
    mask_rate: float
    mask_token: float
    mask_random: float
    whole_word: bool
    packed: bool | None
    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"]
    vocab: int
    lowercase: bool
    morphemes: Literal["none", "kiwi"]
    context: int
    width: int
    depth: int
    encoder_depth: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    embed_width: int
    segments: int
    groups: int
    mixer: Literal["attention", "linear", "lstm", "bilstm"]
    attention: tuple[str, ...]
    both_ways: bool
    positions: Literal["learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "none"]
    memory: int
    position_offset: int
    rotary_base: float
    local_rotary_base: float
    rotary_scaling: str
    norm: Literal["pre", "post"]
    norm_kind: Literal["layer", "rms"]
    norm_bias: bool
    first_norm: bool
    feature_count: int
    feature_width: int
    embed_scale: bool
    embed_norm: bool
    final_norm: bool
    qk_norm: bool
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu"]
    bias: bool
    embedding_residual: bool
    skip_connections: bool
    tied: bool
    lm_bias: bool
    softcap: float
    mlm_activation: Literal["", "gelu", "gelu_tanh", "relu", "relu2"]
    pool: Literal["first", "last", "mean"]
    pooler: Literal["none", "tanh", "relu", "gelu"]
    head_transform: bool
    generator_share: float
    dropout: float
    attention_dropout: float
    init: Literal["normal", "truncated", "xavier", "fan_in"]
    init_std: float
    residual_init: Literal["same", "scaled", "zero"]


class ColumnOptions(TypedDict, total=False):
    """The columns of a table."""

    text: str
    pair: str
    label: str | Sequence[str]
    choices: Sequence[str]
    separator: str


class FinetuneOptions(ColumnOptions, total=False):
    """The options of `finetune`.

    Examples:
        >>> options: malmoi.FinetuneOptions = {"text": "review", "epochs": 4}
    """

    device: str | None
    overwrite: bool
    settings: Settings
    epochs: float
    steps: int
    minutes: float
    max_minutes: float
    frozen_first: bool
    batch: int
    lr: float
    decay: float
    clip: float
    schedule: str
    warmup: float
    length: int
    stride: int
    lm: float
    freeze: bool
    freeze_layers: int
    features: str
    recurrent: int
    tune_features: bool
    adapter: Literal["none", "lora", "prompt", "prefix"] | AdapterConfig
    words: bool | None
    contrastive: bool | None
    prompt: bool | None
    layer_decay: float
    layers_transferred: int | None
    rdrop: float
    class_weights: bool | None
    label_thresholds: bool
    from_scratch: bool
    holdout: float
    metric: str
    evaluations: int
    patience: int
    average: float
    seed: int
    seeds: int
    init_seed: int | None
    best: bool
    grid: bool
    precision: Literal["auto", "fp32", "bf16"]
    compile: bool
    skip_bad: bool
    track: str | Sequence[str]


class EvaluateOptions(ColumnOptions, total=False):
    """The options of `evaluate`.

    Examples:
        >>> options: malmoi.EvaluateOptions = {"label": "stars", "limit": 100}
    """

    device: str | None
    skip_bad: bool
    train: "RowSource | None"
    seed: int
    limit: int | None
    score: str
    template: str | None
    beams: int
    reading: Literal["causal", "masked"] | None
    out: str | Path | None
    harness: Literal["lm-eval"] | None


class DetailedEvaluateOptions(EvaluateOptions, total=False):
    """The options of `evaluate`."""

    per_label: bool
    contamination: Sequence[str]


class QuantizeOptions(TypedDict, total=False):
    """The options of `quantize`."""

    bits: Literal[8, 4]
    group: int
    calibration: str | Path | None
    task: "str | Task | None"
    data: Path | None
    device: str | None


class PruneOptions(TypedDict, total=False):
    """The options of `prune`."""

    sparsity: float | None
    pattern: str | None
    layers: str | Sequence[int] | None
    heads: float | None
    neurons: float | None
    train: Path | None
    task: "str | Task | None"
    data: Path | None
    device: str | None


class ShareOptions(TypedDict, total=False):
    """The options of `share`."""

    groups: int
    embedding: int


class DistilOptions(FinetuneOptions, total=False):
    """The options of `distil`."""

    data: Files
    dev: Files | None
    task: "str | Task | None"
    layers: int | Sequence[int] | None
    student: str | Path | None
    temperature: float
    soft: float | None


class PlanOptions(TypedDict, total=False):
    """The options of `plan`."""

    gpu_memory: float | None
    gpu_tflops: float | None
    gpu_watts: float | None
    utilisation: float
    price: float | None
    pue: float
    settings: Settings


class CorpusOptions(TypedDict, total=False):
    """The options of `corpus`."""

    quality_reference: Sequence[str]
    decontaminate: Sequence[str]
    workers: int
    executor: Literal["processes", "ray"]
    part: str
    overwrite: bool
    settings: Settings
    steps: tuple[str, ...]
    documents: str
    text: str
    seed: int
    shard: int
    links: str
    min_score: float
    block_domains: tuple[str, ...]
    menu_length: int
    menu_share: float
    menu_documents: int
    language: str
    min_words: int
    max_words: int
    min_word_length: float
    max_word_length: float
    max_symbols: float
    min_letters: float
    max_bullets: float
    max_ellipses: float
    max_repeated_lines: float
    max_run: tuple[float, ...]
    pareto: float
    examples: int
    run: int
    hashes: int
    rows: int
    similar: float
    margin: int
    pieces: int
    piece: int
    weights: str
    size: int


class TokenizerOptions(TypedDict, total=False):
    """The options of `tokenizer`."""

    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"]
    vocab: int
    lowercase: bool | None
    min_frequency: int
    special: Literal["none", "mask", "pad"]
    morphemes: Literal["none", "kiwi"]


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
    pairs: tuple[Path, ...]
    served_model_name: tuple[str, ...]
    log_level: LogLevel
    device: str | None
    dtype: str | None


class StudyOptions(TypedDict, total=False):
    """The options of `study`."""

    scale: str
    seeds: int
    workers: int
    device: str | None
