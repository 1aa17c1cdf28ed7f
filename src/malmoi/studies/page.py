"""A study's folder: results.json, figure.svg, report.md and report.html, in both languages."""

import html
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from malmoi import __version__
from malmoi.report.chart import short_number
from malmoi.report.page import html_page, html_table, machine_name
from malmoi.studies.grid import Study, StudyPlan
from malmoi.studies.table import StudyResults, Words, table_rows
from malmoi.system.files import write_json, write_text

SVG_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # the page has these colours itself


def write_pages(
    study: Study, plan: StudyPlan, records: Sequence[Mapping[str, Any]], out: Path
) -> dict[str, Any]:
    """Writes what the finished cells show, and returns results.json."""
    results = StudyResults(records)
    head, rows = table_rows(results, study.theirs)
    claims = [(claim.about, claim.verdict(results)) for claim in study.claims(results)]
    facts = {
        "study": study.name,
        "paper": study.paper,
        "scale": plan.scale.name,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_name(),
        "version": __version__,
        "seeds": list(plan.seeds),
        "rows": {
            row: {c: _summary(results, row, c) for c in results.table[row]}
            | {"models": results.facts(row)}
            for row in results.rows
        },
        "claims": [{"claim": about.en, "verdict": verdict.en} for about, verdict in claims],
        "cells": list(records),
    }
    figure = study.figure(results) if records else ""
    said = [_about(facts, results), *study.notes(results)]
    write_json(out / "results.json", facts)
    write_text(out / "figure.svg", figure)
    write_text(out / "report.md", _markdown(study, (head, rows), claims, said))
    write_text(out / "report.html", _html(study, (head, rows), claims, said, figure))
    return facts


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
    seeds = len(facts["seeds"])
    return Words(
        f"Scale {facts['scale']}: {span('parameters')} weights, {span('tokens')} tokens, "
        f"{seeds} seeds ({where}). ± is the standard deviation over seeds.",
        f"규모 {facts['scale']}: 가중치 {span('parameters')}개, 토큰 {span('tokens')}개, "
        f"시드 {seeds}개 ({where}). ±는 시드에 따른 표준편차.",
    )


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
Claims = Sequence[tuple[Words, Words]]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _markdown(study: Study, table: Table, claims: Claims, said: Sequence[Words]) -> str:
    parts = [
        f"# {study.name}: {study.about.en}\n",
        f"{study.about.ko}. {study.paper}.\n",
        markdown_table(*table),
        f"![{study.caption.en}](figure.svg)\n",
        f"{study.caption.en}\n\n{study.caption.ko}\n",
        "## Beside the paper / 논문과 비교\n",
        "".join(
            f"- {about.en}: **{verdict.en}**.\n  {about.ko}: **{verdict.ko}**.\n"
            for about, verdict in claims
        ),
        "\n\n".join(f"{one.en}\n\n{one.ko}" for one in said) + "\n",
    ]
    return "\n".join(parts)


def _html(study: Study, table: Table, claims: Claims, said: Sequence[Words], figure: str) -> str:
    def both(words: Words) -> str:
        return f'<p>{html.escape(words.en)}</p><p lang="ko">{html.escape(words.ko)}</p>'

    verdicts = "".join(
        f"<li>{html.escape(a.en)}: <b>{html.escape(v.en)}</b>."
        f'<br><span lang="ko">{html.escape(a.ko)}: <b>{html.escape(v.ko)}</b>.</span></li>'
        for a, v in claims
    )
    body = (
        f"{html_table(*table)}{SVG_STYLE.sub('', figure)}{both(study.caption)}"
        f"<h2>Beside the paper / 논문과 비교</h2><ul>{verdicts}</ul>{''.join(map(both, said))}"
    )
    lead = f"{study.about.en}. {study.about.ko}. {study.paper}."
    return html_page(study.name, lead, body)
