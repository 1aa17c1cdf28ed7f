"""The demo's plan, and the results that its page shows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmoi.demo.texts import SPEECHES, DemoText

HELD_OUT_DOCUMENTS = 6  # one document in this many


@dataclass(frozen=True)
class DemoConfig:
    """The time of each part; the size of the models follows from it, the text and the machine."""

    gpt_seconds: float = 100
    bert_seconds: float = 150
    settings: Mapping[str, Any] = field(default_factory=dict)  # of pre-training; else by the rule
    labelled: int = 120  # training passages with a label: few, as labels are scarce in practice
    judged: int = 400  # passages of held-out documents
    updates: int = 60  # per fine-tuning run
    seeds: int = 3  # fine-tuning runs of each kind; their mean is reported
    seed: int = 0  # of the rows, the models and the samples


def clear_gain(rows: int) -> float:
    """A difference of accuracy of about two standard errors: 0.04 for three seeds on 400 rows."""
    return 0.8 / math.sqrt(rows)


@dataclass
class Story:
    """Everything the page shows."""

    plan: DemoConfig
    out: Path
    text: DemoText = SPEECHES
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, list[str]] = field(default_factory=dict)  # a sentence by each vocabulary
    frequencies: dict[str, list[float]] = field(default_factory=dict)  # shares, by vocabulary
    samples: list[tuple[str, str]] = field(default_factory=list)
    fills: list[tuple[str, list[tuple[str, float]]]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)  # accuracy of the task, by model
    said: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)  # [heads, T, T] of each layer
