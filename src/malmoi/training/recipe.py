"""A run as one frozen record: model, objective, tokenizer, data and training settings."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, explained, require
from malmoi.settings import Config, option, require_bounds, setting
from malmoi.system.plugins import Registry, require_plugins
from malmoi.system.run_folder import RunFolder
from malmoi.system.untrusted import read_object

BUDGETS = ("minutes", "tokens", "epochs", "steps")  # fields of TrainConfig, one of them set
_require = partial(require, "Invalid recipe")

# objective → the one of ours whose samples it learns from; `malmoi.register_objective` adds to it
OURS = ("lm", "bilm", "both", "mlm", "mlm+nsp", "mlm+sop", "mlm+rtd", "electra", "translation")
OBJECTIVE_SAMPLES: Registry[str] = Registry("objective", {name: name for name in OURS})


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"] = setting(
        "byte-bpe", "How words are split."
    )
    vocab: int = setting(50_257, "Tokens of the vocabulary that is learnt.")
    lowercase: bool = setting(False, "Lower-case the text.")
    morphemes: Literal["none", "kiwi"] = setting(
        "none", "What cuts Korean words before the vocabulary."
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """How text becomes samples."""

    lengths: tuple[int, ...] = setting((), "Tokens of a sample in each phase; none: the context.")
    shares: tuple[float, ...] = setting((), "Share of the budget per phase (BERT: 0.9, 0.1).")
    weights: tuple[float, ...] = setting((), "Share of each source in the mixture; none: by size.")
    valid: float = setting(0.01, "Share of the documents held out for validation.", ge=0, lt=1)
    fraction: float = setting(
        1.0, "Share of the training text to encode, drawn evenly.", gt=0, le=1
    )
    documents: Literal["auto", "blank", "blanks", "line", "file"] = setting(
        "auto", "What separates documents in plain text."
    )
    text: str = setting("text", "Column or key that holds the text.")
    pairs: bool = setting(False, "Translations: files aligned by line, or tables of two columns.")
    source: str = setting("source", "Of a table of translations, the column to translate from.")
    target: str = setting("target", "Of a table of translations, the column to translate to.")
    features: str = setting("", "A .npy file with vectors for each line of the text, before it.")
    together: float = setting(0.5, "Share of an MLM's rows with both sides of a pair.", ge=0, le=1)
    sentences: Literal["rules", "kiwi"] = setting("rules", "What splits text into sentences.")
    document_mask: bool = setting(False, "Packed documents do not see one another.")
    shuffle: Literal["windows", "documents"] = setting(
        "windows", "What an epoch reorders: windows of the text, or whole documents."
    )
    short: float = setting(0.1, "Share of pairs that are shortened on purpose.")
    causal_share: float = setting(0.7, "Share of the rows of `both` that are causal.", gt=0, lt=1)
    masked_length: int = setting(
        0, "Tokens of its masked rows; 0: as many as of the causal ones.", ge=0
    )
    mask_rate: float = setting(0.15, "Share of the tokens that are predicted (MLM).", gt=0, lt=1)
    mask_token: float = setting(0.8, "Share of the chosen tokens that become [MASK].", ge=0, le=1)
    mask_random: float = setting(
        0.1, "Share that becomes a random token; the rest stays.", ge=0, le=1
    )
    own_masks: float = setting(
        0.5,
        "Share of the masks that mlm+rtd fills itself; its generator fills the others.",
        gt=0,
        lt=1,
    )
    whole_word: bool = setting(False, "Mask all tokens of a word together.")
    packed: bool | None = setting(None, "BERT without padding.", shown="if this device benefits")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Optimisation, budget and checkpointing."""

    steps: int = option(0, "Budget in steps.", ge=0)
    tokens: int = option(0, "Budget in tokens.", ge=0)
    epochs: float = option(0.0, "Budget in epochs of the text.", ge=0)
    minutes: float = option(0.0, "Budget as a time: 3, 90s, 2h.", ge=0, unit="minutes")
    stretch: float = setting(
        1.0, "How many times as long the minutes may take beside other programs.", ge=1
    )
    max_epochs: float = setting(0.0, "The minutes end after this many epochs; 0: never.", ge=0)
    batch: int = setting(32, "Sequences per step over all processes.", gt=0)
    fit_batch: bool = setting(False, "Shrink the batch if the minutes allow too few updates.")
    batch_start: int = setting(0, "The batch grows from this size.")
    batch_ramp: float = setting(0.0, "Share of the budget over which the batch grows.")
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon for weight matrices, AdamW for the rest."
    )
    lr: float = setting(1e-4, "Peak learning rate.", gt=0)
    muon_lr: float = setting(0.02, "Muon's learning rate, for matrices; `lr` is for the rest.")
    betas: tuple[float, ...] = setting((0.9, 0.999), "Adam's β1 and β2.")
    eps: float = setting(1e-8, "Adam's ε.")
    decay: float = setting(0.01, "Weight decay; not for biases and norms.")
    muon_decay: float | None = setting(None, "Weight decay of Muon's matrices.", shown="as decay")
    cautious_decay: bool = setting(False, "Muon decays only where the update shrinks a weight too.")
    clip: float = setting(1.0, "Maximum gradient norm; 0: off.")
    label_smoothing: float = setting(
        0.0, "Share of the next token's probability spread over all tokens.", ge=0, lt=1
    )
    schedule: str = setting("linear", "linear, cosine, wsd, constant, inverse_sqrt, or a plugin's.")
    warmup: float = setting(0.01, "Warm-up, as a share of the budget.")
    warmup_steps: int = setting(100, "Warm-up of at least this many steps.")
    floor: float = setting(0.0, "Final learning rate as a share of its peak.", ge=0, le=1)
    decay_until: float = setting(
        1.0, "Share of the budget at which the floor is reached.", gt=0, le=1
    )
    cooldown: float = setting(0.4, "Share of the budget over which wsd decays.", gt=0, le=1)
    ema: float = setting(
        0.0, "Average the weights over this last share of the budget; 0: off.", ge=0, le=1
    )
    own_teacher: float = setting(
        0.0, "Weight of learning from the mean of the own last weights; 0: off.", ge=0
    )
    seed: int = option(0, "Random seed.", shown="0")
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "auto: bf16 if the device computes in it."
    )
    compile: bool | None = setting(None, "torch.compile.", shown="if it is faster")
    micro: int = setting(0, "Sequences in one pass; 0: as many as fit.", ge=0)
    gradient_checkpointing: bool = setting(False, "Recompute activations to save memory.")
    checkpointing_keeps: Literal["inputs", "products"] = setting(
        "inputs", "What gradient checkpointing keeps of a layer: its input, or its products too."
    )
    save_every: int = setting(1000, "Steps between saved states.", gt=0)
    keep: int = setting(2, "Saved states that are kept, besides the best.", gt=0)
    snapshots: bool = setting(False, "Also a model folder after steps 1, 2, 3, 4, 6, 8, 11, 16…")
    valid_every: int = setting(500, "Steps between validations.")
    valid_batches: int = setting(16, "Batches per validation.")
    log_every: int = setting(10, "Steps between rows of metrics.jsonl.", gt=0)
    prompt: str = setting("", "Prompt of validation's sample; empty: by the objective.")
    parallel: Literal["ddp", "fsdp", "hybrid"] = setting(
        "ddp", "How processes share a run: copies, shards, or shards in each machine."
    )
    tensor: int = setting(1, "Processes that compute each layer together.", ge=1)
    tensorboard: bool = setting(False, "Also write TensorBoard events.")
    track: tuple[str, ...] = option(
        (),
        "Also log the run to tensorboard, wandb, mlflow or trackio; repeatable.",
        metavar="NAME",
        accepts="str | Sequence[str]",
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        return (*self.track, *(("tensorboard",) if self.tensorboard else ()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule != INVERSE_SQRT:
            SCHEDULES.find(self.schedule)


# ------------------------------------------------------------------ the learning rate

# share of the expected updates: 45 steps with a warm-up of 100 would never reach half their rate
MOST_WARMUP = 0.1
INVERSE_SQRT = "inverse_sqrt"  # the one schedule without an end: by steps, not by progress


# (progress after the warm-up in [0, 1], settings) → [floor, 1]
Schedule = Callable[[float, TrainConfig], float]


def linear_decay(progress: float, c: TrainConfig) -> float:
    """BERT and GPT-1's fine-tuning: linear decay."""
    return 1 - (1 - c.floor) * progress


def cosine_decay(progress: float, c: TrainConfig) -> float:
    """GPT-1 §4.1, GPT-3 appendix B: half a cosine down to the floor."""
    return c.floor + (1 - c.floor) * (1 + math.cos(math.pi * progress)) / 2


def wsd(progress: float, c: TrainConfig) -> float:
    """Warm-up, stable, decay: flat, then straight down in the last `cooldown` of the budget."""
    return 1 - (1 - c.floor) * max(0.0, 1 - (1 - progress) / c.cooldown)


SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    {"linear": linear_decay, "cosine": cosine_decay, "wsd": wsd, "constant": lambda *_: 1.0},
)


def warmup_steps(c: TrainConfig, expected: int) -> float:
    """Warm-up steps: the recipe's, but at most a tenth of the expected updates."""
    return min(c.warmup_steps, max(1.0, MOST_WARMUP * expected)) if expected else c.warmup_steps


def rate_at(step: int, progress: float, c: TrainConfig, expected: int = 0) -> float:
    """The learning rate's share of its peak at this step: warm-up, then the schedule.

    `expected` updates fit into the budget (0: not known). If that estimate was too high, the used
    share of the budget ends the warm-up instead of the count of steps.
    """
    steps = warmup_steps(c, expected)
    if c.schedule == INVERSE_SQRT:  # by steps alone: it has no end
        # post-norm does not bear the whole rate after a warm-up that a small budget shortened
        peak = math.sqrt(steps / c.warmup_steps) if c.warmup_steps else 1.0
        steps = max(1.0, steps)
        # Vaswani et al. 2017 eq. 3, as a share of its peak, which is reached after the warm-up
        return peak * min((step + 1) / steps, math.sqrt(steps / (step + 1)))
    share = steps / expected if expected else 0.0
    warm = min(
        1.0,
        max((step + 1) / steps, progress / share if share else 0.0) if steps else 1.0,
        (progress + 1e-9) / c.warmup if c.warmup else 1.0,
    )
    start = max(c.warmup, share)
    after = max(0.0, progress - start) / max(1e-9, c.decay_until - start)
    return max(warm, 1e-3) * SCHEDULES[c.schedule](min(1.0, after), c)


# ------------------------------------------------------------------ a whole run


@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """Everything `pretrain` needs but the text; a run's recipe.json is one.

    Examples:
        >>> from pathlib import Path
        >>> recipe = malmoi.Recipe.from_json(Path("runs/tiny-gpt/recipe.json").read_text())
        >>> recipe.override({"train.lr": 1e-3}).train.lr
        0.001
    """

    name: str
    about: str = ""
    model: ModelConfig
    objective: str = setting(
        "lm",
        "What is learnt: lm, bilm, both, mlm, mlm+nsp, mlm+sop, mlm+rtd, electra, translation, or "
        "a plugin's.",
    )
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plugins: tuple[str, ...] = ()  # where its objective, schedule and patterns are registered

    def __post_init__(self) -> None:
        super().__post_init__()
        OBJECTIVE_SAMPLES.find(self.objective)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        require_plugins(values.get("plugins", ()))
        return super().from_dict(values)

    @property
    def samples(self) -> str:
        """The objective of ours whose samples this recipe's objective learns from."""
        return OBJECTIVE_SAMPLES[self.objective]

    @property
    def causal(self) -> bool:
        """Whether next tokens are predicted, so that samples are windows of the text."""
        return self.samples in ("lm", "bilm", "both")

    @property
    def phases(self) -> tuple[tuple[int, float], ...]:
        """(tokens of a sample, share of the budget) of each phase."""
        lengths = self.data.lengths or (self.model.context,)
        return tuple(zip(lengths, self.data.shares or (1.0,), strict=True))

    @property
    def mean_length(self) -> float:
        """Tokens of a sample, averaged over the budget."""
        return sum(length * share for length, share in self.phases)

    def check(self) -> "Recipe":
        """Returns the recipe itself if its parts fit together, otherwise raises."""
        self._check_phases()
        budgets = [n for n in BUDGETS if getattr(self.train, n)]
        _require(
            len(budgets) <= 1, "give one budget, not {budgets}.", budgets=" and ".join(budgets)
        )
        _require(
            budgets,
            "give a budget above 0: train.minutes, train.tokens, train.epochs or train.steps.",
        )
        require_bounds(self, "Invalid recipe")
        self._check_objective()
        self._check_masking()
        self._check_pairs()
        self._check_memory()
        return self

    def _check_phases(self) -> None:
        lengths = self.data.lengths or (self.model.context,)
        shares = self.data.shares or (1.0,)
        _require(
            len(lengths) == len(shares),
            "data.lengths has {lengths} phases and data.shares {shares}: give both or none.",
            lengths=len(lengths),
            shares=len(shares),
        )
        total = sum(shares)
        _require(
            abs(total - 1) < 1e-6, "data.shares must add up to 1, not {shares:g}.", shares=total
        )
        _require(
            max(lengths) <= self.model.context,
            "data.lengths has {longest} tokens, more than the model's context of {context}; "
            "data.lengths=[] uses the context.",
            longest=max(lengths),
            context=self.model.context,
        )

    def _check_objective(self) -> None:
        m = self.model
        _require(
            bool(m.encoder_depth) == (self.samples == "translation"),
            "the objective translation and an encoder (model.encoder_depth) belong together.",
        )
        _require(
            m.both_ways == (self.samples == "both"),
            "the objective both and model.both_ways=true belong together.",
        )
        _require(
            (m.mixer == "bilstm") == (self.objective == "bilm"),
            "the objective bilm and model.mixer=bilstm belong together.",
        )
        _require(
            m.mixer == "attention" or not self.data.document_mask,
            "a recurrent model reads a row from end to end: set data.document_mask=false.",
        )
        _require(
            not self.train.own_teacher or (self.objective == "lm" and not m.memory),
            "a model teaches itself (train.own_teacher) with the objective lm and without a "
            "memory.",
        )
        seen = self.objective in ("lm", "both") and any("causal" not in p for p in m.attention)
        _require(
            not seen,
            "tokens that see later ones cannot learn to predict them ({attention}).",
            attention=m.attention,
        )

    def _check_masking(self) -> None:
        d = self.data
        _require(
            all(length % (d.masked_length or length) == 0 for length, _ in self.phases),
            "data.masked_length={length} does not divide the {row} tokens of a row.",
            length=d.masked_length,
            row=max(length for length, _ in self.phases),
        )
        _require(
            d.mask_token + d.mask_random <= 1,
            "data.mask_token={token} and data.mask_random={random} are more than 1 together.",
            token=d.mask_token,
            random=d.mask_random,
        )

    def _check_pairs(self) -> None:
        """Translations, or texts of two languages."""
        name = self.objective
        _require(
            self.data.pairs or name != "translation",
            "the objective translation learns from pairs: set data.pairs=true.",
        )
        _require(
            not self.data.pairs or name in ("translation", "mlm"),
            "pairs are for the objectives translation and mlm, not {objective}.",
            objective=name,
        )
        _require(
            not self.data.pairs or name == "translation" or self.model.segments == 2,
            "an MLM of pairs has an embedding for each language: set model.segments=2.",
        )

    def _check_memory(self) -> None:
        """A memory of earlier segments (Transformer-XL)."""
        if not self.model.memory:
            return
        _require(
            self.objective == "lm" and len(self.data.weights) < 2 and len(self.phases) == 1,
            "a memory of earlier segments needs the objective lm and one text in one phase.",
        )
        _require(
            not (self.train.batch_start or self.train.fit_batch or self.data.document_mask),
            "a memory needs batches of the same rows: leave train.batch_start, train.fit_batch and "
            "data.document_mask out.",
        )


def pretraining_folder(out: Path) -> RunFolder:
    """A pre-training run's record; fields missing in an older recipe.json get their defaults."""
    return RunFolder(
        out,
        "recipe.json",
        "pre-training run",
        can_restart=True,
        parse=lambda found: Recipe.from_dict(found).to_dict(),
    )


def read_recipe(path: Path) -> Recipe:
    with explained(MalmoiError, "{path} is not a valid recipe: {error}", path=path):
        return Recipe.from_dict(read_object(path))
