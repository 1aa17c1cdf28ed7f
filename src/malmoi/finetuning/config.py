"""Fine-tuning config: a frozen record whose defaults are BERT's and GPT-1's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from malmoi.adapters.config import AdapterConfig
from malmoi.errors import require_that
from malmoi.messages import msg, plural
from malmoi.settings import Config, option, require_bounds, setting
from malmoi.training.recipe import SCHEDULES, TrainConfig

# Few weights trained from scratch need a higher rate than a whole network (Hu 2021 table 9,
# Lester 2021 §3.1).
ADAPTER_RATES = {"none": 5e-5, "lora": 1e-3, "prompt": 3e-2, "prefix": 1e-2}
# full fine-tuning of a GPT: Radford et al. 2018 §4.1
GPT_DEFAULTS = {"lr": 6.25e-5, "warmup": 0.002, "lm": 0.5}
FINER_OUTPUT = 1.5  # factor of the rate for numbers, tags and answers
# a small model on frozen features
FEATURE_DEFAULTS = {"lr": 2e-3, "batch": 16, "epochs": 10.0, "precision": "fp32"}
BUDGET_FIELDS = ("minutes", "steps", "epochs")  # the first that is set counts
# fields that `TrainConfig` has too
SHARED = (
    "minutes", "batch", "lr", "decay", "clip", "schedule", "warmup", "seed", "precision", "compile",
    "track",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Config):
    """All settings of `finetune` but the model, the task and the files."""

    epochs: float = option(
        3.0, "Passes over the rows.", gt=0, shown="2–30 by rows, ended after 4 minutes, on a GPU 10"
    )
    steps: int = option(0, "Budget in steps.", ge=0)
    minutes: float = option(0.0, "Budget as a time: 3, 90s, 2h.", ge=0, unit="minutes")
    max_minutes: float = setting(
        0.0, "Time limit beside epochs or steps; 0: none.", ge=0, unit="minutes"
    )
    frozen_first: bool = setting(
        False,
        "Start with a linear layer on the frozen model; held-out rows tell which of the two is "
        "kept.",
    )
    batch: int = option(32, "Examples per step.", gt=0, shown="8–64 by rows and kind")
    lr: float = option(5e-5, "Peak learning rate.", gt=0, shown="by model and kind")
    decay: float = setting(0.01, "Weight decay.", ge=0)
    clip: float = setting(1.0, "Maximum gradient norm; 0: off.", ge=0)
    schedule: str = setting(
        "linear", "Learning-rate schedule: linear, cosine, wsd, constant, or a plugin's."
    )
    warmup: float = setting(
        0.1,
        "Warm-up, as a share of the steps.",
        ge=0,
        lt=1,
        shown="0.1; 0.002 for a GPT, 0.05 if it writes",
    )
    length: int = option(0, "Maximum tokens per row.", ge=0, shown="the context, at most 512")
    stride: int = setting(128, "Tokens between the windows over a long context.", gt=0)
    lm: float = option(
        0.0, "λ of GPT-1's auxiliary language model.", ge=0, shown="0.5 for a GPT, else 0"
    )
    freeze: bool = option(False, "Train only the new output layer.")
    freeze_layers: int = setting(0, "Freeze the embeddings and the first n layers.", ge=0)
    features: str = option(
        "",
        "Train a small model on frozen layers: last4, last, weighted-all, mix, layers=5,6…",
        metavar="LAYERS",
    )
    recurrent: int = setting(768, "Width of a tagger's BiLSTM on features.")
    tune_features: bool = setting(False, "Train the layers below too (BERT table 5: + BiLSTM).")
    adapter: AdapterConfig = option(
        AdapterConfig(),
        "Train only an adapter: lora, prompt or prefix.",
        metavar="KIND",
        typed=Literal["none", "lora", "prompt", "prefix"],
        accepts="Literal['none', 'lora', 'prompt', 'prefix'] | AdapterConfig",
    )
    words: bool | None = setting(
        None, "Train label words instead of a new layer.", shown="with a soft prompt, if possible"
    )
    contrastive: bool | None = setting(
        None,
        "Contrast sentence vectors, then fit a logistic layer, as SetFit does.",
        shown="with few rows and a sentence encoder",
    )
    own_cosines: float = setting(
        0.0,
        "Pairs on a sentence encoder: epochs in which the network first learns to say the "
        "encoder's own cosine, reading both texts at once; 0: none.",
        ge=0,
        shown="2 or 6 for up to 20,000 pairs on a GPU, else 0",
    )
    prompt: bool | None = setting(
        None,
        "Calibrate label words after a prompt on the rows, without training.",
        shown="with few rows and a language model, if better than a new layer",
    )
    layer_decay: float = setting(
        1.0,
        "Each layer's learning rate relative to the layer above.",
        gt=0,
        le=1,
        shown="0.9 for an encoder, else 1",
    )
    layers_transferred: int | None = setting(
        None, "Keep only the first n pre-trained layers (GPT-1 fig. 2).", shown="all"
    )
    class_weights: bool | None = setting(
        None, "Weight rare labels more.", shown="if labels are imbalanced"
    )
    label_thresholds: bool = setting(
        False, "Multi-label: one threshold per label, not one for all."
    )
    from_scratch: bool = option(False, "Start from random weights, as a baseline.")
    holdout: float = setting(
        0.0,
        "Share of the rows held out to select by and, without a file for it, to evaluate on.",
        ge=0,
        lt=1,
        shown="a tenth, or none where nothing is selected",
    )
    metric: str = option(
        "", "Metric for model selection: accuracy, f1_macro, mcc…", shown="the task's"
    )
    evaluations: int = setting(1, "Evaluations per epoch, on the held-out rows.", gt=0)
    patience: int = setting(
        0,
        "Stop after this many evaluations without improvement and keep the best epoch; 0: the "
        "last.",
        ge=0,
    )
    average: float = setting(
        0.0,
        "Share of the run, at its end, whose weights are averaged.",
        ge=0,
        lt=1,
        shown="a third for an encoder, else none",
    )
    seed: int = option(0, "Random seed.", shown="0")
    seeds: int = option(
        1, "Repeat with N seeds and report mean ± standard deviation; the first run is kept.", gt=0
    )
    init_seed: int | None = setting(
        None, "Random seed of the new layer's weights.", shown="the seed"
    )
    best: bool = option(
        False, "Spend --minutes: train others, too, and keep their student if it is clearly better."
    )
    grid: bool = option(False, "Search BERT's grid of learning rates, batches and epochs.")
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "auto: bf16 if the device computes in it.", shown="auto; fp32 with features"
    )
    compile: bool = setting(False, "torch.compile.")
    skip_bad: bool = option(False, "Skip bad rows instead of stopping at the first.")
    unlabelled: tuple[str, ...] = option(
        (),
        "Rows without labels to learn from, too: a table, or one text a line; repeatable.",
        metavar="FILE",
        accepts="str | Sequence[str]",
    )
    labels: str = option(
        "",
        "Learn these labels from their names and --unlabelled rows alone: positive,negative.",
        metavar="A,B…",
    )
    track: tuple[str, ...] = option(
        (),
        "Also log the run to tensorboard, wandb, mlflow or trackio; repeatable.",
        metavar="NAME",
        accepts="str | Sequence[str]",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        SCHEDULES.find(self.schedule)
        require_bounds(self, "Invalid settings")

    @property
    def trains_all(self) -> bool:
        """Whether the whole network is fine-tuned for the task at once."""
        partly = self.features or self.words or self.freeze or self.contrastive or self.prompt
        return not partly and self.adapter.kind == "none"

    def training(self, steps: int) -> TrainConfig:
        """The equivalent `TrainConfig`."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in SHARED}
        return TrainConfig(
            steps=0 if self.minutes else steps,
            ema=self.average,
            warmup_steps=0,
            save_every=0,  # by the clock alone
            keep=1,
            **shared,
        )

    def describe_budget(self) -> str:
        """3 epochs, 100 steps or 5 minutes; and at most how many minutes."""
        # with best, the minutes are those of all runs
        unit = next(name for name in BUDGET_FIELDS[self.best :] if getattr(self, name))
        budget = plural(getattr(self, unit), unit.removesuffix("s"))
        most = plural(self.max_minutes, "minute")
        limited = msg("{budget}, at most {most}", budget=budget, most=most)
        return limited if self.max_minutes else budget

    def variants(self) -> list["FinetuneConfig"]:
        """The configs of all runs: one, one per seed, or the paper's grid."""
        alone = replace(self, seeds=1, grid=False)
        if self.grid:
            return [
                replace(alone, lr=lr, batch=b, epochs=e)
                for lr, b, e in product((5e-5, 3e-5, 2e-5), (16, 32), (2, 3, 4))
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
    for conflict, holds in _conflicts(settings).items():
        require_that(not holds, conflict)
    return settings


def _conflicts(s: FinetuneConfig) -> dict[str, bool]:
    """Settings that cannot be combined, and whether these are."""
    several = s.grid or s.seeds > 1
    adapted = s.adapter.kind != "none"
    return {
        msg("An adapter cannot be combined with features or from_scratch."): adapted
        and bool(s.features or s.from_scratch),
        msg("features cannot be combined with lm or grid: both fine-tune the whole model."): bool(
            s.features and (s.lm or s.grid)
        ),
        msg("labels are learnt from rows without labels: give --unlabelled FILE."): bool(s.labels)
        > bool(s.unlabelled),
        msg("best needs a time budget: --best --minutes 10 (best=True, minutes=10)."): s.best
        and not s.minutes,
        msg(
            "best searches full fine-tuning: it cannot be combined with grid, seeds, features, "
            "adapter, words, freeze or contrastive."
        ): s.best and (several or not s.trains_all),
        msg("Use the grid or several seeds, not both."): s.grid and s.seeds > 1,
        msg("own_cosines comes before minutes are counted: give epochs or steps instead."): bool(
            s.own_cosines and s.minutes and not s.best
        ),
    }
