# Written by tools/keywords.py from the records of settings; do not edit.

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from malmoi.adapters.config import AdapterConfig
from malmoi.api.records import Files
from malmoi.api.run_options import Settings
from malmoi.evaluation.task import Task
from malmoi.server.config import LogLevel
from malmoi.text.rows import RowSource

class PretrainOptions(TypedDict, total=False):
    """Keyword options, each with its type.

    Examples:
        >>> options: malmoi.PretrainOptions = {"minutes": 3, "lr": 1e-3}
    """

    settings: Settings
    """Any setting by its path: {"train.floor": 0.1}."""
    overwrite: bool
    """Discard what the output already has and start over."""
    device: str | None
    """cpu, cuda, cuda:1… or mps."""
    tokenizer: str | Path | None
    """Existing tokenizer."""
    start: str | Path | None
    """Model to continue from."""
    steps: int
    """Budget in steps."""
    tokens: int
    """Budget in tokens."""
    epochs: float
    """Budget in epochs of the text."""
    minutes: float
    """Budget as a time: 3, 90s, 2h."""
    stretch: float
    """How many times as long the minutes may take beside other programs."""
    max_epochs: float
    """The minutes end after this many epochs; 0: never."""
    batch: int
    """Sequences per step over all processes."""
    fit_batch: bool
    """Shrink the batch if the minutes allow too few updates."""
    batch_start: int
    """The batch grows from this size."""
    batch_ramp: float
    """Share of the budget over which the batch grows."""
    optimizer: Literal["adamw", "muon"]
    """muon: Muon for weight matrices, AdamW for the rest."""
    lr: float
    """Peak learning rate."""
    muon_lr: float
    """Muon's learning rate, for matrices; `lr` is for the rest."""
    betas: tuple[float, ...]
    """Adam's β1 and β2."""
    eps: float
    """Adam's ε."""
    decay: float
    """Weight decay; not for biases and norms."""
    muon_decay: float | None
    """Weight decay of Muon's matrices."""
    cautious_decay: bool
    """Muon decays only where the update shrinks a weight too."""
    clip: float
    """Maximum gradient norm; 0: off."""
    label_smoothing: float
    """Share of the next token's probability spread over all tokens."""
    schedule: str
    """linear, cosine, wsd, constant, inverse_sqrt, or a plugin's."""
    warmup: float
    """Warm-up, as a share of the budget."""
    warmup_steps: int
    """Warm-up of at least this many steps."""
    floor: float
    """Final learning rate as a share of its peak."""
    decay_until: float
    """Share of the budget at which the floor is reached."""
    cooldown: float
    """Share of the budget over which wsd decays."""
    ema: float
    """Average the weights over this last share of the budget; 0: off."""
    own_teacher: float
    """Weight of learning from the mean of the own last weights; 0: off."""
    seed: int
    """Random seed."""
    precision: Literal["auto", "fp32", "bf16"]
    """auto: bf16 if the device computes in it."""
    compile: bool | None
    """torch.compile."""
    micro: int
    """Sequences in one pass; 0: as many as fit."""
    gradient_checkpointing: bool
    """Recompute activations to save memory."""
    checkpointing_keeps: Literal["inputs", "products"]
    """What gradient checkpointing keeps of a layer: its input, or its products too."""
    save_every: int
    """Steps between saved states."""
    keep: int
    """Saved states that are kept, besides the best."""
    snapshots: bool
    """Also a model folder after steps 1, 2, 3, 4, 6, 8, 11, 16…"""
    valid_every: int
    """Steps between validations."""
    valid_batches: int
    """Batches per validation."""
    log_every: int
    """Steps between rows of metrics.jsonl."""
    prompt: str
    """Prompt of validation's sample; empty: by the objective."""
    parallel: Literal["ddp", "fsdp", "hybrid"]
    """How processes share a run: copies, shards, or shards in each machine."""
    tensor: int
    """Processes that compute each layer together."""
    tensorboard: bool
    """Also write TensorBoard events."""
    track: str | Sequence[str]
    """Also log the run to tensorboard, wandb, mlflow or trackio; repeatable."""
    lengths: tuple[int, ...]
    """Tokens of a sample in each phase; none: the context."""
    shares: tuple[float, ...]
    """Share of the budget per phase (BERT: 0.9, 0.1)."""
    weights: tuple[float, ...]
    """Share of each source in the mixture; none: by size."""
    valid: float
    """Share of the documents held out for validation."""
    fraction: float
    """Share of the training text to encode, drawn evenly."""
    documents: Literal["auto", "blank", "blanks", "line", "file"]
    """What separates documents in plain text."""
    text: str
    """Column or key that holds the text."""
    pairs: bool
    """Translations: files aligned by line, or tables of two columns."""
    source: str
    """Of a table of translations, the column to translate from."""
    target: str
    """Of a table of translations, the column to translate to."""
    features: str
    """A .npy file with vectors for each line of the text, before it."""
    together: float
    """Share of an MLM's rows with both sides of a pair."""
    sentences: Literal["rules", "kiwi"]
    """What splits text into sentences."""
    document_mask: bool
    """Packed documents do not see one another."""
    shuffle: Literal["windows", "documents"]
    """What an epoch reorders: windows of the text, or whole documents."""
    short: float
    """Share of pairs that are shortened on purpose."""
    causal_share: float
    """Share of the rows of `both` that are causal."""
    masked_length: int
    """Tokens of its masked rows; 0: as many as of the causal ones."""
    mask_rate: float
    """Share of the tokens that are predicted (MLM)."""
    mask_token: float
    """Share of the chosen tokens that become [MASK]."""
    mask_random: float
    """Share that becomes a random token; the rest stays."""
    own_masks: float
    """Share of the masks that mlm+rtd fills itself; its generator fills the others."""
    whole_word: bool
    """Mask all tokens of a word together."""
    packed: bool | None
    """BERT without padding."""
    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"]
    """How words are split."""
    vocab: int
    """Tokens of the vocabulary that is learnt."""
    lowercase: bool
    """Lower-case the text."""
    morphemes: Literal["none", "kiwi"]
    """What cuts Korean words before the vocabulary."""
    context: int
    """Longest sequence in tokens."""
    width: int
    """Size of the hidden states."""
    depth: int
    """Number of layers."""
    encoder_depth: int
    """Layers of an encoder whose states every block attends to (Vaswani et al. 2017); 0: none."""
    heads: int
    """Attention heads per layer."""
    kv_heads: int
    """Key/value heads (grouped-query attention); 0: as many as heads."""
    head_width: int
    """Width of a head; 0: width / heads."""
    hidden: int
    """Width inside the MLP; 0: 4 × width, or about 8/3 × width for a gated MLP, which has 3 matrices."""
    embed_width: int
    """Factorised embedding (ALBERT, ELECTRA); 0: width."""
    segments: int
    """Segments with an embedding of their own; 0: no segment embedding."""
    groups: int
    """Distinct blocks, shared over the depth (ALBERT: 1); 0: one per layer."""
    mixer: Literal["attention", "lstm", "bilstm"]
    """How tokens exchange information: attention, an LSTM, or an LSTM in each direction (ELMo)."""
    attention: tuple[str, ...]
    """A pattern per layer, cycled over the depth."""
    both_ways: bool
    """A causal model that is also trained to fill masks: a masked token is then predicted one position to its left (GPT-BERT, Charpentier & Samuel 2024)."""
    positions: Literal["learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "none"]
    """Position scheme. sinusoidal_halves: all sines, then all cosines, as in the authors' code and Marian; relative: relative positions in every layer (Transformer-XL)."""
    memory: int
    """Tokens of earlier segments that the next segment attends to (Transformer-XL)."""
    position_offset: int
    """Rows of the table before the first token's (RoBERTa: pad id + 1)."""
    rotary_base: float
    """Base of the rotary angles."""
    local_rotary_base: float
    """Base in layers with a `local` pattern; 0: rotary_base."""
    rotary_scaling: str
    """Stretches rotary positions to a longer context: "linear:4", "llama3:8,1,4,8192"; empty: off."""
    norm: Literal["pre", "post"]
    """pre: x + f(LN(x)); post: LN(x + f(x))."""
    norm_kind: Literal["layer", "rms"]
    """LayerNorm or RMSNorm."""
    norm_bias: bool
    """Whether norms have a bias."""
    first_norm: bool
    """Norm before the first attention; ModernBERT, whose embedding is normalised, has none."""
    feature_count: int
    """Precomputed vectors before the text (images, audio): their number and width; 0: none."""
    feature_width: int
    """Size of each of those vectors."""
    embed_scale: bool
    """Token embeddings times √width (Vaswani et al. 2017 §3.4)."""
    embed_norm: bool
    """Norm after the embeddings."""
    final_norm: bool
    """Norm after the last block."""
    qk_norm: bool
    """Norms on queries and keys."""
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu"]
    """Activation of the MLP; swiglu and geglu are gated."""
    bias: bool
    """Whether linear layers have a bias."""
    embedding_residual: bool
    """Every block adds the token embeddings to its input and, projected, to its values."""
    skip_connections: bool
    """U-Net: each layer of the upper half adds the output of its mirror in the lower half."""
    tied: bool
    """The vocabulary head reuses the token embedding."""
    lm_bias: bool
    """The next token's scores have a bias (Marian)."""
    softcap: float
    """Limits the logits over the vocabulary: cap·tanh(x / cap); 0: off."""
    mlm_activation: Literal["", "gelu", "gelu_tanh", "relu", "relu2"]
    """Activation of the MLM head; empty: as in the blocks."""
    pool: Literal["first", "last", "mean"]
    """Which tokens' states a sequence head reads."""
    pooler: Literal["none", "tanh", "relu", "gelu"]
    """Activation of a dense layer before sequence heads."""
    head_transform: bool
    """Every head reads through a dense layer without bias, its activation and a norm (ModernBERT)."""
    generator_share: float
    """Width of ELECTRA's generator, as a share of the model's."""
    generator_depth: int
    """Layers of that generator; 0: the model's."""
    dropout: float
    """Dropout of embeddings and of what blocks add."""
    attention_dropout: float
    """Dropout of attention weights."""
    init: Literal["normal", "truncated", "xavier", "fan_in"]
    """Initial weights. xavier: by the sizes of each matrix, the embedding N(0, 1/√width) (tensor2tensor)."""
    init_std: float
    """Standard deviation of initial weights."""
    residual_init: Literal["same", "scaled", "zero"]
    """Initialisation of weights that write to the residual stream."""

class ColumnOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    text: str
    """Column of the text."""
    pair: str
    """Column of a second text or a context."""
    label: str | Sequence[str]
    """Column of the label; for multilabel also A,B,… holding 0 and 1."""
    choices: Sequence[str]
    """Columns of the choices, comma-separated."""
    separator: str
    """Separator between a row's labels (multilabel)."""

class FinetuneOptions(ColumnOptions, total=False):
    """Keyword options, each with its type.

    Examples:
        >>> options: malmoi.FinetuneOptions = {"text": "review", "epochs": 4}
    """

    settings: Settings
    """Any setting by its path: {"train.floor": 0.1}."""
    overwrite: bool
    """Discard what the output already has and start over."""
    device: str | None
    """cpu, cuda, cuda:1… or mps."""
    epochs: float
    """Passes over the rows."""
    steps: int
    """Budget in steps."""
    minutes: float
    """Budget as a time: 3, 90s, 2h."""
    max_minutes: float
    """Time limit beside epochs or steps; 0: none."""
    frozen_first: bool
    """Start with a linear layer on the frozen model; held-out rows tell which of the two is kept."""
    batch: int
    """Examples per step."""
    lr: float
    """Peak learning rate."""
    decay: float
    """Weight decay."""
    clip: float
    """Maximum gradient norm; 0: off."""
    schedule: str
    """Learning-rate schedule: linear, cosine, wsd, constant, or a plugin's."""
    warmup: float
    """Warm-up, as a share of the steps."""
    length: int
    """Maximum tokens per row."""
    stride: int
    """Tokens between the windows over a long context."""
    lm: float
    """λ of GPT-1's auxiliary language model."""
    freeze: bool
    """Train only the new output layer."""
    freeze_layers: int
    """Freeze the embeddings and the first n layers."""
    features: str
    """Train a small model on frozen layers: last4, last, weighted-all, mix, layers=5,6…"""
    recurrent: int
    """Width of a tagger's BiLSTM on features."""
    tune_features: bool
    """Train the layers below too (BERT table 5: + BiLSTM)."""
    adapter: Literal['none', 'lora', 'prompt', 'prefix'] | AdapterConfig
    """Train only an adapter: lora, prompt or prefix."""
    words: bool | None
    """Train label words instead of a new layer."""
    contrastive: bool | None
    """Contrast sentence vectors, then fit a logistic layer, as SetFit does."""
    own_cosines: float
    """Pairs on a sentence encoder: epochs in which the network first learns to say the encoder's own cosine, reading both texts at once; 0: none."""
    prompt: bool | None
    """Calibrate label words after a prompt on the rows, without training."""
    layer_decay: float
    """Each layer's learning rate relative to the layer above."""
    layers_transferred: int | None
    """Keep only the first n pre-trained layers (GPT-1 fig. 2)."""
    class_weights: bool | None
    """Weight rare labels more."""
    label_thresholds: bool
    """Multi-label: one threshold per label, not one for all."""
    from_scratch: bool
    """Start from random weights, as a baseline."""
    holdout: float
    """Share of the rows held out to select by and, without a file for it, to evaluate on."""
    metric: str
    """Metric for model selection: accuracy, f1_macro, mcc…"""
    evaluations: int
    """Evaluations per epoch, on the held-out rows."""
    patience: int
    """Stop after this many evaluations without improvement and keep the best epoch; 0: the last."""
    average: float
    """Share of the run, at its end, whose weights are averaged."""
    seed: int
    """Random seed."""
    seeds: int
    """Repeat with N seeds and report mean ± standard deviation; the first run is kept."""
    init_seed: int | None
    """Random seed of the new layer's weights."""
    best: bool
    """Spend --minutes: train others, too, and keep their student if it is clearly better."""
    grid: bool
    """Search BERT's grid of learning rates, batches and epochs."""
    precision: Literal["auto", "fp32", "bf16"]
    """auto: bf16 if the device computes in it."""
    compile: bool
    """torch.compile."""
    skip_bad: bool
    """Skip bad rows instead of stopping at the first."""
    unlabelled: str | Sequence[str]
    """Rows without labels to learn from, too: a table, or one text a line; repeatable."""
    labels: str
    """Learn these labels from their names and --unlabelled rows alone: positive,negative."""
    track: str | Sequence[str]
    """Also log the run to tensorboard, wandb, mlflow or trackio; repeatable."""

class EvaluateOptions(ColumnOptions, total=False):
    """Keyword options, each with its type.

    Examples:
        >>> options: malmoi.EvaluateOptions = {"label": "stars", "limit": 100}
    """

    device: str | None
    """cpu, cuda, cuda:1… or mps."""
    skip_bad: bool
    """Skip bad rows instead of stopping at the first."""
    train: RowSource | None
    """Rows to draw the examples from."""
    seed: int
    """Random seed of the examples."""
    limit: int | None
    """Evaluate at most this many items."""
    score: str
    """Compare choices by total, token, byte or unconditional likelihood; BERT: cloze_total…"""
    template: str | None
    """Another prompt template, by name or from a .toml file."""
    beams: int
    """Beams of a translation model; 1 is greedy."""
    reading: Literal["causal", "masked"] | None
    """Reading mode of a model trained both ways: causal or masked."""
    out: str | Path | None
    """Write curve.json and curve.svg here."""
    harness: Literal["lm-eval"] | None
    """Evaluate with lm-eval; TASK may be one of its YAML files."""

class DetailedEvaluateOptions(EvaluateOptions, total=False):
    """Keyword options, each with its type."""

    per_label: bool
    """Also return metrics per label."""
    contamination: Sequence[str]
    """Training text; items that overlap with it are scored separately (GPT-3 §4)."""

class QuantizeOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    bits: Literal[8, 4]
    """Bits per weight: 8 or 4."""
    group: int
    """Inputs that share a scale; 0: a whole row, or 32 at 4 bits."""
    calibration: str | Path | None
    """Calibration text for GPTQ, similar to the model's input."""
    task: str | Task | None
    """Task to evaluate rows by."""
    data: Path | None
    """Text, or rows of the task, to evaluate on before and after."""
    device: str | None
    """cpu, cuda, cuda:1… or mps."""

class PruneOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    sparsity: float | None
    """Fraction of the weights to set to zero."""
    pattern: str | None
    """Sparsity pattern: 2:4 keeps two of every four weights."""
    layers: str | Sequence[int] | None
    """Layers to keep, e.g. 0,2,4."""
    heads: float | None
    """Fraction of each layer's heads to keep."""
    neurons: float | None
    """Fraction of each MLP's neurons to keep."""
    train: Path | None
    """Text, or rows of the task, to measure which heads or neurons matter least."""
    task: str | Task | None
    """Task to evaluate rows by."""
    data: Path | None
    """Text, or rows of the task, to evaluate on before and after."""
    device: str | None
    """cpu, cuda, cuda:1… or mps."""

class ShareOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    groups: int
    """Distinct blocks, shared over the depth."""
    embedding: int
    """Width of a factorised embedding; 0: unchanged."""

class DistilOptions(FinetuneOptions, total=False):
    """Keyword options, each with its type."""

    data: Files
    """Text, or rows of the task, to train the student on."""
    dev: Files | None
    """Evaluation rows."""
    task: str | Task | None
    """Task of the rows in data."""
    layers: int | Sequence[int] | None
    """Layers of the student."""
    student: str | Path | None
    """Student with a different architecture."""
    temperature: float
    """Softmax temperature of the teacher."""
    soft: float | None
    """Weight of the distillation loss; the labels get the rest."""

class PlanOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    gpu_memory: float | None
    """Memory of one GPU in GB."""
    gpu_tflops: float | None
    """Dense bf16 peak of one GPU."""
    gpu_watts: float | None
    """Power of one GPU in watts."""
    utilisation: float
    """Fraction of the peak FLOP/s."""
    price: float | None
    """Price of one GPU-hour; omit to leave the cost out."""
    pue: float
    """Power usage effectiveness (PUE) of the data centre."""
    settings: Settings
    """Any setting by its path: {"train.floor": 0.1}."""

class CorpusOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    settings: Settings
    """Any setting by its path: {"train.floor": 0.1}."""
    overwrite: bool
    """Discard what the output already has and start over."""
    quality_reference: Sequence[str]
    """Reference text: documents unlike it are mostly dropped (GPT-3's classifier)."""
    decontaminate: Sequence[str]
    """Test sets: text that overlaps with them is removed."""
    workers: int
    """Worker processes."""
    executor: Literal["processes", "ray"]
    """Where shards are worked on: processes, or ray (a Ray cluster)."""
    part: str
    """Do only this part of the shards, as one of several cluster jobs."""
    steps: tuple[str, ...]
    """A subset of clean,filter,dedup; the options below add their own steps."""
    documents: str
    """How plain text is split into documents: blank, blanks, line, file."""
    text: str
    """Key or column of the text."""
    seed: int
    """Random seed."""
    shard: int
    """Characters of raw text that are processed together and become one shard."""
    links: str
    """Keep only pages whose url has a score of 3 or more in this table (WebText)."""
    min_score: float
    """Minimum score of a link."""
    block_domains: tuple[str, ...]
    """Exclude pages of these domains, or of the domains in a file."""
    menu_length: int
    """A longer line is not part of a menu."""
    menu_share: float
    """A short line in this share of a source's documents is boilerplate."""
    menu_documents: int
    """Documents that must have the line at least."""
    language: str
    """Keep only documents in this language: en, ko, …"""
    min_words: int
    """Minimum words of a document."""
    max_words: int
    """Maximum words of a document; 0: no limit, for whole books."""
    min_word_length: float
    """Minimum of the mean word length, in characters."""
    max_word_length: float
    """Maximum of the mean word length, in characters."""
    max_symbols: float
    """Maximum number signs and ellipses per word."""
    min_letters: float
    """Minimum share of letters in the characters that are not space."""
    max_bullets: float
    """Maximum share of the lines that begin with a bullet."""
    max_ellipses: float
    """Maximum share of the lines that end in an ellipsis."""
    max_repeated_lines: float
    """Maximum share of the characters in repeated lines; the same for paragraphs."""
    max_run: tuple[float, ...]
    """Maximum share of the characters in the most frequent 2-, 3- and 4-grams of words."""
    pareto: float
    """Shape of the Pareto draw that keeps unlikely documents (GPT-3 appendix A)."""
    examples: int
    """Good and raw documents each that train the classifier."""
    run: int
    """Words per n-gram that is compared."""
    hashes: int
    """Hashes of a document."""
    rows: int
    """Hashes per band; with 21 bands of 6, 998 of 1,000 pairs of similarity 0.8 share a band."""
    similar: float
    """Share of equal hashes from which documents count as duplicates."""
    margin: int
    """Characters around an overlap that are removed too."""
    pieces: int
    """A document cut into more pieces is dropped."""
    piece: int
    """A piece of fewer characters is dropped."""
    weights: str
    """Share of each source in the output."""
    size: int
    """Characters of the output; 0: as many as before mixing."""

class TokenizerOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"]
    """wordpiece (BERT), bpe (GPT-1), byte-bpe (GPT-2) or char."""
    vocab: int
    """Vocabulary size."""
    lowercase: bool | None
    """Lowercase the text first."""
    min_frequency: int
    """Merge only pairs that occur at least this often."""
    special: Literal["none", "mask", "pad"]
    """Extra token of a byte-bpe tokenizer: mask or padding."""
    morphemes: Literal["none", "kiwi"]
    """kiwi: split Korean words into morphemes first (pip install kiwipiepy)."""

class ServeOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    host: str
    """Address to bind; 0.0.0.0 accepts other machines."""
    port: int
    """0 picks a free port."""
    api_key: str | None
    """API key that clients must send."""
    cors: tuple[str, ...]
    """An allowed CORS origin."""
    workers: int | None
    """Processes for HTTP beside the one with the models; 0: that one does both."""
    slots: int
    """Sequences decoded at the same time."""
    queue: int
    """Requests that may queue; more are rejected with 429."""
    timeout: float
    """Timeout of one request: 300, 90s, 5m."""
    max_tokens: int
    """Maximum new tokens per request."""
    max_read_tokens: int
    """Maximum tokens a model reads for one request: texts × labels."""
    max_body: int
    """Maximum bytes of a request."""
    body_timeout: float
    """Seconds for a request body to arrive."""
    stall_timeout: float
    """Extra seconds for a client that reads slowly."""
    time_slice: float
    """Seconds of computation before another client's turn."""
    runs: Path | None
    """Folder of runs for the studio to show."""
    pairs: tuple[Path, ...]
    """Minimal pairs (BLiMP, Kontrast) for the studio; repeatable."""
    trace: bool
    """Let other machines read the training text that a text matches (/v1/trace)."""
    served_model_name: tuple[str, ...]
    """Name in the API instead of the folder's; repeatable: aliases, or one per model."""
    log_level: LogLevel
    """debug (with every request), info, warning or error."""
    device: str | None
    """cpu, cuda, cuda:1… or mps."""
    dtype: str | None
    """fp32, bf16, fp16, or int8 on a CPU."""

class StudyOptions(TypedDict, total=False):
    """Keyword options, each with its type."""

    device: str | None
    """cpu, cuda, cuda:1… or mps."""
    scale: str
    """Scale of the study: cpu, gpu-minutes, gpu-hour or paper."""
    seeds: int
    """Runs of each row, with different seeds."""
    workers: int
    """Cells to run in parallel, each in its own process."""
