"""The page of a fine-tuning: how good it is, where it errs, and which labels to check."""

import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from malmoi.report.page import bars, fact_cards, heading, html_page, html_table, words

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
        parts = (
            f"<p><strong>{words(self.warning)}</strong></p>" if self.warning else "",
            self._cards(),
            self._against_baseline(),
            self._runs(),
            self._curves(),
            self._labels(),
            self._confusion(),
            self._calibration(),
            self._suspects(),
            self._examples(),
            self._made(),
        )
        return html_page(self.title, self.lead, "".join(parts))

    def _cards(self) -> str:
        last: Row = self.log[-1] if self.log else {}
        shown = [(name.replace("_", " "), f"{value:.4f}") for name, value in self.metrics.items()]
        shown += [("examples", f"{len(self.rows):,}")] if self.rows else []
        shown += [("steps", f"{last['step']:,}")] if "step" in last else []
        return fact_cards(shown)

    def _baselines(self) -> list[tuple[str, float]]:
        label, times = Counter(str(row["label"]) for row in self.rows).most_common(1)[0]
        always = (translate(msg("always “{most}”", most=label)), times / len(self.rows))
        return [always, *((translate(name), value) for name, value in self.baselines)]

    @property
    def _is_better(self) -> bool:
        right = sum(map(is_correct, self.rows)) / len(self.rows)
        return right > max(value for _, value in self._baselines())

    def _against_baseline(self) -> str:
        """Accuracy with its confidence interval, next to the baselines."""
        if not self.exclusive or not self.rows:
            return ""
        right = sum(is_correct(row) for row in self.rows)
        low, high = wilson_interval(right, len(self.rows))
        shares = [*self._baselines(), (translate("this model"), right / len(self.rows))]
        note = msg(
            "{right:,} of {rows:,} rows are right (95% confidence interval: {low:.0%} to "
            "{high:.0%}).",
            right=right,
            rows=len(self.rows),
            low=low,
            high=high,
        )
        doubt = "" if self._is_better else words("No better than the baseline.")
        return f"{bars(shares)}<p>{words(note)} <strong>{doubt}</strong></p>"

    def _runs(self) -> str:
        if self.trials:
            return heading("Every trial") + html_table(TRIAL_COLUMNS, self.trials)
        if len(self.runs) < 2:
            return ""
        head = ("seed", "lr", "batch", "epochs", self.measure)
        rows = [
            (r["seed"], f"{r['lr']:g}", r["batch"], f"{r['epochs']:g}", f"{r[self.measure]:.4f}")
            for r in self.runs
        ]
        found = mean_with_error([run[self.measure] for run in self.runs])
        mean = f"{self.measure} {found.mean:.4f} ± {found.deviation:.4f}"
        return f"{heading('Every run')}<p>{html.escape(mean)}</p>{html_table(head, rows)}"

    def _curves(self) -> str:
        loss = [(row["step"], row["loss"]) for row in self.log if "loss" in row]
        measured = [row for row in self.log if self.measure in row]
        # the final evaluation is on other rows, and would look like a fall or a rise
        held = [row for row in measured if row.get("rows") == "held out"]
        judged = [(row["step"], row[self.measure]) for row in held or measured]
        lines = {"loss": loss, self.measure: judged}
        return _learning_curves({name: line for name, line in lines.items() if len(line) > 1})

    def _labels(self) -> str:
        if not (self.labels or self.tagged) or not self.rows:
            return ""
        found = self._gold_and_said()
        scores = entity_scores(*found) if self.tagged else label_scores(*found, self.labels)
        rows = [
            (name, f"{one.precision:.3f}", f"{one.recall:.3f}", f"{one.f1:.3f}", f"{one.support:,}")
            for name, one in scores.items()
        ]
        table = html_table(("label", "precision", "recall", "F1", "examples"), rows)
        return heading("Each label") + table

    def _gold_and_said(self) -> tuple[list[Any], list[Any]]:
        def names(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        gold = [names(row["label"]) for row in self.rows]
        return gold, [names(row["prediction"]) for row in self.rows]

    def _confusion(self) -> str:
        if not self.exclusive or not self.rows or len(self.labels) > MAX_LABELS:
            return ""
        return heading("Confusion matrix") + confusion_table(self.labels, *self._gold_and_said())

    def _calibration(self) -> str:
        """Confidence against accuracy, in ranges of confidence (Guo et al. 2017)."""
        if not self.exclusive or len(self.rows) < FEWEST_CALIBRATED:
            return ""
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
        note = msg(
            "A prediction of 80% confidence should be right 8 times in 10. On average "
            "confidence and accuracy differ by {error:.1%} (expected calibration error).",
            error=calibration_error(right, sure),
        )
        picture = f'<div class="pair"><div>{svg}</div></div>'
        return f"{heading('Calibration')}<p>{words(note)}</p>{picture}"

    @property
    def _doubtful(self) -> list[Row]:
        """Rows with likely label errors; a model no better than a baseline cannot find them."""
        if not self.exclusive or not self.rows or not self._is_better:
            return []
        return likely_label_errors(self.rows)[:MAX_SUSPECTS]

    def _suspects(self) -> str:
        found = self._doubtful
        if not found:
            return ""
        text = (
            "The model was not trained on these rows and is more confident of another label than "
            "it usually is of that one: check them first."
        )
        note = f'<p class="lead">{words(text)}</p>'
        return heading("Likely label errors") + note + self._table(found)

    def _examples(self) -> str:
        """The most confident mistakes that are not listed above, then some that are right."""
        if not self.rows:
            return ""
        wrong = sorted((r for r in self.rows if not is_correct(r)), key=lambda r: -r["score"])
        right = [r for r in self.rows if is_correct(r)]
        note = msg(
            "{wrong:,} of {rows:,} are wrong, the most confident first; all predictions "
            "are in predictions.jsonl.",
            wrong=len(wrong),
            rows=len(self.rows),
        )
        above = self._doubtful
        wrong = [row for row in wrong if row not in above]
        parts = [f'{heading("Worst mistakes")}<p class="lead">{words(note)}</p>']
        parts += [self._table(wrong[:MAX_MISTAKES])] if wrong else []
        parts += [heading("Right"), self._table(right[:MAX_RIGHT])] if right else []
        return "".join(parts)

    def _table(self, rows: Sequence[Row]) -> str:
        paired = any("pair" in row for row in rows)
        head = ("text", *(["pair"] if paired else []), "label", "prediction", *self._score_name)
        cells = [
            (
                _cut(row["text"]),
                *([_cut(row.get("pair", ""))] if paired else []),
                *(_cut(self._shown(row, name)) for name in ("label", "prediction")),
                *(f"{row['score']:.3f}" for _ in self._score_name),
            )
            for row in rows
        ]
        return html_table(head, cells, "rows")

    @property
    def _score_name(self) -> list[str]:
        """The head of the column of scores; the score of tags repeats whether they are right."""
        if self.tagged:
            return []
        return ["confidence" if self.labels else "model score"]

    def _shown(self, row: Row, name: str) -> Any:
        """A label or prediction; tags as the entities that they mark: Seoul (LOC)."""
        spelt = str(row["text"]).split(" ")
        if not self.tagged or len(spelt) != len(row[name]):
            return row[name]
        found = sorted(entities(row[name]), key=lambda one: one[1])
        return ", ".join(f"{' '.join(spelt[a : b + 1])} ({label})" for label, a, b in found) or "–"

    def _made(self) -> str:
        parts = [heading("This run"), html_table(("what", "value"), self.facts)]
        if self.settings:
            every = f"<pre>{html.escape(self.settings)}</pre>"
            parts.append(f"<details><summary>{words('every setting')}</summary>{every}</details>")
        if self.next_lines:
            parts += [heading("What to try next"), f"<pre>{html.escape(self.next_lines)}</pre>"]
        return "".join(parts)


def _learning_curves(lines: Mapping[str, ChartPoints]) -> str:
    """One chart across the page, or two side by side."""
    steps = translate("steps")
    if len(lines) < 2:
        charts = [
            page_chart({name: line}, steps, translate(name), 240) for name, line in lines.items()
        ]
        return heading("Learning curve") + charts[0] if charts else ""
    drawn = "".join(
        f"<div>{chart({name: line}, steps, translate(name), (400, 220))}</div>"
        for name, line in lines.items()
    )
    return f'{heading("Learning curve")}<div class="pair">{drawn}</div>'


def confusion_table(labels: Sequence[str], gold: Sequence[Any], predicted: Sequence[Any]) -> str:
    """Gold labels in rows, predicted ones in columns; shaded by the share of the row."""
    matrix = confusion(gold, predicted, labels).tolist()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in labels)
    body = []
    for i, (name, row) in enumerate(zip(labels, matrix, strict=True)):
        total = sum(row) or 1
        cells = "".join(
            f'<td style="background:{_shade(n / total, right=i == j)}">{n:,}</td>'
            for j, n in enumerate(row)
        )
        body.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    note = f'<p class="lead">{words("Rows: label; columns: prediction.")}</p>'
    return (
        f'{note}<div class="wide"><table class="matrix"><tr><th></th>{head}</tr>'
        f"{''.join(body)}</table></div>"
    )


def _shade(share: float, *, right: bool) -> str:
    colour = "--a" if right else "--b"
    return f"color-mix(in srgb,var({colour}) {round(55 * share)}%,transparent)"


def is_correct(row: Row) -> bool:
    gold = row["label"]
    guess = row["prediction"]
    if isinstance(gold, float):
        return bool(abs(gold - guess) < 0.5)
    if isinstance(gold, list) and isinstance(guess, str):  # answers: any of the gold texts is right
        return guess in gold or (not gold and not guess)
    return bool(list(gold) == list(guess) if isinstance(gold, list | tuple) else gold == guess)


def likely_label_errors(rows: Sequence[Row]) -> list[Row]:
    """Rows whose label is doubtful, the most doubtful first, by confident learning.

    Another label is at least as probable as it is on average among the rows that carry it
    (Northcutt et al. 2021 eq. 2).
    """
    usual: dict[str, list[float]] = {}
    for row in rows:
        chance = row.get("probabilities", {}).get(row["label"])
        if chance is not None:
            usual.setdefault(row["label"], []).append(chance)
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


def _cut(value: Any, limit: int = 160) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = f"{value:.3f}" if isinstance(value, float) else text
    return text if len(text) <= limit else text[: limit - 1] + "…"
