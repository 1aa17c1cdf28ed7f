"""A study's results and its folder: results.json, figure.svg, report.md and report.html."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from malmoi import __version__
from malmoi.messages import plural
from malmoi.metrics import MeanWithError, mean_with_error
from malmoi.report.chart import Line, chart, short_number, standalone_svg
from malmoi.report.page import machine_name, render
from malmoi.studies.data import ROLE_COLUMNS
from malmoi.studies.study import Study, Words
from malmoi.system.files import write_json, write_text
from malmoi.system.groups import grouped

# suffixes of columns where lower is better
LOWER_IS_BETTER = ("bits per byte", "perplexity", "loss", "seconds", "ms", "MB", "bits")
DESCRIBES = ("millions of weights",)  # columns that no finding is about
SVG_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # the page defines the same colours


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
        parts = (column for column in self._every_column if ": " in column)
        return grouped((column.split(": ")[0], column) for column in parts)

    def at(self, row: str, column: str) -> MeanWithError | None:
        values = self.table.get(row, {}).get(column)
        return mean_with_error(values) if values else None

    def seeds(self, row: str, column: str) -> int:
        return len(self.table.get(row, {}).get(column, ()))

    def shown(self, row: str, column: str) -> str:
        """84.2 ± 0.3, the standard deviation over seeds; one seed has none."""
        value = self.at(row, column)
        if value is None:
            return "–"
        spread = f" ± {number(value.deviation)}" if self.seeds(row, column) > 1 else ""
        return number(value.mean) + spread

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


def best_rows(results: StudyResults, column: str) -> list[str]:
    """The best row of a column, and those within two standard errors of it."""
    found = {row: value for row in results.rows if (value := results.at(row, column))}
    order = sorted(found, key=lambda row: found[row].mean, reverse=not lower_is_better(column))
    if not order:
        return []
    top = found[order[0]]

    def close(row: str) -> bool:
        error = math.hypot(top.standard_error, found[row].standard_error)
        return abs(top.mean - found[row].mean) <= 2 * error

    return [order[0], *(row for row in order[1:] if close(row))]


# ------------------------------------------------------------------ findings


@dataclass(frozen=True)
class Claim:
    """A paper's finding: one row is better than another in a column."""

    about: Words
    better: str
    worse: str
    column: str

    @property
    def named(self) -> Words:
        """The claim with its column, unless the claim already names it, and the rows compared."""
        column = "" if self.column in self.about.en else f"{self.column}; "
        return Words(
            f"{self.about.en} ({column}{self.better} vs. {self.worse})",
            f"{self.about.ko} ({column}{self.better} 대 {self.worse})",
        )

    def verdict(self, results: StudyResults) -> Words:
        """Whether the direction agrees, by the error of the difference; one seed has no error."""
        a, b = (results.at(row, self.column) for row in (self.better, self.worse))
        if a is None or b is None:
            return Words("not measured here", "여기서는 재지 않음")
        gain = (b.mean - a.mean) if lower_is_better(self.column) else (a.mean - b.mean)
        error = math.hypot(a.standard_error, b.standard_error)
        size = f"{'+' if gain >= 0 else '−'}{number(abs(gain))}"
        if min(results.seeds(row, self.column) for row in (self.better, self.worse)) < 2:
            return Words(
                f"cannot tell ({size}, one seed, spread unknown)",
                f"판단할 수 없음 ({size}, 시드 하나라 편차를 모름)",
            )
        direction = Words("agrees", "일치")
        if abs(gain) <= 2 * error:
            direction = Words("within noise", "오차 범위 안")
        elif gain < 0:
            direction = Words("does not at this scale", "이 규모에서는 불일치")
        return Words(
            f"{direction.en} ({size}, error ± {number(error)})",
            f"{direction.ko} ({size}, 오차 ± {number(error)})",
        )


def claims_of(study: Study, results: StudyResults) -> Iterator[Claim]:
    """The findings of papers.toml with the rows and columns that were measured."""
    for finding in study.findings:
        about = Words(*finding["about"])
        for column in _columns(finding["column"], results):
            for better, worse in _rows(finding, results):
                yield Claim(about.format(column=column, row=better), better, worse, column)


def _columns(wanted: str | int, results: StudyResults) -> list[str]:
    measured = [column for column in results.columns if column not in DESCRIBES]
    if isinstance(wanted, int):
        return measured[wanted:][:1] if wanted < len(measured) else []
    if wanted == "all":
        return measured
    if wanted == "scores":
        return [column for column in measured if not lower_is_better(column)]
    role = re.match(r"{(.+)}", wanted)
    if not role:
        return [wanted]
    # the first task of the role that was measured: they depend on the given data sets
    names = [wanted.format(**{role[1]: name}) for name in ROLE_COLUMNS[role[1]]]
    return [name for name in names if name in measured][:1]


def _rows(finding: Mapping[str, Any], results: StudyResults) -> list[tuple[str, str]]:
    rows = results.rows
    better, worse = finding["better"], finding.get("worse", "")
    if better == "next":
        return list(zip(rows[1:], rows, strict=False))
    if better == "each":
        return [(row, worse) for row in rows if row != worse]
    return [(rows[better], rows[worse]) if isinstance(better, int) else (better, worse)]


# ------------------------------------------------------------------ figures


