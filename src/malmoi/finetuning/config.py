"""How a model is fine-tuned: one frozen record; BERT's and GPT-1's own numbers are its defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from malmoi.adapters import AdapterConfig
from malmoi.config import Config
from malmoi.errors import UsageError, require
from malmoi.training.recipe import TrainConfig

_require = partial(require, "These settings do not fit together")

# Devlin et al. 2019 appendix A.3
GRID_RATES = (5e-5, 3e-5, 2e-5)
GRID_BATCHES = (16, 32)
GRID_EPOCHS = (2, 3, 4)
# What learns few weights from nothing wants a higher rate than a whole network (Hu 2021 table 9,
# Lester 2021 §3.1).
ADAPTER_RATES = {"none": 5e-5, "lora": 1e-3, "prompt": 3e-2, "prefix": 1e-2}
# a whole GPT: Radford et al. 2018 §4.1
GPT_DEFAULTS = {"lr": 6.25e-5, "warmup": 0.002, "lm": 0.5}
# a small model on frozen layers
FEATURE_DEFAULTS = {"lr": 2e-3, "batch": 16, "epochs": 10.0, "precision": "fp32"}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Config):
    """Everything `finetune` needs but the model, the task and the files."""

    epochs: float = 3.0
    steps: int = 0  # a number of updates in place of the epochs
    minutes: float = 0.0  # a budget of time in place of both
    batch: int = 32
    lr: float = 5e-5  # BERT: 5e-5, 3e-5 or 2e-5; of a GPT 6.25e-5
    decay: float = 0.01
    clip: float = 1.0
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: float = 0.1  # share of the steps; of a GPT 0.002
    # the most tokens of a row; 0: the context, 512 at most (128 at most for pairs would be BERT's)
    length: int = 0
    stride: int = 128  # by which windows over a long context move on
    # λ of GPT-1 eq. 5: the language model is trained beside the task; of a GPT 0.5
    lm: float = 0.0
    freeze: bool = False  # only the new layer learns
    freeze_layers: int = 0  # the embeddings and the first n layers do not learn
    # a small model on frozen layers: last4, weighted-all… or layers=8,9 (see tune/features.py)
    features: str = ""
    recurrent: int = 768  # width of a tagger's BiLSTM on features
    # what is learnt beside a model that stays as it is
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    # label words are learnt, not a new layer; none: after a soft prompt, where that can be
    words: bool | None = None
    layer_decay: float = 1.0  # each layer's rate is this share of the next one's
    class_weights: bool = False  # rare labels count more
    label_thresholds: bool = False  # multi-label: a threshold for each label, not one for all
    from_scratch: bool = False  # new weights for the whole network, to compare with pre-training
    holdout: float = 0.1  # of the training examples, where there is no development file
    evaluations: int = 1  # in an epoch
    patience: int = 0  # stop after this many evaluations without improvement; 0: never
    seed: int = 0
    seeds: int = 1  # runs; the median one is kept
    grid: bool = False  # all of the paper's rates, batches and epochs; the best is kept
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    skip_bad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch", "lr", "epochs", "seeds", "evaluations", "stride"):
            _require(
                getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}."
            )
        for name in (
            "steps",
            "minutes",
            "length",
            "lm",
            "decay",
            "clip",
            "patience",
            "freeze_layers",
        ):
            _require(
                getattr(self, name) >= 0,
                f"{name} must not be negative, but is {getattr(self, name)}.",
            )
        _require(0 < self.holdout < 1, f"holdout must lie between 0 and 1, not {self.holdout}.")
        _require(0 <= self.warmup < 1, f"warmup must lie in [0, 1), not {self.warmup}.")
        _require(
            0 < self.layer_decay <= 1, f"layer_decay must lie in (0, 1], not {self.layer_decay}."
        )

    def training(self, steps: int) -> TrainConfig:
        """The same as the parts of training take it."""
        return TrainConfig(
            steps=0 if self.minutes else steps,
            minutes=self.minutes,
            batch=self.batch,
            lr=self.lr,
            decay=self.decay,
            clip=self.clip,
            schedule=self.schedule,
            warmup=self.warmup,
            warmup_steps=1,
            seed=self.seed,
            precision=self.precision,
            compile=self.compile,
        )

    def variants(self) -> list["FinetuneConfig"]:
        """The runs that are asked for: one, one for each seed, or the paper's grid."""
        alone = replace(self, seeds=1, grid=False)
        if self.grid:
            return [
                replace(alone, lr=lr, batch=b, epochs=e)
                for lr, b, e in product(GRID_RATES, GRID_BATCHES, GRID_EPOCHS)
            ]
        return [replace(alone, seed=self.seed + i) for i in range(self.seeds)]


def finetune_config(overrides: Mapping[str, Any], *, gpt: bool = False) -> FinetuneConfig:
    """The defaults, GPT-1's or BERT's, with some fields changed; None leaves a field as it is."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(given.get("adapter"), str):
        given["adapter.kind"] = given.pop("adapter")
    partly = ("features", "adapter.kind", "words", "freeze")  # not the whole network learns
    defaults = GPT_DEFAULTS if gpt and not any(given.get(name) for name in partly) else {}
    settings = FinetuneConfig().override(
        {**(FEATURE_DEFAULTS if given.get("features") else defaults), **given}
    )
    if "lr" not in given and settings.adapter.kind != "none":
        settings = replace(settings, lr=ADAPTER_RATES[settings.adapter.kind])
    if settings.adapter.kind != "none" and (settings.features or settings.from_scratch):
        raise UsageError(
            "An adapter stands beside a pre-trained model: it cannot be combined with features or "
            "from_scratch."
        )
    if settings.features and (settings.lm or settings.grid):
        raise UsageError(
            "features goes with neither lm nor grid: both are for fine-tuning the whole model."
        )
    if settings.grid and settings.seeds > 1:
        raise UsageError(
            "Take the grid or several seeds, not both: the grid first, then seeds of its best."
        )
    return settings
