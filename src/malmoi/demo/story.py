"""The results that the demo's page shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmoi.demo.texts import SPEECHES, DemoConfig, DemoText

HELD_OUT_DOCUMENTS = 6  # one document in this many


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
    runs: dict[str, list[float]] = field(default_factory=dict)  # the same of each seed
    surprise: tuple[str, str] | None = None  # words that it found to be shuffled, and their order
    said: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)  # [heads, T, T] of each layer
