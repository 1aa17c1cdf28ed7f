"""report.html of a fine-tuning run: metrics, curves, confusion matrix and predictions."""

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.predictions import Outcome
from malmoi.evaluation.task import metric_names
from malmoi.finetuning.candidates import read_tried
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.protocol import file_names
from malmoi.finetuning.task_data import FinetuneData
from malmoi.inference.predictors import TAGS
from malmoi.messages import msg, translate
from malmoi.model import count_parameters
from malmoi.report.console import format_duration
from malmoi.report.page import machine_name
from malmoi.report.task_page import TaskPage
from malmoi.system.files import write_text
from malmoi.system.run_folder import read_metrics


def add_to_card(out: Path, work: FinetuneData, metrics: Mapping[str, float]) -> None:
    """Adds base model, task, labels, metrics and evaluation rows to the model card."""
    card = out / "README.md"
    if not card.is_file():  # an adapter's folder has none
        return
    mark = "\n## Evaluation\n"
    before = card.read_text("utf-8").partition(mark)[0]
    known = f" Labels: {', '.join(work.labels)}." if work.labels else ""
    p = work.protocol
    made = (
        f"`{base_name(work)}`, fine-tuned for {work.task.name} ({work.task.kind}) on "
        f"{p.trained_on:,} rows and evaluated on {p.judged_on:,} others."
    )
    if p.selected_on:
        made += f" {p.selected_on:,} held-out rows for selection: {', '.join(p.selects)}."
    rows = [(name, f"{value:.4f}") for name, value in metrics.items()]
    if work.word_baseline is not None:
        rows.append(("accuracy of naive Bayes on words", f"{work.word_baseline:.4f}"))
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    write_text(card, f"{before}{mark}\n{made}{known}\n\n| metric | value |\n|---|---|\n{table}")


def base_name(work: FinetuneData) -> str:
    """The base model's hub id or folder name: a published folder must not reveal paths."""
    source = work.start.source
    if source is None:
        return "a model in memory"
    return Path(source).name if Path(source).is_dir() else str(source)


def write_task_report(
    out: Path,
    work: FinetuneData,
    settings: FinetuneConfig,
    outcome: Outcome | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    runs: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes report.html; a stopped run has no outcome yet."""
    kind = head_kind(work.task)
    log = read_metrics(out / "metrics.jsonl") if (out / "metrics.jsonl").is_file() else []
    found = work.word_baseline
    folder = shlex.quote(str(out))
    page = TaskPage(
        title=msg(
            "Fine-tuned: {file_names}",
            file_names=", ".join(file_names(work.train)) or work.task.name,
        ),
        lead=work.protocol.describe(),
        measure=metric_names(work.task)[0],
        log=log,
        metrics={} if outcome is None else outcome.metrics,
        rows=rows,
        labels=work.labels if kind.text_labels else (),
        exclusive=kind.exclusive,
        tagged=kind.output is TAGS,
        baselines=[] if found is None else [("bag of words (naive Bayes)", found)],
        runs=runs,
        trials=[one.table_row for one in read_tried(out).values()],
        facts=_facts(out, work, settings, log),
        settings=json.dumps(settings.to_dict(), indent=1, ensure_ascii=False),
        next_lines=f"malmoi predict -m {folder} new.csv\nmalmoi serve -m {folder} --open",
        warning="" if outcome else "Stopped before the end: the same command resumes.",
    )
    write_text(out / "report.html", page.render())


def _facts(
    out: Path, work: FinetuneData, settings: FinetuneConfig, log: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Base model, data, date, settings and duration."""
    network = work.start.network
    shape = f"{network.config.depth} × {network.config.width}, {count_parameters(network):,}"
    last = log[-1] if log else {}
    return [
        (translate("date"), f"{datetime.now():%Y-%m-%d %H:%M}"),
        (translate("folder"), str(out)),
        (translate("task"), work.task.name),
        (translate("base model"), f"{base_name(work)} ({shape})"),
        (
            translate("rows to train on"),
            f"{work.protocol.trained_on:,} ({', '.join(file_names(work.train))})",
        ),
        (
            translate("rows to evaluate on"),
            f"{len(work.dev):,} ({', '.join(file_names(work.dev))})",
        ),
        (translate("budget"), translate(settings.describe_budget())),
        (translate("batch"), str(settings.batch)),
        (translate("learning rate"), f"{settings.lr:g}"),
        (translate("seed"), str(settings.seed)),
        (translate("time"), format_duration(last.get("seconds", 0.0))),
        (translate("machine"), machine_name()),
    ]
