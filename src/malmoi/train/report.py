"""report.html: the curves of a run and what it said on the way, in one file that needs nothing else."""

import html
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from malmoi.checkpoint.atomic import write_text
from malmoi.train.log import clock, read_rows
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
COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--soft)")
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 34  # room around a chart
MOST = 400  # points of a line: more cannot be seen
Points = list[tuple[float, float]]


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


# ------------------------------------------------------------------ charts


def chart(
    series: Mapping[str, Points],
    across: str,
    up: str,
    width: int = 820,
    height: int = 300,
    faint: Collection[str] = (),
) -> str:
    """Lines as SVG with axes and a legend; one colour each, in order. A faint one is a shadow without a legend."""
    lines = {name: thin(line) for name, line in series.items() if line}
    points = [p for line in lines.values() for p in line]
    if len(points) < 2:
        return ""
    right = max(x for x, _ in points)
    ticks_x = [x for x in ticks(min(x for x, _ in points), right) if x <= right]
    ticks_y = ticks(min(y for _, y in points), max(y for _, y in points))
    frame = _Frame((ticks_x[0], max(right, ticks_x[-1])), (ticks_y[0], ticks_y[-1]), width, height)
    strong = [name for name in lines if name not in faint]
    drawn = "".join(_line(frame, line, name, strong) for name, line in lines.items())
    about = html.escape(f"{up} by {across}: {', '.join(strong)}")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{about}">{_grid(frame, ticks_x, ticks_y)}{drawn}'
        f"{_legend(strong, up, width)}"
        f'<text x="{width - RIGHT}" y="{height - 2}" text-anchor="end">{html.escape(across)}</text></svg>'
    )


class _Frame:
    """Where a value lies on the picture."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], width: int, height: int) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height

    def place(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x, self.y
        inner, tall = self.width - LEFT - RIGHT, self.height - TOP - BOTTOM
        return LEFT + (x - x0) / ((x1 - x0) or 1) * inner, TOP + (y1 - y) / ((y1 - y0) or 1) * tall


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * about >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _grid(frame: _Frame, ticks_x: Sequence[float], ticks_y: Sequence[float]) -> str:
    parts = []
    for value in ticks_y:
        x, y = frame.place(frame.x[0], value)
        parts.append(f'<line x1="{x:.0f}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks_x:
        x, y = frame.place(value, frame.y[0])
        parts.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{short(value)}</text>')
    return "".join(parts)


def _line(frame: _Frame, line: Points, name: str, strong: Sequence[str]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (frame.place(*p) for p in line))
    if name not in strong:
        return f'<polyline points="{path}" fill="none" stroke="{COLOURS[0]}" stroke-opacity=".25"/>'
    colour = COLOURS[strong.index(name) % len(COLOURS)]
    x, y = frame.place(*line[-1])
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    )


def _legend(names: Sequence[str], up: str, width: int) -> str:
    parts, at = [f'<text x="0" y="12">{html.escape(up)}</text>'], width - RIGHT
    for i, name in reversed(list(enumerate(names))) if len(names) > 1 else ():
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<text x="{at}" y="12" text-anchor="end" style="fill:{colour}">{html.escape(name)}</text>')
        at -= 8 * len(name) + 14
    return "".join(parts)


def short(number: float) -> str:
    """1,500,000 → 1.5M."""
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{sign}"
    if 0 < abs(number) < 1e-3:
        power = math.floor(math.log10(abs(number)))
        return f"{number / 10.0**power:.3g}e{power}"
    return f"{number:.4g}"


def thin(line: Points) -> Points:
    """At most so many points, the last one among them."""
    every = -(-len(line) // MOST)
    return line if every <= 1 else [*line[:-1:every], line[-1]]


def smooth(line: Points, share: float = 0.02) -> Points:
    """A noisy line as the mean of a few points around each, fewer towards the ends."""
    sums = list(accumulate((y for _, y in line), initial=0.0))
    result = []
    for i, (x, _) in enumerate(line):
        half = min(i, len(line) - 1 - i, int(share * len(line)))
        result.append((x, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return result


# ------------------------------------------------------------------ a pre-training run


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Training and validation loss by tokens; the single steps are a shadow of their mean."""
    steps: Points = [(r["tokens"], r["loss"]) for r in rows if "loss" in r]
    valid: Points = [(r["tokens"], r["valid_loss"]) for r in rows if "valid_loss" in r]
    return chart({"steps": steps, "training": smooth(steps), "validation": valid}, "tokens", "loss", faint=("steps",))


def _course(rows: Sequence[Mapping[str, Any]]) -> str:
    """The learning rate and the speed, side by side."""
    rates: Points = [(r["tokens"], r["lr"]) for r in rows if "lr" in r]
    speeds: Points = [(r["tokens"], r["tokens_per_second"]) for r in rows if r.get("tokens_per_second")]
    both = {"steps": speeds, "speed": smooth(speeds)}
    small = (
        chart({"learning rate": rates}, "tokens", "learning rate", 400, 180),
        chart(both, "tokens", "tokens a second", 400, 180, faint=("steps",)),
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
    body = f"{facts(_numbers(rows, recipe))}<h2>Loss</h2>{curves(rows)}{_course(rows)}{_said(rows)}"
    settings = html.escape(recipe.to_json())
    body += f"<h2>The recipe</h2><details><summary>every setting</summary><pre>{settings}</pre></details>"
    write_text(out / "report.html", page(f"A run of {recipe.name}", recipe.about, body))
