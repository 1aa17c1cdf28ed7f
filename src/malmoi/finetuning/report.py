"""report.html of a fine-tuning run: metrics, curves, confusion matrix and predictions."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from malmoi.evaluation.kinds import Outcome, head_kind, metric_names
from malmoi.evaluation.task import Task
from malmoi.metrics import LabelScore, confusion, label_scores, mean_with_error
from malmoi.report.chart import chart
from malmoi.report.page import fact_cards, html_page, html_table, words
from malmoi.system.files import write_text
from malmoi.training.log import read_metrics

MAX_EXAMPLES = 200  # predictions on the page; all of them are in predictions.jsonl
MAX_LABELS = 40  # beyond this, a confusion matrix is unreadable


def task_report(
    task: Task, labels: Sequence[str], outcome: Outcome, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What report.json has of the judged rows."""
    return {"task": task.name, "kind": task.kind, "metrics": outcome.metrics}


def add_to_card(out: Path, task: str, metrics: Mapping[str, float], protocol: str) -> None:
    """Adds the metrics, and which rows they are of, to the model card."""
    card = out / "README.md"
    if not card.is_file():  # an adapter's folder has none
        return
    mark = "\n## Evaluation\n"
    table = "".join(f"| {name} | {value:.4f} |\n" for name, value in metrics.items())
    before = card.read_text("utf-8").partition(mark)[0]
    words = f"Fine-tuned for {task}. {protocol}"
    write_text(card, f"{before}{mark}\n{words}\n\n| metric | value |\n|---|---|\n{table}")


def write_task_report(
    out: Path,
    task: Task,
    labels: Sequence[str],
    outcome: Outcome,
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
) -> None:
    kind = head_kind(task)
    measure = metric_names(task)[0]
    measured = [(name.replace("_", " "), f"{value:.4f}") for name, value in outcome.metrics.items()]
    parts = [fact_cards([*measured, ("examples", f"{len(rows):,}")])]
    if len(runs) > 1:
        parts.append(f"<h2>Every run</h2>{_runs(runs, measure)}")
    parts.append(_curves(out, measure))
    if kind.text_labels:
        scores = label_scores(outcome.labels, outcome.predictions, labels)
        parts.append(f"<h2>Each label</h2>{_label_table(scores)}")
    if kind.exclusive and len(labels) <= MAX_LABELS:
        matrix = confusion(outcome.labels, outcome.predictions, labels).tolist()
        parts.append(f"<h2>Confusion matrix</h2>{confusion_table(labels, matrix)}")
    parts.append(_examples(rows))
    write_text(
        out / "report.html", html_page(f"Fine-tuned: {task.name}", task.about, "".join(parts))
    )


def _runs(runs: Sequence[Mapping[str, Any]], measure: str) -> str:
    found = mean_with_error([run[measure] for run in runs])
    rows = [
        (run["seed"], f"{run['lr']:g}", run["batch"], f"{run['epochs']:g}", f"{run[measure]:.4f}")
        for run in runs
    ]
    mean = (
        f"<p>{html.escape(measure)} {found.mean:.4f} ± {found.deviation:.4f} over {len(runs)} "
        f"runs</p>"
    )
    return mean + html_table(("seed", "lr", "batch", "epochs", measure), rows)


def _label_table(scores: Mapping[str, LabelScore]) -> str:
    rows = [
        (name, f"{one.precision:.3f}", f"{one.recall:.3f}", f"{one.f1:.3f}", f"{one.support:,}")
        for name, one in scores.items()
    ]
    return html_table(("label", "precision", "recall", "F1", "support"), rows)


def _curves(out: Path, measure: str) -> str:
    rows = read_metrics(out / "metrics.jsonl") if (out / "metrics.jsonl").is_file() else []
    loss = chart(
        {"training": [(r["step"], r["loss"]) for r in rows if "loss" in r]}, "steps", "loss"
    )
    judged = [(r["step"], r[measure]) for r in rows if measure in r]
    parts = [f"<h2>Loss</h2>{loss}"] if loss else []
    if len(judged) > 1:
        parts.append(
            f"<h2>{html.escape(measure)}</h2>{chart({'development': judged}, 'steps', measure)}"
        )
    return "".join(parts)


def confusion_table(labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> str:
    """Gold labels in rows, predicted ones in columns; shaded by the share of the row."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in labels)
    body = []
    for name, row in zip(labels, matrix, strict=True):
        total = sum(row) or 1
        cells = "".join(f'<td style="background:{_shade(n / total)}">{n:,}</td>' for n in row)
        body.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    note = f'<p class="lead">{words("Rows: label; columns: prediction.")}</p>'
    return f"{note}<table><tr><th></th>{head}</tr>{''.join(body)}</table>"


def _shade(share: float) -> str:
    return f"color-mix(in srgb,var(--a) {round(55 * share)}%,transparent)"


def _examples(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of predictions, errors first, the most confident on top."""
    wrong = sorted((r for r in rows if not is_correct(r)), key=lambda r: -r["score"])
    fine = [r for r in rows if is_correct(r)]
    shown = [*wrong[: MAX_EXAMPLES // 2], *fine[: MAX_EXAMPLES // 2]]
    paired = any("pair" in row for row in rows)
    cells = [_cells(row, paired=paired) for row in shown]
    note = f"{len(wrong):,} of {len(rows):,} are wrong; all predictions are in predictions.jsonl."
    head = ("", "text", *(["pair"] if paired else []), "label", "prediction", "score")
    return f'<h2>Examples</h2><p class="lead">{note}</p>{html_table(head, cells)}'


def _cells(row: Mapping[str, Any], *, paired: bool) -> tuple[str, ...]:
    pair = (_cut(row.get("pair", "")),) if paired else ()
    return (
        "" if is_correct(row) else "✗",
        _cut(row["text"]),
        *pair,
        _cut(row["label"]),
        _cut(row["prediction"]),
        f"{row['score']:.3f}",
    )


def is_correct(row: Mapping[str, Any]) -> bool:
    gold = row["label"]
    said = row["prediction"]
    if isinstance(gold, float):
        return bool(abs(gold - said) < 0.5)
    if isinstance(gold, list) and isinstance(said, str):  # answers: any of the gold texts is right
        return said in gold or (not gold and not said)
    return bool(list(gold) == list(said) if isinstance(gold, list | tuple) else gold == said)


def _cut(value: Any, most: int = 160) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = f"{value:.3f}" if isinstance(value, float) else text
    return text if len(text) <= most else text[: most - 1] + "…"
