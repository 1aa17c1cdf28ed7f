"""The demo's report.html: what was trained, its curves, its output, and what to try next."""

import math
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from malmoi.demo.texts import SPEECHES, DemoConfig, DemoText
from malmoi.messages import translate
from malmoi.metrics.labels import confusion
from malmoi.report.chart import page_chart
from malmoi.report.console import format_duration
from malmoi.report.page import machine_name, render
from malmoi.system.files import write_text
from malmoi.system.run_folder import read_metrics
from malmoi.training.recipe import read_recipe


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
    focused: tuple[int, int] = (0, 0)  # layer and head of the first picture
    pictures: list[str] = field(default_factory=list)  # of attention: one head, all heads

    @property
    def accuracies(self) -> tuple[float, float]:
        """Without and with pre-training, on average over the seeds."""
        raw, tuned = map(fmean, self.runs.values())
        return raw, tuned

    @property
    def gain(self) -> str:
        """Points that pre-training added."""
        raw, tuned = self.accuracies
        return f"{100 * (tuned - raw):+.0f}".replace("-", "−")


def write_demo_page(story: Story) -> None:
    gold = [row["label"] for row in story.said]
    guesses = [row["prediction"] for row in story.said]
    shares = story.frequencies["byte-bpe"]
    page = render(
        "demo/page.jinja",
        story=story,
        title=story.text.title,
        took=format_duration(story.seconds["all"]),
        gpt=_run(story, "gpt", "training"),
        bert=_run(story, "bert", "masked tokens"),
        # of a model that knows only how frequent tokens are
        frequency_perplexity=math.exp(-sum(share * math.log(share) for share in shares)),
        scores=[(_name(story, name), score) for name, score in story.scores.items()],
        confusion=confusion(gold, guesses, story.text.labels).tolist(),
        date=f"{datetime.now():%Y-%m-%d %H:%M}",
        machine=machine_name(),
    )
    write_text(story.out / "report.html", page)


def _run(story: Story, name: str, loss: str) -> dict[str, Any]:
    """The recipe of a pre-training run, its last validation, and its loss by seconds."""
    rows = read_metrics(story.out / name / "metrics.jsonl")
    line = [(row["seconds"], row["loss"]) for row in rows if "loss" in row and "lr" in row]
    return {
        "recipe": read_recipe(story.out / name / "recipe.json"),
        "last": [row for row in rows if "valid_loss" in row][-1],
        "curve": page_chart({translate(loss): line}, translate("seconds"), translate("loss"), 240),
    }


def _name(story: Story, name: str) -> str:
    """A row's name, with the range of its seeds."""
    runs = story.runs.get(name)
    shown = f" ({min(runs):.0%}–{max(runs):.0%})" if runs else ""
    return translate(name) + shown
