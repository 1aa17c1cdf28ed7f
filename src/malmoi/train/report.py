"""report.html: the curves of a run and what it said on the way, in one file that needs nothing else."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malmoi.checkpoint.atomic import write_text
from malmoi.train.log import read_rows
from malmoi.train.recipe import Recipe

STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--soft:#6b7385;--line:#d9dee8;--paper:#fbfbfd;--a:#2458c5;--b:#c2571a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#98a0b3;--line:#333b4d;--paper:#141820;
--a:#7ea6ff;--b:#ff9e64}}
body{font:16px/1.55 system-ui,"Noto Sans KR","NanumGothic",sans-serif;color:var(--ink);background:var(--paper);
max-width:860px;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.7rem;margin:0 0 .2rem}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}
p.lead{color:var(--soft);margin:.2rem 0 1rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.35rem .6rem;text-align:left;
border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--soft);font-weight:500}
svg{width:100%;height:auto;overflow:visible}svg text{fill:var(--soft);font-size:12px}
pre,code{font:14px/1.5 ui-monospace,monospace}
pre{background:color-mix(in srgb,var(--ink) 5%,transparent);padding:.8rem 1rem;border-radius:8px;overflow:auto}
"""
Points = list[tuple[float, float]]


def page(title: str, lead: str, body: str) -> str:
    """A whole page around some sections."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>{body}</html>\n'
    )


def chart(series: dict[str, Points], across: str, up: str, width: int = 820, height: int = 300) -> str:
    """Lines as SVG with axes and a legend; one colour each, in order."""
    points = [p for line in series.values() for p in line]
    if len(points) < 2:
        return ""
    left, right, top, bottom = 52, 12, 14, 34
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    spread_x, spread_y = (x1 - x0) or 1.0, (y1 - y0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across_ = left + (x - x0) / spread_x * (width - left - right)
        return across_, top + (y1 - y) / spread_y * (height - top - bottom)

    parts = [_grid(x0, x1, y0, y1, place, width - right)]
    for i, (name, line) in enumerate(series.items()):
        colour, dash = ("var(--a)", "var(--b)", "var(--soft)")[i % 3], "" if i < 3 else ' stroke-dasharray="4 3"'
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        parts.append(
            f'<text x="{width - right}" y="{top + 14 * i + 4}" text-anchor="end" style="fill:{colour}">'
            f"{html.escape(name)}</text>"
        )
    label = f'<text x="{left}" y="{height - 2}">{html.escape(across)}</text><text x="0" y="10">{html.escape(up)}</text>'
    about = html.escape(f"{up} by {across}: {', '.join(series)}")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{about}">{"".join(parts)}{label}</svg>'


def _grid(x0: float, x1: float, y0: float, y1: float, place: Any, edge: float) -> str:
    lines = []
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        x, y = place(x0, value)
        lines.append(f'<line x1="{x:.0f}" x2="{edge}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        lines.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        mark = x0 + (x1 - x0) * i / 4
        x, y = place(mark, y0)
        lines.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{_short(mark)}</text>')
    return "".join(lines)


def _short(number: float) -> str:
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{sign}"
    return f"{number:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cells(row: Sequence[object], kind: str) -> str:
        return "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(head, 'th')}</tr>{body}</table>"


def curves(rows: Sequence[dict[str, Any]]) -> str:
    """Training and validation loss by tokens."""
    series = {
        "training": [(r["tokens"], r["loss"]) for r in rows if "loss" in r],
        "validation": [(r["tokens"], r["valid_loss"]) for r in rows if "valid_loss" in r],
    }
    return chart({name: line for name, line in series.items() if line}, "tokens", "loss")


def write_report(out: Path, recipe: Recipe) -> None:
    """The report of a pre-training run, from its metrics.jsonl."""
    rows = read_rows(out / "metrics.jsonl") if (out / "metrics.jsonl").is_file() else []
    valid = [r for r in rows if "valid_loss" in r]
    facts = [(k.replace("_", " "), f"{v:,.4g}") for k, v in (valid[-1] if valid else {}).items() if k != "sample"]
    said = [(f"{r['step']:,}", r["sample"]) for r in valid if r.get("sample")]
    body = f"<h2>Loss</h2>{curves(rows)}<h2>At the end</h2>{table(('measure', 'value'), facts)}"
    if said:
        body += f"<h2>What it said on the way</h2>{table(('step', 'sample'), said[:: max(1, len(said) // 8)])}"
    settings = html.escape(recipe.to_json())
    body += f"<h2>The recipe</h2><details><summary>every setting</summary><pre>{settings}</pre></details>"
    write_text(out / "report.html", page(f"A run of {recipe.name}", recipe.about, body))
