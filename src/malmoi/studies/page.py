"""A study's folder: results.json, figure.svg, report.md and report.html, in both languages."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from malmoi import __version__
from malmoi.messages import plural
from malmoi.report.chart import short_number
from malmoi.report.page import html_page, html_table, machine_name
from malmoi.studies.grid import Study, StudyPlan
from malmoi.studies.table import Claim, StudyResults, Words, detail_rows, result_rows
from malmoi.system.files import write_json, write_text

SVG_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # the page defines the same colours


Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class StudyPage:
    """The contents of a report page, in Markdown or HTML."""

    study: Study
    tables: Sequence[Table]
    claims: Sequence[tuple[Words, Words]]  # the paper's finding, and our verdict
    notes: Sequence[Words]
    figure: str


def write_pages(
    study: Study, plan: StudyPlan, records: Sequence[Mapping[str, Any]], out: Path
) -> dict[str, Any]:
    """Writes the reports of the finished cells, and returns the path of results.json."""
    results = StudyResults(records)
    facts = {
        "study": study.name,
        "paper": study.paper,
        "scale": plan.scale.name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_name(),
        "version": __version__,
        "seeds": list(plan.seeds),
        "rows": {
            row: {column: _summary(results, row, column) for column in results.table[row]}
            for row in results.rows
        },
        "models": {row: results.facts(row) for row in results.rows},
        "cells": list(records),
    }
    tables = [result_rows(results, study.theirs)]
    tables += [detail_rows(results, group) for group in results.details]
    page = StudyPage(
        study,
        tables,
        [(_named(claim), claim.verdict(results)) for claim in study.claims(results)],
        [_about(facts, results), *study.notes(results)],
        study.figure(results),
    )
    facts["claims"] = [{"claim": a.en, "verdict": v.en} for a, v in page.claims]
    write_json(out / "results.json", facts)
    write_text(out / "figure.svg", page.figure)
    write_text(out / "report.md", _markdown(page))
    write_text(out / "report.html", _html(page))
    return facts


def _named(claim: Claim) -> Words:
    """The claim with its column, unless the claim already names it, and the rows compared."""
    column = "" if claim.column in claim.about.en else f"{claim.column}; "
    return Words(
        f"{claim.about.en} ({column}{claim.better} vs. {claim.worse})",
        f"{claim.about.ko} ({column}{claim.better} 대 {claim.worse})",
    )


def _summary(results: StudyResults, row: str, column: str) -> dict[str, float]:
    found = results.at(row, column)
    assert found is not None
    return {"mean": found.mean, "std": found.deviation, "seeds": results.seeds(row, column)}


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


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _markdown(page: StudyPage) -> str:
    study = page.study
    parts = [
        f"# {study.name}: {study.about.en}\n",
        f"{study.about.ko}. {study.paper}.\n",
        markdown_table(*page.tables[0]),
        f"![{study.caption.en}](figure.svg)\n",
        f"{study.caption.en}\n\n{study.caption.ko}\n",
        "## Expected and found / 예상과 결과\n",
        "".join(
            f"- {about.en}: **{verdict.en}**.\n  {about.ko}: **{verdict.ko}**.\n"
            for about, verdict in page.claims
        ),
        "\n\n".join(f"{_lines(one.en)}\n\n{_lines(one.ko)}" for one in page.notes) + "\n",
        *(markdown_table(*table) for table in page.tables[1:]),
    ]
    return "\n".join(parts)


def _lines(text: str) -> str:
    """The first line of a note as a sentence, the others as a list."""
    first, *others = text.split("\n")
    return "\n".join((first, *([""] if others else []), *(f"- {one}" for one in others)))


def _html(page: StudyPage) -> str:
    def paragraph(text: str) -> str:
        return "<br>".join(html.escape(line) for line in text.split("\n"))

    def both(words: Words) -> str:
        return f'<p>{paragraph(words.en)}</p><p lang="ko">{paragraph(words.ko)}</p>'

    study = page.study
    verdicts = "".join(
        f"<li>{html.escape(a.en)}: <b>{html.escape(v.en)}</b>."
        f'<br><span lang="ko">{html.escape(a.ko)}: <b>{html.escape(v.ko)}</b>.</span></li>'
        for a, v in page.claims
    )
    first, *others = (html_table(*table) for table in page.tables)
    body = (
        f"{first}{SVG_STYLE.sub('', page.figure)}{both(study.caption)}"
        f"<h2>Expected and found / 예상과 결과</h2><ul>{verdicts}</ul>"
        f"{''.join(map(both, page.notes))}{''.join(others)}"
    )
    lead = f"{study.about.en}. {study.about.ko}. {study.paper}."
    return html_page(study.name, lead, body)
