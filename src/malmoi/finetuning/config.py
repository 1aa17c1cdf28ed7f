"""Fine-tuning config: a frozen record whose defaults are BERT's and GPT-1's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from malmoi.adapters import AdapterConfig
from malmoi.config import Config
from malmoi.errors import UsageError, require
from malmoi.messages import msg, plural
from malmoi.training.recipe import TrainConfig
from malmoi.training.schedule import SCHEDULES

_require = partial(require, "Invalid settings")

# Devlin et al. 2019 appendix A.3
GRID_RATES = (5e-5, 3e-5, 2e-5)
GRID_BATCHES = (16, 32)
GRID_EPOCHS = (2, 3, 4)
# Few weights trained from scratch need a higher rate than a whole network (Hu 2021 table 9,
# Lester 2021 §3.1).
ADAPTER_RATES = {"none": 5e-5, "lora": 1e-3, "prompt": 3e-2, "prefix": 1e-2}
# full fine-tuning of a GPT: Radford et al. 2018 §4.1
GPT_DEFAULTS = {"lr": 6.25e-5, "warmup": 0.002, "lm": 0.5}
# a small model on frozen features
FEATURE_DEFAULTS = {"lr": 2e-3, "batch": 16, "epochs": 10.0, "precision": "fp32"}
BUDGET_FIELDS = ("minutes", "steps", "epochs")  # the first that is set counts
POSITIVE = ("batch", "lr", "epochs", "seeds", "evaluations", "stride")
NOT_NEGATIVE = (
    "steps", "minutes", "max_minutes", "length", "lm", "decay", "clip", "patience",
    "freeze_layers", "rdrop",
)  # fmt: skip
# fields that `TrainConfig` has too
SHARED = (
    "minutes", "batch", "lr", "decay", "clip", "schedule", "warmup", "seed", "precision", "compile",
    "track",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Config):
    """All settings of `finetune` but the model, the task and the files."""

    epochs: float = 3.0
    steps: int = 0  # number of updates, instead of epochs
    minutes: float = 0.0  # time budget, instead of both
    max_minutes: float = 0.0  # ends it before its epochs or steps are over; 0: nothing does
    # a linear layer on the frozen model first; held-out rows tell which of the two is kept
    frozen_first: bool = False
    batch: int = 32
    lr: float = 5e-5  # BERT: 5e-5, 3e-5 or 2e-5; GPT: 6.25e-5
    decay: float = 0.01
    clip: float = 1.0
    schedule: str = "linear"  # linear, cosine, wsd, constant, or a plugin's
    warmup: float = 0.1  # share of the steps; GPT: 0.002
    # maximum tokens per row; 0: the context, up to 512 (BERT used 128 for pairs)
    length: int = 0
    stride: int = 128  # between the windows over a long context
    # λ of GPT-1 eq. 5: weight of the language-model loss; GPT: 0.5
    lm: float = 0.0
    freeze: bool = False  # train only the new layer
    freeze_layers: int = 0  # freeze the embeddings and the first n layers
    # a small model on frozen layers: last4, weighted-all… or layers=8,9 (see frozen_features.py)
    features: str = ""
    recurrent: int = 768  # width of a tagger's BiLSTM on features
    tune_features: bool = False  # train the layers below too (BERT table 5: + BiLSTM)
    # trained while the model itself is frozen
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    # train label words instead of a new layer; None: with a soft prompt, if possible
    words: bool | None = None
    # contrast sentence vectors, then fit a logistic layer; None: with few rows and a sentence
    # encoder (see few_labels.py)
    contrastive: bool | None = None
    # label words after a prompt, calibrated on the rows and not trained; None: with few rows and a
    # language model, if that is better than a new layer (see label_prompts.py)
    prompt: bool | None = None
    layer_decay: float = 1.0  # each layer's learning rate relative to the layer above
    # of the pre-trained layers, only the first n are kept (GPT-1 fig. 2); None: all
    layers_transferred: int | None = None
    # weight of the divergence of two passes with different dropout (R-Drop, Liang et al. 2021)
    rdrop: float = 0.0
    class_weights: bool | None = None  # weight rare labels more; None: if labels are imbalanced
    label_thresholds: bool = False  # multi-label: one threshold per label, not one for all
    from_scratch: bool = False  # random initial weights, as a baseline for pre-training
    # share of the rows that is held out to select by and, without a file for it, to judge by;
    # 0: a tenth, or none where nothing is selected (see protocol.py)
    holdout: float = 0.0
    metric: str = ""  # the metric that selects and is reported first; empty: the task's
    evaluations: int = 1  # per epoch, on the held-out rows
    # stop after this many evaluations without improvement and keep the best epoch; 0: the last
    patience: int = 0
    average: float = 0.0  # share of the run, at its end, whose weights are averaged
    seed: int = 0
    seeds: int = 1  # number of runs; the first is kept
    init_seed: int | None = None  # of the new layer's weights; None: the seed
    best: bool = False  # spend the minutes on trials of settings (see search.py)
    grid: bool = False  # the paper's rates, batch sizes and epochs; held-out rows select the best
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    skip_bad: bool = False
    track: tuple[str, ...] = ()  # tensorboard, wandb, mlflow, trackio: where metrics go too

    def __post_init__(self) -> None:
        super().__post_init__()
        SCHEDULES.find(self.schedule)
        for name in POSITIVE:
            value = getattr(self, name)
            _require(value > 0, "{name} must be positive, not {value}.", name=name, value=value)
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            _require(
                value >= 0, "{name} must not be negative, but is {value}.", name=name, value=value
            )
        for name in ("holdout", "average", "warmup"):
            value = getattr(self, name)
            _require(
                0 <= value < 1, "{name} must lie in [0, 1), not {value}.", name=name, value=value
            )
        decay = self.layer_decay
        _require(0 < decay <= 1, "layer_decay must lie in (0, 1], not {decay}.", decay=decay)

    @property
    def trains_all(self) -> bool:
        """Whether the whole network is fine-tuned for the task at once."""
        partly = self.features or self.words or self.freeze or self.contrastive or self.prompt
        return not partly and self.adapter.kind == "none"

    def training(self, steps: int) -> TrainConfig:
        """The equivalent `TrainConfig`."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in SHARED}
        # saved by the clock alone, evaluated by the trainer
        own: dict[str, Any] = dict(ema=self.average, warmup_steps=0, save_every=0, keep=1)
        return TrainConfig(steps=0 if self.minutes else steps, **own, **shared)

    def describe_budget(self) -> str:
        """3 epochs, 100 steps or 5 minutes; and at most how many minutes."""
        unit = next(name for name in BUDGET_FIELDS if getattr(self, name))
        budget = plural(getattr(self, unit), unit.removesuffix("s"))
        most = plural(self.max_minutes, "minute")
        return (
            msg("{budget}, at most {most}", budget=budget, most=most)
            if self.max_minutes
            else budget
        )

    def variants(self) -> list["FinetuneConfig"]:
        """The configs of all runs: one, one per seed, or the paper's grid."""
        alone = replace(self, seeds=1, grid=False)
        if self.grid:
            return [
                replace(alone, lr=lr, batch=b, epochs=e)
                for lr, b, e in product(GRID_RATES, GRID_BATCHES, GRID_EPOCHS)
            ]
        return [replace(alone, seed=self.seed + i) for i in range(self.seeds)]


