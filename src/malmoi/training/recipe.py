"""A run as one frozen record: model, objective, tokenizer, data and training settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from malmoi.config import Config, ModelConfig
from malmoi.errors import MalmoiError, require
from malmoi.system.plugins import Registry, require_plugins
from malmoi.system.run_folder import RunFolder
from malmoi.system.untrusted import read_object
from malmoi.training.schedule import INVERSE_SQRT, SCHEDULES

BUDGETS = ("minutes", "tokens", "epochs", "steps")  # fields of TrainConfig, one of them set
_require = partial(require, "Invalid recipe")

# objective → the one of ours whose samples it learns from; `malmoi.register_objective` adds to it
OURS = ("lm", "bilm", "both", "mlm", "mlm+nsp", "mlm+sop", "electra", "translation", "span")
OBJECTIVE_SAMPLES: Registry[str] = Registry("objective", {name: name for name in OURS})


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    kind: Literal["wordpiece", "bpe", "byte-bpe", "char"] = "byte-bpe"  # how words are split
    vocab: int = 50_257  # tokens to learn
    lowercase: bool = False  # lower-case the text
    morphemes: Literal["none", "kiwi"] = "none"  # what cuts Korean words before the vocabulary


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """How text becomes samples."""

    lengths: tuple[int, ...] = ()  # tokens per sample in each phase; none: the model's context
    shares: tuple[float, ...] = ()  # share of the budget per phase (BERT: 0.9 at 128, 0.1 at 512)
    weights: tuple[float, ...] = ()  # share of each source in the mixture; none: by size
    valid: float = 0.01  # share of the documents held out for validation
    fraction: float = 1.0  # of the training text that is encoded, drawn evenly; 1: all of it
    # what separates documents in plain text
    documents: Literal["auto", "blank", "blanks", "line", "file"] = "auto"
    text: str = "text"  # the column or key that holds the text
    # the text is translations: files two by two, aligned by line, or tables of two columns
    pairs: bool = False
    source: str = "source"  # of a table of translations: the column or key to translate from, …
    target: str = "target"  # … and to
    features: str = ""  # a .npy file with vectors for each line of the text, before it
    together: float = 0.5  # share of an MLM's rows that are both sides of a pair (XLM's TLM)
    sentences: Literal["rules", "kiwi"] = "rules"  # what splits text into sentences
    document_mask: bool = False  # packed documents do not see one another
    # what an epoch reorders: windows of the text, or its documents before they are cut into windows
    shuffle: Literal["windows", "documents"] = "windows"
    short: float = 0.1  # share of pairs that are shortened on purpose
    # rows that the objective `both` trains causally; the others are masked (docs/lab.md)
    causal_share: float = 0.7
    masked_length: int = 0  # tokens of their masked rows; none: as many as of the causal ones
    mask_rate: float = 0.15  # share of the tokens that are predicted (MLM)
    mask_token: float = 0.8  # share of the chosen tokens that become [MASK]
    mask_random: float = 0.1  # share that becomes a random token; the rest is kept
    whole_word: bool = False  # mask all tokens of a word together
    packed: bool | None = None  # BERT without padding; none: if this device benefits


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Optimisation, budget and checkpointing."""

    steps: int = 0  # the budget: one of steps, tokens, epochs, minutes
    tokens: int = 0  # the budget in tokens
    epochs: float = 0.0  # the budget in epochs of the text
    minutes: float = 0.0  # the budget in minutes …
    stretch: float = 1.0  # … which may take this many times as long beside other programs
    max_epochs: float = 0.0  # … which ends when the text was read this often; 0: never
    batch: int = 32  # sequences per step over all processes
    fit_batch: bool = False  # shrink the batch if the minutes allow too few updates
    batch_start: int = 0  # the batch grows from here …
    batch_ramp: float = 0.0  # … over this share of the budget
    # muon: Muon for weight matrices, AdamW for the rest
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-4  # peak learning rate
    muon_lr: float = 0.02  # Muon's learning rate, for weight matrices; `lr` is for the rest
    betas: tuple[float, ...] = (0.9, 0.999)  # of Adam
    eps: float = 1e-8  # of Adam
    decay: float = 0.01  # weight decay; not for biases and norms
    muon_decay: float | None = None  # weight decay of Muon's matrices; none: as `decay`
    # apply Muon's decay only where the update shrinks the weight too (Chen et al. 2025)
    cautious_decay: bool = False
    clip: float = 1.0  # 0: off
    label_smoothing: float = 0.0  # share of the next token's probability spread over all tokens
    schedule: str = "linear"  # linear, cosine, wsd, constant, inverse_sqrt, or a plugin's
    warmup: float = 0.01  # share of the budget
    warmup_steps: int = 100  # at least this many steps
    floor: float = 0.0  # final learning rate as a share of its peak
    decay_until: float = 1.0  # share of the budget at which the floor is reached
    cooldown: float = 0.4  # share of the budget over which wsd decays
    ema: float = 0.0  # average the weights over this last share of the budget; 0: off
    seed: int = 0  # of weights, order and masks
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 if the device computes in it
    compile: bool | None = None  # none: if it is faster
    micro: int = 0  # sequences in one pass; 0: as many as fit
    gradient_checkpointing: bool = False  # recompute activations to save memory
    save_every: int = 1000  # steps between saved states
    keep: int = 2  # saved states that are kept, besides the best
    snapshots: bool = False  # also a model folder after steps 1, 2, 3, 4, 6, 8, 11, 16… (√2 apart)
    valid_every: int = 500  # steps between validations
    valid_batches: int = 16  # batches per validation
    log_every: int = 10  # steps between rows of metrics.jsonl
    # prompt of the sample at each validation; empty: one for the objective
    prompt: str = ""
    parallel: Literal["ddp", "fsdp"] = "ddp"  # how processes share a run
    tensorboard: bool = False  # also write TensorBoard events
    track: tuple[str, ...] = ()  # tensorboard, wandb, mlflow, trackio: where metrics go too

    @property
    def trackers(self) -> tuple[str, ...]:
        return (*self.track, *(("tensorboard",) if self.tensorboard else ()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule != INVERSE_SQRT:
            SCHEDULES.find(self.schedule)


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
    # lm, bilm, both, mlm, mlm+nsp, mlm+sop, electra, translation, span, or a plugin's
    objective: str = "lm"
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
    def in_windows(self) -> bool:
        """Whether samples are windows of the text, across its sentences."""
        return self.causal or self.samples == "span"

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
        self._check_budget()
        self._check_shares()
        self._check_objective()
        self._check_pairs()
        self._check_memory()
        return self

    def _check_phases(self) -> None:
        lengths = self.data.lengths or (self.model.context,)
        shares = self.data.shares or (1.0,)
        _require(
            len(lengths) == len(shares),
            "data.lengths has {lengths} phases and data.shares {shares}; give both, or "
            "neither ([] and []).",
            lengths=len(lengths),
            shares=len(shares),
        )
        _require(
            abs(sum(shares) - 1) < 1e-6,
            "data.shares must add up to 1, not {shares:g}.",
            shares=sum(shares),
        )
        _require(
            max(lengths) <= self.model.context,
            "data.lengths needs {lengths} tokens, more than the model's context of {context}; "
            "data.lengths=[] and data.shares=[] use the context.",
            lengths=max(lengths),
            context=self.model.context,
        )

    def _check_budget(self) -> None:
        budgets = [n for n in BUDGETS if getattr(self.train, n)]
        _require(
            len(budgets) <= 1, "give one budget, not {budgets}.", budgets=" and ".join(budgets)
        )
        _require(
            bool(budgets),
            "give a budget above 0: train.minutes, train.tokens, train.epochs or train.steps.",
        )
        _require(
            self.train.stretch >= 1,
            "train.stretch must be 1 or more, not {stretch:g}.",
            stretch=self.train.stretch,
        )
        _require(
            self.train.max_epochs >= 0,
            "train.max_epochs must be 0 or more, not {most:g}.",
            most=self.train.max_epochs,
        )
        for name in (*budgets, "batch", "lr", "save_every", "log_every", "keep"):
            _require(
                getattr(self.train, name) > 0,
                "train.{name} must be positive, not {value}.",
                name=name,
                value=getattr(self.train, name),
            )

    def _check_shares(self) -> None:
        _require(
            0 < self.data.fraction <= 1,
            "data.fraction is above 0 and at most 1, not {fraction:g}.",
            fraction=self.data.fraction,
        )
        _require(
            0 <= self.data.together <= 1,
            "data.together lies between 0 and 1, not {together:g}.",
            together=self.data.together,
        )
        _require(
            0 <= self.train.label_smoothing < 1,
            "train.label_smoothing lies between 0 and 1, not {smoothing:g}.",
            smoothing=self.train.label_smoothing,
        )
        for name, low in (("ema", 0.0), ("cooldown", 1e-9), ("decay_until", 1e-9), ("floor", 0.0)):
            value = getattr(self.train, name)
            _require(
                low <= value <= 1,
                "train.{name} is a share of the run: from {low:.0f} to 1, not {value:g}.",
                name=name,
                low=low,
                value=value,
            )
        _require(
            0 < self.data.causal_share < 1,
            "data.causal_share lies between 0 and 1, not {share:g}.",
            share=self.data.causal_share,
        )

    def _check_objective(self) -> None:
        _require(
            bool(self.model.encoder_depth) == (self.samples in ("translation", "span")),
            "the objectives translation and span, and an encoder (model.encoder_depth), belong "
            "together.",
        )
        _require(
            self.data.masked_length >= 0,
            "data.masked_length must be 0 or more, not {length}.",
            length=self.data.masked_length,
        )
        _require(
            all(length % (self.data.masked_length or length) == 0 for length, _ in self.phases),
            "data.masked_length={length} does not divide the {phases} tokens of a row.",
            length=self.data.masked_length,
            phases=max(length for length, _ in self.phases),
        )
        _require(
            self.model.both_ways == (self.samples == "both"),
            "the objective both and model.both_ways=true belong together.",
        )
        _require(
            (self.model.mixer == "bilstm") == (self.objective == "bilm"),
            "the objective bilm and model.mixer=bilstm belong together.",
        )
        _require(
            self.model.mixer == "attention" or not self.data.document_mask,
            "a recurrent model reads a row from end to end: set data.document_mask=false.",
        )
        _require(
            self.objective not in ("lm", "both")
            or all("causal" in pattern for pattern in self.model.attention),
            "a model whose tokens see later ones cannot learn to predict them (attention "
            "{attention}).",
            attention=self.model.attention,
        )

    def _check_pairs(self) -> None:
        """Translations, or texts of two languages."""
        if not self.data.pairs:
            _require(
                self.objective != "translation",
                "the objective translation learns from pairs: set data.pairs=true.",
            )
            return
        _require(
            self.objective in ("translation", "mlm"),
            "pairs are for the objectives translation and mlm, not {objective}.",
            objective=self.objective,
        )
        _require(
            self.objective == "translation" or self.model.segments == 2,
            "a masked language model of pairs has an embedding for each language: "
            "model.segments=2.",
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
            "with a memory every batch has the same rows and documents follow one another: leave "
            "train.batch_start, train.fit_batch and data.document_mask out.",
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
    try:
        return Recipe.from_dict(read_object(path))
    except MalmoiError as error:
        raise MalmoiError(
            "{path} is not a valid recipe: {error}", path=path, error=error
        ) from error
