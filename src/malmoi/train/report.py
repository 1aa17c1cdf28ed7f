"""report.html: the curves of a run and what it said on the way, in one file that needs nothing else."""

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from malmoi.disk import write_text
from malmoi.train.chart import Line, Points, chart, short, smooth
from malmoi.train.log import clock, read_rows
from malmoi.train.pace import verdict
from malmoi.train.recipe import Recipe

STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--soft:#5f6879;--line:#e0e4ec;--paper:#fbfbfd;--card:#fff;
--a:#2458c5;--b:#b94a12;--c:#2b7a4b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#9aa3b6;--line:#2c3444;--paper:#12161e;--card:#1a202b;
--a:#7ea6ff;--b:#ff9e64;--c:#74cf98}}
body{font:16px/1.6 system-ui,"Noto Sans KR","NanumGothic","Apple SD Gothic Neo","Malgun Gothic",sans-serif;
color:var(--ink);background:var(--paper);max-width:860px;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.75rem;line-height:1.25;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2.4rem 0 .7rem}
p.lead{color:var(--soft);margin:.2rem 0 1.2rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.4rem .6rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}
.facts{display:grid;grid-template-columns:repeat(var(--columns),1fr);gap:.7rem;margin:1.4rem 0 0}
@media(max-width:700px){.facts{--columns:3!important}}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.65rem .85rem}
.facts dt{color:var(--soft);font-size:.82rem}.facts dd{margin:0;font-size:1.2rem;font-variant-numeric:tabular-nums}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:1rem 2rem}
svg{width:100%;height:auto;overflow:visible}svg text{fill:var(--soft);font-size:12px}
summary{cursor:pointer;color:var(--soft)}pre,code{font:14px/1.5 ui-monospace,monospace}
pre{background:color-mix(in srgb,var(--ink) 5%,transparent);padding:.8rem 1rem;border-radius:8px;overflow:auto}
"""


def page(title: str, lead: str, body: str) -> str:
    """A whole page around some sections."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>{body}</html>\n'
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Numbers worth a glance, as cards."""
    cards = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in pairs)
    columns = len(pairs) if len(pairs) <= 7 else -(-len(pairs) // 2)
    return f'<dl class="facts" style="--columns:{columns}">{cards}</dl>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cells(row: Sequence[object], kind: str) -> str:
        return "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(head, 'th')}</tr>{body}</table>"


# ------------------------------------------------------------------ a pre-training run


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Training and validation loss by tokens; the single steps are a shadow of their mean."""
    steps: Points = [(r["tokens"], r["loss"]) for r in rows if "loss" in r]
    valid: Points = [(r["tokens"], r["valid_loss"]) for r in rows if "valid_loss" in r]
    lines: dict[str, Points | Line] = {
        "steps": Line(steps, beside="training"),
        "training": smooth(steps),
        "validation": valid,
    }
    return chart(lines, "tokens", "loss")


def _course(rows: Sequence[Mapping[str, Any]]) -> str:
    """The learning rate and the speed, side by side."""
    rates: Points = [(r["tokens"], r["lr"]) for r in rows if "lr" in r]
    speeds: Points = [(r["tokens"], r["tokens_per_second"]) for r in rows if r.get("tokens_per_second")]
    both: dict[str, Points | Line] = {"steps": Line(speeds, beside="speed"), "speed": smooth(speeds)}
    small = (
        chart({"learning rate": rates}, "tokens", "learning rate", 400, 180),
        chart(both, "tokens", "tokens a second", 400, 180),
    )
    return f'<div class="pair">{"".join(f"<div>{svg}</div>" for svg in small if svg)}</div>'


def _numbers(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[tuple[str, str]]:
    """What the run came to."""
    valid = [r for r in rows if "valid_loss" in r]
    known = ("step", "tokens", "seconds", "sample")
    measures = [(k.replace("_", " "), f"{v:.4g}") for k, v in (valid[-1] if valid else {}).items() if k not in known]
    last: Mapping[str, Any] = rows[-1] if rows else {"step": 0, "tokens": 0, "seconds": 0.0}
    return [
        *measures,
        ("steps", f"{last['step']:,}"),
        ("tokens", short(last["tokens"])),
        ("time", clock(last["seconds"])),
        ("shape", f"{recipe.model.depth} × {recipe.model.width}"),
        ("vocabulary", f"{recipe.model.vocab:,}"),
    ]


def _warning(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> str:
    """One sentence where the run learnt next to nothing."""
    last: Mapping[str, Any] = next((r for r in reversed(rows) if "valid_loss" in r), {})
    if "guessing_loss" not in last:
        return ""
    said = verdict(recipe, last["step"], last["valid_loss"], last["guessing_loss"])
    return f"<p><strong>{html.escape(said)}</strong></p>"


def _said(rows: Sequence[Mapping[str, Any]]) -> str:
    """Samples from all over the run, the first and the last among them; a repeated one is shown once."""
    said = [(f"{r['step']:,}", r["sample"]) for r in rows if r.get("sample")]
    fresh = said[:1] + [now for before, now in pairwise(said) if now[1] != before[1]]
    last, count = len(fresh) - 1, min(len(fresh), 8)
    shown = [fresh[round(i * last / max(1, count - 1))] for i in range(count)]
    return f"<h2>What it said on the way</h2>{table(('step', 'sample'), shown)}" if shown else ""


def write_report(out: Path, recipe: Recipe) -> None:
    """The report of a pre-training run, from its metrics.jsonl."""
    rows = read_rows(out / "metrics.jsonl")
    body = f"{facts(_numbers(rows, recipe))}{_warning(rows, recipe)}"
    body += f"<h2>Loss</h2>{curves(rows)}{_course(rows)}{_said(rows)}"
    settings = html.escape(recipe.to_json())
    body += f"<h2>The recipe</h2><details><summary>every setting</summary><pre>{settings}</pre></details>"
    write_text(out / "report.html", page(f"A run of {recipe.name}", recipe.about, body))
