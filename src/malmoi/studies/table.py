"""The results of a study: means over seeds, the paper's numbers, and verdicts."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from malmoi.metrics import MeanWithError, mean_with_error
from malmoi.report.chart import Line, chart, standalone_svg

Values: TypeAlias = Mapping[str, float]
# suffixes of columns where lower is better
LOWER_IS_BETTER = ("bits per byte", "perplexity", "loss", "seconds", "ms", "MB", "bits")


@dataclass(frozen=True)
class Words:
    """A text of a page in both languages."""

    en: str
    ko: str


def lower_is_better(column: str) -> bool:
    return column.endswith(LOWER_IS_BETTER)


@dataclass(frozen=True)
class StudyResults:
    """The finished cells of a study, row by row."""

    records: Sequence[Mapping[str, Any]]

    @cached_property
    def table(self) -> dict[str, dict[str, list[float]]]:
        """row → column → the values of its seeds."""
        found: dict[str, dict[str, list[float]]] = {}
        for record in self.records:
            for column, value in record["values"].items():
                found.setdefault(record["row"], {}).setdefault(column, []).append(value)
        return found

    @property
    def rows(self) -> list[str]:
        return list(self.table)

    @cached_property
    def _every_column(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.table.values() for column in row))

    @property
    def columns(self) -> list[str]:
        """Columns of the main table; columns named "GROUP: part" go into a table of details."""
        return [column for column in self._every_column if ": " not in column]

    @property
    def details(self) -> dict[str, list[str]]:
        """group → its columns."""
        found: dict[str, list[str]] = {}
        for column in self._every_column:
            if ": " in column:
                found.setdefault(column.split(": ")[0], []).append(column)
        return found

    def at(self, row: str, column: str) -> MeanWithError | None:
        values = self.table.get(row, {}).get(column)
        return mean_with_error(values) if values else None

    def seeds(self, row: str, column: str) -> int:
        return len(self.table.get(row, {}).get(column, ()))

    def first_column(self, *names: str) -> str:
        """The first measured one of these columns, which depend on the given data sets."""
        return next((name for name in names if name in self.columns), "")

    def facts(self, row: str) -> dict[str, float]:
        """Means over a row's models: parameters, tokens, seconds."""
        mine = [record["facts"] for record in self.records if record["row"] == row]
        names = dict.fromkeys(name for one in mine for name in one)
        values = {n: [one[n] for one in mine if one.get(n) is not None] for n in names}
        return {name: sum(some) / len(some) for name, some in values.items() if some}


def number(value: float) -> str:
    """Formats a number with three digits: 84.2, 0.912, 5.84, 1,240."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def with_spread(found: MeanWithError | None, seeds: int) -> str:
    """84.2 ± 0.3, the standard deviation over seeds; one seed has none."""
    if found is None:
        return "–"
    return f"{number(found.mean)} ± {number(found.deviation)}" if seeds > 1 else number(found.mean)


def best_rows(results: StudyResults, column: str) -> list[str]:
    """The best row of a column, and those within two standard errors of it."""
    found = {row: value for row in results.rows if (value := results.at(row, column))}
    sign = 1 if lower_is_better(column) else -1
    order = sorted(found, key=lambda row: sign * found[row].mean)
    if not order:
        return []
    top = found[order[0]]

    def close(row: str) -> bool:
        error = math.hypot(top.standard_error, found[row].standard_error)
        return abs(top.mean - found[row].mean) <= 2 * error

    return [order[0], *(row for row in order[1:] if close(row))]


# ------------------------------------------------------------------ claims


AGREES = Words("agrees", "일치")
DISAGREES = Words("does not at this scale", "이 규모에서는 불일치")
NOISE = Words("within noise", "오차 범위 안")


@dataclass(frozen=True)
class Claim:
    """A paper's finding: one row is better than another in a column."""

    about: Words
    better: str
    worse: str
    column: str

    def verdict(self, results: StudyResults) -> Words:
        """Whether the direction agrees, by the means and the error of their difference.

        One seed has no error, so that nothing can be concluded from it.
        """
        a, b = (results.at(row, self.column) for row in (self.better, self.worse))
        if a is None or b is None:
            return Words("not measured here", "여기서는 재지 않음")
        gain = (b.mean - a.mean) if lower_is_better(self.column) else (a.mean - b.mean)
        error = math.hypot(a.standard_error, b.standard_error)
        alone = min(results.seeds(row, self.column) for row in (self.better, self.worse)) < 2
        size = f"{'+' if gain >= 0 else '−'}{number(abs(gain))}"
        if alone:
            return Words(
                f"cannot tell ({size}, one seed, spread unknown)",
                f"판단할 수 없음 ({size}, 시드 하나라 편차를 모름)",
            )
        direction = DISAGREES if gain < 0 else AGREES
        direction = NOISE if abs(gain) <= 2 * error else direction
        return Words(
            f"{direction.en} ({size}, error ± {number(error)})",
            f"{direction.ko} ({size}, 오차 ± {number(error)})",
        )


