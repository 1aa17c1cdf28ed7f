"""Writes and reads the results in the folder of a fine-tuning run."""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from malmoi.adapters.store import read_with_adapter, write_adapter
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.errors import MalmoiError
from malmoi.evaluation.evaluate import analyse_errors, predict_and_score, prediction_row, score_said
from malmoi.evaluation.features import ExamplePrediction, Outcome
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.task import Example, Task, metric_names
from malmoi.finetuning.candidates import read_tried
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.task_data import FinetuneData, file_names
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import TAGS
from malmoi.messages import logger, msg, translate
from malmoi.model import count_parameters
from malmoi.report.console import format_duration
from malmoi.report.page import machine_name
from malmoi.report.task_page import TaskPage
from malmoi.settings import current_fields
from malmoi.system.files import LOCK_NAME, folder_lock, write_text
from malmoi.system.run_folder import FINISHED, RunFolder, read_metrics
from malmoi.system.untrusted import JsonObject
from malmoi.training.state import discard_states

ALWAYS_ANSWER = float("inf")  # threshold of a model that never predicts "no answer"
REMOVED = {"rdrop": 0.0}  # settings that are gone, as they were where they changed nothing
HELD_OUT = "held_out"  # name of the held-out rows' metrics in finetune.json


def finetuning_folder(out: Path) -> RunFolder:
    return RunFolder(
        out,
        "finetune.json",
        "fine-tuning",
        can_restart=True,
        unreadable={"of": "of another model or other examples", "teacher": "of another teacher"},
        parse=_current,
    )


