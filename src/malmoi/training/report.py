"""report.html: a run's curves and samples in one self-contained file."""

import html
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from malmoi.messages import msg, plural, translate
from malmoi.report.chart import ChartPoints, Line, chart, page_chart, short_number, smooth_points
from malmoi.report.console import format_duration
from malmoi.report.page import fact_cards, heading, html_page, html_table, machine_name, words
from malmoi.system.files import write_text
from malmoi.system.run_folder import read_metrics
from malmoi.training.budget import verdict
from malmoi.training.recipe import BUDGETS, Recipe

# ------------------------------------------------------------------ a pre-training run


def loss_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Chart of training and validation loss by tokens; single steps are faint behind their mean."""
    steps: ChartPoints = [(r["tokens"], r["loss"]) for r in rows if "loss" in r]
    valid: ChartPoints = [(r["tokens"], r["valid_loss"]) for r in rows if "valid_loss" in r]
    training = translate("training")
    lines: dict[str, ChartPoints | Line] = {
        "steps": Line(steps, beside=training),
        training: smooth_points(steps),
        translate("validation"): valid,
    }
    return page_chart(lines, translate("tokens"), translate("loss"))


def _speed_charts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Charts of the learning rate and the speed, side by side."""
    rates: ChartPoints = [(r["tokens"], r["lr"]) for r in rows if "lr" in r]
    speeds: ChartPoints = [
        (r["tokens"], r["tokens_per_second"]) for r in rows if r.get("tokens_per_second")
    ]
    both: dict[str, ChartPoints | Line] = {
        "steps": Line(speeds, beside="speed"),
        "speed": smooth_points(speeds),
    }
    small = (
        chart({"": rates}, translate("tokens"), translate("learning rate"), (400, 180)),
        chart(both, translate("tokens"), translate("tokens per second"), (400, 180)),
    )
    return f'<div class="pair">{"".join(f"<div>{svg}</div>" for svg in small if svg)}</div>'


def _numbers(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> list[tuple[str, str]]:
    """The run's final metrics."""
    valid = [r for r in rows if "valid_loss" in r]
    known = ("step", "tokens", "seconds", "sample")
    final = valid[-1].items() if valid else ()
    measures = [(k.replace("_", " "), f"{v:.4g}") for k, v in final if k not in known]
    last: Mapping[str, Any] = rows[-1] if rows else {"step": 0, "tokens": 0, "seconds": 0.0}
    return [
        *measures,
        ("steps", f"{last['step']:,}"),
        ("tokens", short_number(last["tokens"])),
        ("time", format_duration(last["seconds"])),
        ("shape", f"{recipe.model.depth} × {recipe.model.width}"),
        ("vocabulary", f"{recipe.model.vocab:,}"),
    ]


def _warning(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> str:
    """A warning if the run learned almost nothing."""
    last: Mapping[str, Any] = next((r for r in reversed(rows) if "valid_loss" in r), {})
    if "guessing_loss" not in last:
        return ""
    training = next((r["loss"] for r in reversed(rows) if "loss" in r), math.inf)
    losses = (last["valid_loss"], last["guessing_loss"], training)
    message = verdict(recipe, last["step"], *losses, last.get("epochs", 1.0))
    return f"<p><strong>{words(message)}</strong></p>"


def _samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """Samples from the whole run including the first and last, without repetitions."""
    samples = [(f"{r['step']:,}", r["sample"]) for r in rows if r.get("sample")]
    fresh = samples[:1] + [now for before, now in pairwise(samples) if now[1] != before[1]]
    last = len(fresh) - 1
    count = min(len(fresh), 8)
    shown = [fresh[round(i * last / max(1, count - 1))] for i in range(count)]
    return heading("Samples") + html_table(("step", "sample"), shown) if shown else ""


def write_report(out: Path, recipe: Recipe, more: str = "") -> None:
    """Writes the report of a pre-training run from its metrics.jsonl; `more` is a section."""
    rows = read_metrics(out / "metrics.jsonl")
    body = f"{fact_cards(_numbers(rows, recipe))}{_warning(rows, recipe)}"
    body += (
        f"{heading('Learning curve')}{loss_chart(rows)}{_speed_charts(rows)}{_samples(rows)}{more}"
    )
    settings = f"<pre>{html.escape(recipe.to_json())}</pre>"
    body += heading("This run") + html_table(("what", "value"), _facts(out, recipe))
    body += f"<details><summary>{words('every setting')}</summary>{settings}</details>"
    write_text(
        out / "report.html",
        html_page(msg("A run of {recipe}", recipe=recipe.name), recipe.about, body),
    )


def _facts(out: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """The run's settings and provenance, shown beside its curves."""
    c = recipe.train
    budget = next(plural(getattr(c, n), n.removesuffix("s")) for n in BUDGETS if getattr(c, n))
    return [
        (translate("date"), f"{datetime.now():%Y-%m-%d %H:%M}"),
        (translate("folder"), str(out)),
        (translate("learns by"), recipe.objective),
        (translate("budget"), translate(budget)),
        (translate("batch"), f"{c.batch} × {', '.join(str(n) for n, _ in recipe.phases)}"),
        (translate("learning rate"), f"{c.lr:g} ({c.optimizer}, {c.schedule})"),
        (translate("machine"), machine_name()),
    ]
