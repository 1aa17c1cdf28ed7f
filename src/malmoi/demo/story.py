"""The demo's plan, and the results that its page shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmoi.demo.texts import SPEECHES, DemoText

HELD_OUT_DOCUMENTS = 6  # one document in this many


@dataclass(frozen=True)
class DemoSize:
    """A model's training time, its shape and its samples."""

    seconds: float
    width: int
    depth: int
    length: int
    batch: int


# From large to small: a machine takes the first that it can give enough updates. The first two are
# for matrix units or many cores, the last for two cores of the slowest kind tried (fp32 at 60
# GFLOP/s).
GPT_SIZES = (
    DemoSize(seconds=60, width=192, depth=4, length=128, batch=32),
    DemoSize(seconds=75, width=160, depth=3, length=128, batch=24),
    DemoSize(seconds=100, width=128, depth=2, length=128, batch=16),
)
BERT_SIZES = (
    DemoSize(seconds=84, width=128, depth=2, length=64, batch=64),
    DemoSize(seconds=170, width=128, depth=2, length=64, batch=32),
)
ENOUGH_UPDATES = 200
CLEAR_GAIN = 0.04  # of accuracy: about two standard errors of three seeds on 400 rows
FEW_UPDATES = 60  # fewer have no visible effect


@dataclass(frozen=True)
class DemoConfig:
    """The time of each part and the size of the models: the one place to tune."""

    gpt: DemoSize = GPT_SIZES[0]
    bert: DemoSize = BERT_SIZES[0]
    vocab: int = 4096
    labelled: int = 120  # training passages with a label: few, as labels are scarce in practice
    judged: int = 400  # passages of held-out documents
    updates: int = 60  # per fine-tuning run
    seeds: int = 3  # fine-tuning runs of each kind; their mean is reported


@dataclass
class Story:
    """Everything the page shows."""

    plan: DemoConfig
    out: Path
    text: DemoText = SPEECHES
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, list[str]] = field(default_factory=dict)  # a sentence by each vocabulary
    samples: list[tuple[str, str]] = field(default_factory=list)
    fills: list[tuple[str, list[tuple[str, float]]]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)  # accuracy of the task, by model
    said: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)  # [heads, T, T] of each layer
