"""The page of a fine-tuning: how good it is, where it errs, and which labels to check."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from malmoi.messages import msg, translate
from malmoi.metrics import mean_with_error
from malmoi.metrics.labels import (
    calibration_bins,
    calibration_error,
    confusion,
    entities,
    entity_scores,
    label_scores,
)
from malmoi.report.chart import ChartPoints, Line, chart, page_chart
from malmoi.report.page import render
from malmoi.system.groups import grouped

MAX_MISTAKES = 20
MAX_SUSPECTS = 20
MAX_RIGHT = 8
MAX_LABELS = 40  # beyond this, a confusion matrix is unreadable
FEWEST_CALIBRATED = 30  # predictions: fewer draw no line
FEWEST_IN_BIN = 5  # the share of fewer is noise
TRIAL_COLUMNS = (
    "trial", "settings", "seed", "share of the epochs", "held-out rows", "gain over the first",
    "seconds",
)  # fmt: skip

Row = Mapping[str, Any]  # of predictions.jsonl


@dataclass(frozen=True, kw_only=True)
class TaskPage:
    """What a page shows; `rows` are the judged ones, none if the run was stopped before."""

    title: str
    lead: str
    measure: str
    log: Sequence[Row]
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    labels: Sequence[str] = ()
    exclusive: bool = False  # exactly one label a row
    tagged: bool = False  # a tag a word
    baselines: Sequence[tuple[str, float]] = ()  # other accuracies on the same rows
    runs: Sequence[Row] = ()
    trials: Sequence[Sequence[object]] = ()  # rows under TRIAL_COLUMNS
    facts: Sequence[tuple[str, str]] = ()
    settings: str = ""
    next_lines: str = ""
    warning: str = ""

    def render(self) -> str:
        return render(
            "report/task_page.jinja",
            page=self,
            title=self.title,
            lead=self.lead,
            columns=TRIAL_COLUMNS,
            mean_with_error=mean_with_error,
        )

    @property
    def cards(self) -> list[tuple[str, str]]:
        last: Row = self.log[-1] if self.log else {}
        shown = [(name.replace("_", " "), f"{value:.4f}") for name, value in self.metrics.items()]
        shown += [("examples", f"{len(self.rows):,}")] if self.rows else []
        return shown + ([("steps", f"{last['step']:,}")] if "step" in last else [])

    @cached_property
    def right(self) -> list[Row]:
        return [row for row in self.rows if is_correct(row)]

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The accuracies of the baselines and, last, of this model."""
        label, times = Counter(str(row["label"]) for row in self.rows).most_common(1)[0]
        always = (msg("always “{most}”", most=label), times / len(self.rows))
        found = [always, *self.baselines, ("this model", len(self.right) / len(self.rows))]
        return [(translate(name), share) for name, share in found]

    @property
    def is_better(self) -> bool:
        *baselines, (_, right) = self.shares
        return right > max(share for _, share in baselines)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(len(self.right), len(self.rows))

    @property
    def curves(self) -> list[str]:
        """One chart across the page, or two for side by side."""
        steps = translate("steps")
        lines = self._lines()
        if len(lines) == 1:
            ((name, line),) = lines.items()
            return [page_chart({name: line}, steps, translate(name), 240)]
        return [
            chart({name: line}, steps, translate(name), (400, 220)) for name, line in lines.items()
        ]

    def _lines(self) -> dict[str, ChartPoints]:
        """The loss and the measure by steps, where there are several."""
        measured = [row for row in self.log if self.measure in row]
        # the final evaluation is on other rows, and would look like a fall or a rise
        held = [row for row in measured if row.get("rows") == "held out"]
        rows = {"loss": [row for row in self.log if "loss" in row], self.measure: held or measured}
        return {
            name: [(row["step"], row[name]) for row in some]
            for name, some in rows.items()
            if len(some) > 1
        }

    @property
    def label_scores(self) -> Mapping[str, Any]:
        if not (self.labels or self.tagged) or not self.rows:
            return {}
        found = self._gold_and_said()
        return entity_scores(*found) if self.tagged else label_scores(*found, self.labels)

    def _gold_and_said(self) -> tuple[list[Any], list[Any]]:
        def names(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        gold = [names(row["label"]) for row in self.rows]
        return gold, [names(row["prediction"]) for row in self.rows]

    @property
    def confusion(self) -> list[list[int]]:
        if not self.exclusive or not self.rows or len(self.labels) > MAX_LABELS:
            return []
        return list(confusion(*self._gold_and_said(), self.labels).tolist())

    @property
    def calibration(self) -> tuple[str, float] | None:
        """Confidence against accuracy, in ranges of confidence (Guo et al. 2017); and the error."""
        if not self.exclusive or len(self.rows) < FEWEST_CALIBRATED:
            return None
        right = [is_correct(row) for row in self.rows]
        sure = [row["score"] for row in self.rows]
        bins = [one for one in calibration_bins(right, sure) if one.count >= FEWEST_IN_BIN]
        points = [(one.confidence, one.accuracy) for one in bins]
        spread = [math.sqrt(one.accuracy * (1 - one.accuracy) / one.count) for one in bins]
        lines = {
            translate("this model"): Line(points, errors=spread),
            translate("perfect"): Line([(0.0, 0.0), (1.0, 1.0)], dashed=True),
        }
        svg = chart(
            lines, translate("confidence"), translate("fraction correct"), (400, 260), share=True
        )
        return svg, calibration_error(right, sure)

    @cached_property
    def suspects(self) -> list[Row]:
        """Rows with likely label errors; a model no better than a baseline cannot find them."""
        if not self.exclusive or not self.rows or not self.is_better:
            return []
        return likely_label_errors(self.rows)[:MAX_SUSPECTS]

    @property
    def mistakes(self) -> list[Row]:
        """The most confident ones that are not suspects."""
        wrong = [row for row in self.rows if not is_correct(row) and row not in self.suspects]
        return sorted(wrong, key=lambda row: -row["score"])[:MAX_MISTAKES]

    @property
    def successes(self) -> list[Row]:
        return self.right[:MAX_RIGHT]

    @property
    def score_name(self) -> str:
        """The head of the column of scores; the score of tags repeats whether they are right."""
        return "" if self.tagged else "confidence" if self.labels else "model score"

    def cell(self, row: Row, name: str, limit: int = 160) -> str:
        """A text, label or prediction, cut; tags as the entities that they mark: Seoul (LOC)."""
        value = row[name]
        spelt = str(row["text"]).split(" ")
        if self.tagged and name not in ("text", "pair") and len(spelt) == len(value):
            found = sorted(entities(value), key=lambda one: one[1])
            value = ", ".join(f"{' '.join(spelt[a : b + 1])} ({of})" for of, a, b in found) or "–"
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        text = f"{value:.3f}" if isinstance(value, float) else text
        return text if len(text) <= limit else text[: limit - 1] + "…"


def is_correct(row: Row) -> bool:
    gold = row["label"]
    guess = row["prediction"]
    if isinstance(gold, float):
        return bool(abs(gold - guess) < 0.5)
    if isinstance(gold, list) and isinstance(guess, str):  # answers: any of the gold texts is right
        return guess in gold or (not gold and not guess)
    return bool(list(gold) == list(guess) if isinstance(gold, list | tuple) else gold == guess)


def likely_label_errors(rows: Sequence[Row]) -> list[Row]:
    """Rows as likely to have another label as rows of that label (Northcutt et al. 2021 eq. 2)."""
    usual = grouped(
        (row["label"], row["probabilities"][row["label"]])
        for row in rows
        if row["label"] in row.get("probabilities", {})
    )
    mean = {label: sum(chances) / len(chances) for label, chances in usual.items()}

    def doubt(row: Row) -> float:
        chances = row.get("probabilities", {})
        guess = row["prediction"]
        if guess == row["label"] or guess not in mean or chances.get(guess, 0.0) < mean[guess]:
            return 0.0
        return float(chances[guess] - chances.get(row["label"], 0.0))

    return [row for row in sorted(rows, key=doubt, reverse=True) if doubt(row) > 0]


def wilson_interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927): it stays within 0 and 1 for few rows too.

    Examples:
        >>> [round(bound, 3) for bound in wilson_interval(9, 10)]
        [0.596, 0.982]
    """
    share = right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + (z / total) ** 2 / 4)
    return middle - half, middle + half