def dot_figure(results: StudyResults) -> str:
    """A dot with an error bar per row and a panel per column, which makes noise visible."""
    panels = []
    for column in results.columns:
        values = [results.at(row, column) for row in results.rows]
        spans = [(v.mean - v.deviation, v.mean + v.deviation) for v in values if v]
        low, high = min(start for start, _ in spans), max(end for _, end in spans)
        panels.append((column, values, low, high))
    about = f"{', '.join(results.columns)} by {', '.join(results.rows)}"
    dots = render(
        "studies/dots.jinja", rows=results.rows, panels=panels, about=about, number=number
    )
    return standalone_svg(dots.replace("\n", ""))


def curve_figure(
    results: StudyResults,
    across: str,
    x: Callable[[str], float | None],
    up: str,
    *,
    even: bool = False,
    only: bool = False,
) -> str:
    """A line per column (`only` scores in percent) over the number that `x` reads from a row."""
    lines: dict[str, Line] = {}
    for column in (c for c in results.columns if not (only and lower_is_better(c))):
        points = sorted(
            (at, value.mean, value.deviation)
            for row in results.rows
            if (at := x(row)) is not None and (value := results.at(row, column)) is not None
        )
        lines[column] = Line([(at, mean) for at, mean, _ in points], [d for *_, d in points])
    return standalone_svg(chart(lines, across, up, size=(820, 340), even=even))


# ------------------------------------------------------------------ tables and pages

Table = tuple[list[str], list[list[str]]]


def result_rows(results: StudyResults, theirs: Mapping[str, Mapping[str, float]]) -> Table:
    """Header and rows of the table: our results with their spread, then the paper's columns."""
    paper = list(dict.fromkeys(column for row in theirs.values() for column in row))
    head = ["", *results.columns, *(f"paper: {column}" for column in paper)]
    rows = []
    for row in dict.fromkeys([*results.rows, *theirs]):
        published = theirs.get(row, {})
        numbers = (number(published[c]) if c in published else "–" for c in paper)
        rows.append([row, *(results.shown(row, c) for c in results.columns), *numbers])
    return head, rows


def detail_rows(results: StudyResults, group: str) -> Table:
    """The parts of a group, one per row, such as the phenomena of BLiMP."""
    columns = results.details[group]
    rows = [row for row in results.rows if any(results.at(row, c) for c in columns)]
    body = [[c.split(": ", 1)[1], *(results.shown(row, c) for row in rows)] for c in columns]
    return [group, *rows], body


def write_pages(
    study: Study, scale: str, seeds: Sequence[int], records: Sequence[Mapping[str, Any]], out: Path
) -> dict[str, Any]:
    """Writes the reports of the finished cells, and returns what results.json has."""
    results = StudyResults(records)
    facts = {
        "study": study.name,
        "paper": study.paper,
        "scale": scale,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_name(),
        "version": __version__,
        "seeds": list(seeds),
        "rows": {
            row: {
                c: {"mean": v.mean, "std": v.deviation, "seeds": results.seeds(row, c)}
                for c in results.table[row]
                if (v := results.at(row, c))
            }
            for row in results.rows
        },
        "models": {row: results.facts(row) for row in results.rows},
        "cells": list(records),
    }
    fill = study.part("notes")
    claims = [(claim.named, claim.verdict(results)) for claim in claims_of(study, results)]
    page: dict[str, Any] = {
        "study": study,
        "main": result_rows(results, study.theirs),
        "details": [detail_rows(results, group) for group in results.details],
        "claims": claims,
        "notes": [_about(facts, results), *(fill(results, study.notes) if fill else study.notes)],
    }
    facts["claims"] = [{"claim": a.en, "verdict": v.en} for a, v in claims]
    figure = (study.part("figure") or dot_figure)(results)
    lead = f"{study.about.en}. {study.about.ko}. {study.paper}."
    html = dict(title=study.name, lead=lead, figure=SVG_STYLE.sub("", figure))
    write_json(out / "results.json", facts)
    write_text(out / "figure.svg", figure)
    write_text(out / "report.md", render("studies/markdown.jinja", **page).rstrip("\n") + "\n")
    write_text(out / "report.html", render("studies/page.jinja", **page, **html))
    return facts


def _about(facts: Mapping[str, Any], results: StudyResults) -> Words:
    """Date, machine, seeds, and the sizes of the models."""
    models = [results.facts(row) for row in results.rows]

    def span(name: str) -> str:
        values = sorted({one[name] for one in models if name in one})
        ends = [short_number(float(f"{v:.2g}")) for v in (values[:1] + values[-1:])]
        return "–".join(dict.fromkeys(ends)) or "0"

    where = f"{facts['date']}, {facts['machine']}, malmoi {facts['version']}"
    counts = {results.seeds(row, column) for row in results.rows for column in results.table[row]}
    most = max(counts)
    fewest = "" if min(counts) == most else f"{min(counts)}–"
    return Words(
        f"Scale {facts['scale']}: {span('parameters')} weights, {span('tokens')} tokens, "
        f"{fewest}{plural(most, 'seed')} ({where}). ± is the standard deviation over seeds.",
        f"규모 {facts['scale']}: 가중치 {span('parameters')}개, 토큰 {span('tokens')}개, "
        f"시드 {fewest}{most}개 ({where}). ±는 시드에 따른 표준편차.",
    )