def _current(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record under today's names; settings that are newer than it have their defaults."""
    known = {name: value for name, value in record.items() if REMOVED.get(name) != value}
    return FinetuneConfig().to_dict() | current_fields("FinetuneConfig", known)


@contextmanager
def run_folder_lock(out: Path) -> Iterator[None]:
    """Locks a run's folder; a new one is removed again if the run is refused before it begins."""
    new = not out.exists()
    try:
        with folder_lock(out):
            yield
    except MalmoiError:
        files = {path.name for path in out.rglob("*") if path.is_file()}
        if new and files <= {LOCK_NAME, finetuning_folder(out).file}:
            shutil.rmtree(out, ignore_errors=True)
        raise


def begin_run(out: Path, record: Mapping[str, Any], *, overwrite: bool) -> bool:
    """Prepares the folder; returns whether this run is finished. Another run is an error."""
    if overwrite:
        finetuning_folder(out).restart()
        discard_states(out)
    return FINISHED in finetuning_folder(out).begin(record)


@dataclass(frozen=True)
class FinishedRun:
    """One finished run."""

    settings: FinetuneConfig
    checkpoint: Checkpoint
    outcome: Outcome  # on the evaluation rows
    steps: int
    held: dict[str, float]  # metrics on the held-out rows; empty: there are none
    completed: float = 1.0  # share of its steps; less if the time limit came first


def save_model(
    work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint, out: Path
) -> None:
    """Saves the whole model, or the adapter alone."""
    if settings.adapter.kind == "none":
        write_checkpoint(checkpoint, out)
    else:
        write_adapter(checkpoint, work.start, settings.adapter, out)


def complete_run(work: FinetuneData, run: FinishedRun, out: Path) -> FinishedRun:
    """Saves the model and its predictions, marks the run as finished and deletes its state."""
    run.checkpoint.extra |= run.outcome.chosen
    save_model(work, run.settings, run.checkpoint, out)
    # before the run is marked as finished, so that a crash in between loses nothing
    _write_predictions(work, run.outcome, out)
    results = {"steps": run.steps, **run.outcome.metrics, HELD_OUT: run.held}
    finetuning_folder(out).finish(work.record(run.settings), results)
    discard_states(out)
    return run


def judge_held_out(work: FinetuneData, reading: Predictor) -> Outcome:
    """Evaluates the held-out rows; `chosen` are the thresholds or the temperature that fit them."""
    kind = head_kind(work.task)
    if not work.held:
        return Outcome({}, [], [], dict(kind.unselected if kind.thresholds(work.train) else {}))
    plain = predict_and_score(work.task, work.held, _undecided(reading))
    if kind.choose is None or not (kind.calibrated or kind.thresholds(work.train)):
        return plain
    chosen = kind.choose(plain, reading.labels, per_label=work.label_thresholds)
    return _decided(work.task, plain, reading, chosen)


def judge(work: FinetuneData, reading: Predictor, chosen: Mapping[str, Any]) -> Outcome:
    """Evaluates the judged rows, if there are any, with what was chosen on the held-out rows."""
    if not work.dev:
        return Outcome({}, [], [])
    if not chosen:
        return predict_and_score(work.task, work.dev, reading)
    plain = predict_and_score(work.task, work.dev, _undecided(reading))
    return _decided(work.task, plain, reading, chosen)


def _decided(task: Task, plain: Outcome, reading: Predictor, chosen: Mapping[str, Any]) -> Outcome:
    """An outcome with thresholds or a temperature applied; its metrics also undecided."""
    kind = head_kind(task)
    predictions = [kind.decide(one, chosen) for one in plain.said]
    if kind.calibrated:  # the same predictions, less or more certain
        return replace(plain, said=predictions, chosen=dict(chosen))
    metrics = score_said(task, plain.labels, predictions, reading.labels)
    without = {f"{name}_default_threshold": value for name, value in plain.metrics.items()}
    return Outcome({**metrics, **without}, plain.labels, predictions, dict(chosen))


def _undecided(reading: Predictor) -> Predictor:
    return replace(reading, threshold=ALWAYS_ANSWER, thresholds=(), temperature=1.0)


def judged_run(
    work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint, steps: int
) -> FinishedRun:
    """A model evaluated on the held-out rows, if there are any, and on the evaluation rows."""
    reading = work.predictor(checkpoint)
    with work.computing(settings):
        held = judge_held_out(work, reading)
        done = judge(work, reading, held.chosen)
    return calibrated(work, FinishedRun(settings, checkpoint, done, steps, held.metrics))


def calibrated(work: FinetuneData, run: FinishedRun) -> FinishedRun:
    """The run with its temperature in the last layer, where every reader of the folder finds it.

    Called once for each temperature that is chosen, on the weights it was chosen with.
    """
    temperature = run.outcome.chosen.get("temperature")
    if temperature and "words" not in run.checkpoint.extra:
        run.checkpoint.extra["calibrated"] = True
        for weight in run.checkpoint.network.get_submodule(
            f"heads.{head_kind(work.task).head}.linear"
        ).parameters():
            weight.data.div_(temperature)
    return run


def load_finished(work: FinetuneData, settings: FinetuneConfig, out: Path) -> FinishedRun:
    """Loads the model and predictions of a finished run.

    Evaluated again, a score may differ in its last digit: memory-mapped weights are aligned
    differently, which changes the summation order of products.
    """
    record = finetuning_folder(out)
    found = JsonObject(record.read(), str(record.path)).object(FINISHED)
    numbers = (pair for pair in found.items() if isinstance(pair[1], int | float))
    metrics = {name: float(value) for name, value in numbers}
    steps = int(metrics.pop("steps"))
    held = {name: float(value) for name, value in found.map_of(HELD_OUT, float, default={}).items()}
    logger.info(
        "{out} is finished (step {steps:,}); --overwrite starts over.", out=out, steps=steps
    )
    checkpoint = read_with_adapter(out, device=work.device)
    other = bool(metrics) and work.primary_metric not in metrics  # an earlier version's
    outcome = None if other else _read_predictions(work, metrics, out)
    if outcome is None:
        with work.computing(settings):
            outcome = predict_and_score(work.task, work.dev, Predictor.of(checkpoint))
    outcome = outcome if other else replace(outcome, metrics=metrics)
    return FinishedRun(settings, checkpoint, outcome, steps, held)


def write_results(
    work: FinetuneData, kept: FinishedRun, runs: Sequence[FinishedRun], out: Path
) -> None:
    rows = _write_predictions(work, kept.outcome, out)
    # as they are written: a run that was killed here has nothing else to report
    done = _read_predictions(work, kept.outcome.metrics, out) or kept.outcome
    if head_kind(work.task).by_id:
        answers = {e.id: text for e, text in zip(work.dev, done.predictions, strict=True)}
        write_text(out / "predictions.json", json.dumps(answers, ensure_ascii=False) + "\n")
    table = [{**run.settings.to_dict(), **run.outcome.metrics, HELD_OUT: run.held} for run in runs]
    temperature = kept.checkpoint.extra.get("temperature", 1.0)
    report: dict[str, Any] = {
        "task": work.task.name,
        "kind": work.task.kind,
        "metrics": done.metrics,
        "word_baseline": work.word_baseline,
        **(analyse_errors(work.task, work.labels, work.dev, done, temperature) if work.dev else {}),
        "settings": kept.settings.to_dict(),
        "steps": kept.steps,
        "protocol": work.protocol.to_dict(),
        "runs": table,
    }
    if tried := read_tried(out):
        report["trials"] = [asdict(one) for one in tried.values()]
    write_text(out / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    add_to_card(out, work, done.metrics)
    write_task_report(out, work, kept.settings, done, rows, table)


def _write_predictions(work: FinetuneData, done: Outcome, out: Path) -> list[dict[str, Any]]:
    """Writes predictions.jsonl: label and prediction of every evaluation example."""
    rows = [prediction_row(*each) for each in zip(work.dev, done.labels, done.said, strict=True)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_text(out / "predictions.jsonl", "".join(lines))
    return rows


def _read_predictions(work: FinetuneData, metrics: dict[str, float], out: Path) -> Outcome | None:
    """Reads a finished run's predictions, if they belong to these evaluation rows."""
    try:
        lines = (out / "predictions.jsonl").read_text("utf-8").split("\n")[:-1]
        rows = [json.loads(line) for line in lines]
        said = [
            ExamplePrediction(r["prediction"], r["score"], r.get("probabilities", {})) for r in rows
        ]
        seen = [(row["id"], row["text"]) for row in rows]
        found = Outcome(metrics, [row["label"] for row in rows], said)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if seen == [(e.id, e.text) for e in work.dev] else None


# ------------------------------------------------------------------ the model card and the page


def add_to_card(out: Path, work: FinetuneData, metrics: Mapping[str, float]) -> None:
    """Adds base model, task, labels, metrics and evaluation rows to the model card."""
    card = out / "README.md"
    if not card.is_file():  # an adapter's folder has none
        return
    mark = "\n## Evaluation\n"
    before = card.read_text("utf-8").partition(mark)[0]
    p = work.protocol
    made = (
        f"`{base_name(work)}`, fine-tuned for {work.task.name} ({work.task.kind}) on "
        f"{p.trained_on:,} rows and evaluated on {p.judged_on:,} others.",
        f"{p.selected_on:,} held-out rows for selection: {', '.join(p.selects)}."
        if p.selected_on
        else "",
        f"Labels: {', '.join(work.labels)}." if work.labels else "",
    )
    about = " ".join(filter(None, made))
    rows = [(name, f"{value:.4f}") for name, value in metrics.items()]
    if work.word_baseline is not None:
        rows.append(("accuracy of naive Bayes on words", f"{work.word_baseline:.4f}"))
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    write_text(card, f"{before}{mark}\n{about}\n\n| metric | value |\n|---|---|\n{table}")


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
    log = read_metrics(out / "metrics.jsonl")
    found = work.word_baseline
    folder = shlex.quote(str(out))
    page = TaskPage(
        title=msg("Fine-tuned: {file_names}", file_names=_names(work.train) or work.task.name),
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
    facts = [
        ("date", f"{datetime.now():%Y-%m-%d %H:%M}"),
        ("folder", str(out)),
        ("task", work.task.name),
        ("base model", f"{base_name(work)} ({shape})"),
        ("rows to train on", f"{work.protocol.trained_on:,} ({_names(work.train)})"),
        ("rows to evaluate on", f"{len(work.dev):,} ({_names(work.dev)})"),
        ("budget", translate(settings.describe_budget())),
        ("batch", str(settings.batch)),
        ("learning rate", f"{settings.lr:g}"),
        ("seed", str(settings.seed)),
        ("time", format_duration(log[-1]["seconds"] if log else 0.0)),
        ("machine", machine_name()),
    ]
    return [(translate(name), value) for name, value in facts]


def _names(rows: Sequence[Example]) -> str:
    return ", ".join(file_names(rows))