# ------------------------------------------------------------------ figures

DOT_ROW = 26  # height of a row in a figure of dots
DOT_LABEL = 220  # width of its name
DOT_PANEL = 200
DOT_TOP = 34
PANELS_ACROSS = 3


def dot_figure(results: StudyResults) -> str:
    """A dot with an error bar per row and a panel per column, which makes noise visible."""
    columns = results.columns
    rows = results.rows
    tall = DOT_TOP + DOT_ROW * len(rows) + 34
    lines = -(-len(columns) // PANELS_ACROSS)
    width = DOT_LABEL + DOT_PANEL * PANELS_ACROSS
    parts = [
        f'<text x="0" y="{tall * line + DOT_TOP + DOT_ROW * i + 17}">{html.escape(row)}</text>'
        for line in range(lines)
        for i, row in enumerate(rows)
    ]
    for i, column in enumerate(columns):
        line, across = divmod(i, PANELS_ACROSS)
        parts.append(_panel(results, column, DOT_LABEL + DOT_PANEL * across, tall * line))
    about = html.escape(f"{', '.join(columns)} by {', '.join(rows)}")
    return standalone_svg(
        f'<svg viewBox="0 0 {width} {tall * lines}" role="img" aria-label="{about}">'
        f"{''.join(parts)}</svg>"
    )


def _panel(results: StudyResults, column: str, left: int, top: int) -> str:
    found = {row: results.at(row, column) for row in results.rows}
    ends = [
        end for v in found.values() if v for end in (v.mean - v.deviation, v.mean + v.deviation)
    ]
    low, high = min(ends), max(ends)
    inner = DOT_PANEL - 60
    bottom = top + DOT_TOP + DOT_ROW * len(found)

    def across(value: float) -> float:
        return left + 14 + (value - low) / ((high - low) or 1) * inner

    first, last = across(low), across(high)
    parts = [
        f'<text x="{first}" y="{top + 20}">{html.escape(column)}</text>',
        f'<line x1="{first}" x2="{last}" y1="{bottom}" y2="{bottom}" stroke="var(--line)"/>',
        f'<text x="{first}" y="{bottom + 16}" text-anchor="middle">{number(low)}</text>',
    ]
    if high > low:
        parts.append(
            f'<text x="{last}" y="{bottom + 16}" text-anchor="middle">{number(high)}</text>'
        )
    for i, value in enumerate(found.values()):
        if value is None:
            continue
        y = top + DOT_TOP + DOT_ROW * i + 13
        if value.deviation:
            ends_at = (across(value.mean - value.deviation), across(value.mean + value.deviation))
            parts.append(
                f'<path d="M{ends_at[0]:.1f},{y}H{ends_at[1]:.1f}" stroke="var(--a)" '
                'stroke-opacity=".5" stroke-width="2"/>'
            )
        parts.append(f'<circle cx="{across(value.mean):.1f}" cy="{y}" r="4" fill="var(--a)"/>')
    return "".join(parts)


def curve_figure(
    results: StudyResults,
    across: str,
    x: Callable[[str], float | None],
    *,
    up: str = "",
    even: bool = False,
) -> str:
    """A line per column over the number that `x` reads from a row's name (None: no point)."""
    lines: dict[str, Line] = {}
    for column in results.columns:
        points = sorted(
            (at, value.mean, value.deviation)
            for row in results.rows
            if (at := x(row)) is not None and (value := results.at(row, column)) is not None
        )
        lines[column] = Line([(at, mean) for at, mean, _ in points], [d for *_, d in points])
    return standalone_svg(chart(lines, across, up, size=(820, 340), even=even))


# ------------------------------------------------------------------ the table


def result_rows(
    results: StudyResults, theirs: Mapping[str, Values]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: our results with their spread, then the paper's columns."""
    paper = list(dict.fromkeys(column for row in theirs.values() for column in row))
    head = ["", *results.columns, *(f"paper: {column}" for column in paper)]
    rows = []
    for row in dict.fromkeys([*results.rows, *theirs]):
        ours = [with_spread(results.at(row, c), results.seeds(row, c)) for c in results.columns]
        published = theirs.get(row, {})
        rows.append([row, *ours, *(number(published[c]) if c in published else "–" for c in paper)])
    return head, rows


def detail_rows(results: StudyResults, group: str) -> tuple[list[str], list[list[str]]]:
    """The parts of a group, one per row, such as the phenomena of BLiMP."""
    columns = results.details[group]
    rows = [row for row in results.rows if any(results.at(row, c) for c in columns)]
    body = [
        [c.split(": ", 1)[1], *(with_spread(results.at(r, c), results.seeds(r, c)) for r in rows)]
        for c in columns
    ]
    return [group, *rows], body
