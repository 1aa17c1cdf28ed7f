"""Writes and reads the results in the folder of a fine-tuning run."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from malmoi.adapters.store import read_with_adapter, write_adapter
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.evaluation.error_analysis import analyse_errors, prediction_row
from malmoi.evaluation.evaluate import judge, judge_held_out, predict_and_score
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.predictions import ExamplePrediction, Outcome
from malmoi.finetuning.candidates import read_tried
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.report import add_to_card, write_task_report
from malmoi.finetuning.run_state import HELD_OUT, finish_run, finished
from malmoi.finetuning.task_data import FinetuneData
from malmoi.inference.predict import Predictor
from malmoi.messages import msg
from malmoi.metrics import goodness, mean_with_error
from malmoi.system.files import write_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """One finished run."""

    settings: FinetuneConfig
    checkpoint: Checkpoint
    outcome: Outcome  # on the evaluation rows
    steps: int
    held: dict[str, float]  # metrics on the held-out rows; empty: there are none


def save_model(
    work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint, out: Path
) -> None:
    """Saves the whole model, or the adapter alone."""
    if settings.adapter.kind == "none":
        write_checkpoint(checkpoint, out)
    else:
        write_adapter(checkpoint, work.start, settings.adapter, out)


def complete_run(work: FinetuneData, run: FinishedRun, out: Path) -> FinishedRun:
    run.checkpoint.extra |= run.outcome.chosen
    save_model(work, run.settings, run.checkpoint, out)
    # before the run is marked as finished, so that a crash in between loses nothing
    _write_predictions(work, run.outcome, out)
    results = {"steps": run.steps, **run.outcome.metrics, HELD_OUT: run.held}
    finish_run(out, work.record(run.settings), results)
    return run


def judged_run(
    work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint, steps: int
) -> FinishedRun:
    """A model evaluated on the held-out rows, if there are any, and on the evaluation rows."""
    reading = work.predictor(checkpoint)
    with work.computing(settings):
        held = judge_held_out(work.task, work, reading) if work.held else None
        done = judge(work.task, work, reading, None if held is None else held.chosen)
    selected = {} if held is None else held.metrics
    return FinishedRun(settings, checkpoint, done, steps, selected)


def load_finished(work: FinetuneData, settings: FinetuneConfig, out: Path) -> FinishedRun:
    """Loads the model and predictions of a finished run, without training.

    Evaluated again, a score may differ in its last digit: memory-mapped weights have another
    alignment than those that were trained, which changes the summation order of products.
    """
    steps, metrics, held = finished(out)
    logger.info(
        msg(
            "{out} is finished (step {steps:,}); --overwrite (overwrite=True) discards it and "
            "starts over.",
            out=out,
            steps=steps,
        )
    )
    checkpoint = read_with_adapter(out, device=work.device)
    outcome = _read_predictions(work, metrics, out)
    if outcome is None:
        with work.computing(settings):
            outcome = predict_and_score(work.task, work.dev, Predictor.of(checkpoint))
    return FinishedRun(settings, checkpoint, replace(outcome, metrics=metrics), steps, held)


def best_run(runs: Sequence[FinishedRun], measure: str, *, select: bool) -> FinishedRun:
    """The best run on the held-out rows, or the first if nothing is selected."""
    if not select or not runs[0].held:
        return runs[0]
    return max(runs, key=lambda run: goodness(measure, run.held[measure]))


def log_spread(measure: str, runs: Sequence[FinishedRun]) -> None:
    found = mean_with_error([run.outcome.metrics[measure] for run in runs])
    spread = msg(
        "{mean:.4f} ± {deviation:.4f} (standard deviation)",
        mean=found.mean,
        deviation=found.deviation,
    )
    logger.info(
        msg("{runs} runs: {measure} {spread}.", runs=len(runs), measure=measure, spread=spread)
    )


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
        **analyse_errors(work.task, work.labels, work.dev, done, temperature),
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
        seen = [[row["id"], row["text"]] for row in rows]
        found = [
            ExamplePrediction(r["prediction"], r["score"], r.get("probabilities", {})) for r in rows
        ]
        labels = [row["label"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Outcome(metrics, labels, found) if seen == [[e.id, e.text] for e in work.dev] else None