def finetune_config(
    overrides: Mapping[str, Any], *, gpt: bool = False, defaults: Mapping[str, Any] | None = None
) -> FinetuneConfig:
    """A config from the kind's, GPT-1's or BERT's defaults and overrides; None is ignored."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(given.get("adapter"), str):
        given["adapter.kind"] = given.pop("adapter")
    partly = ("features", "adapter.kind", "words", "freeze")  # not full fine-tuning
    whole = gpt and not any(given.get(name) for name in partly)
    usual: Mapping[str, Any] = GPT_DEFAULTS if whole else {}
    usual = FEATURE_DEFAULTS if given.get("features") else usual
    settings = FinetuneConfig().override({**usual, **(defaults or {}), **given})
    if "lr" not in given and settings.adapter.kind != "none":
        settings = replace(settings, lr=ADAPTER_RATES[settings.adapter.kind])
    if settings.adapter.kind != "none" and (settings.features or settings.from_scratch):
        raise UsageError(
            "An adapter extends a pre-trained model: it cannot be combined with features or "
            "from_scratch."
        )
    if settings.features and (settings.lm or settings.grid):
        raise UsageError(
            "features cannot be combined with lm or grid: both fine-tune the whole model."
        )
    if settings.best and not settings.minutes:
        raise UsageError("best needs a time budget: --best --minutes 10 (best=True, minutes=10).")
    if settings.best and (not settings.trains_all or settings.grid or settings.seeds > 1):
        raise UsageError(
            "best searches settings of full fine-tuning: it cannot be combined with grid, seeds, "
            "features, adapter, words, freeze or contrastive."
        )
    if settings.grid and settings.seeds > 1:
        raise UsageError(
            "Use the grid or several seeds, not both: search the grid first, then repeat its "
            "best with seeds."
        )
    return settings
