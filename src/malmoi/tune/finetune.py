"""From a pre-trained model and labelled rows to a fine-tuned folder: read → frame → `Tuner.fit` → judge → write."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malmoi.adapt import check_target, is_adapter, read, write_adapter
from malmoi.checkpoint import Checkpoint, write
from malmoi.disk import alone, write_text
from malmoi.errors import UsageError
from malmoi.infer import Model
from malmoi.infer.predict import Reading
from malmoi.metrics import goodness, mean
from malmoi.objectives import Objective, lm
from malmoi.objectives.task import choose, classify, regress, span, tag
from malmoi.tasks import Example, Task
from malmoi.tasks import task as named_task
from malmoi.tasks.features import Item, View, features
from malmoi.tokenizer import TokenRow
from malmoi.train.device import choose_execution
from malmoi.train.parallel import join
from malmoi.train.stop import Stopped
from malmoi.tune.evaluate import Outcome, outcome, with_threshold
from malmoi.tune.features import remembered
from malmoi.tune.report import write_task_report
from malmoi.tune.resume import begin, finish, finished
from malmoi.tune.settings import FinetuneConfig, finetune_config
from malmoi.tune.start import for_task
from malmoi.tune.tuner import Tuner
from malmoi.tune.words import said_items, say
from malmoi.tune.work import Work, describe, gather


@dataclass(frozen=True)
class Result:
    """A finished fine-tuning: its measures on the development set, each run's own, and the model."""

    metrics: dict[str, float]
    runs: tuple[dict[str, float], ...]
    out: Path
    model: Model
    steps: int  # updates of the run that was kept


@dataclass(frozen=True)
class Run:
    """One finished run."""

    settings: FinetuneConfig
    checkpoint: Checkpoint
    outcome: Outcome
    steps: int


def finetune(
    model: str | Path | Model,
    task: str | Task,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    dev: str | Path | Sequence[str | Path] | None = None,
    *,
    device: str | None = None,
    again: bool = False,
    **overrides: Any,
) -> Result:
    """Fine-tunes a BERT or a GPT to a task, into a folder that transformers opens too.

    `data` is the training file (or a folder that holds train and dev); without `dev` a tenth is held out. Overrides
    name a field of `FinetuneConfig`: epochs=3, lr=2e-5, freeze=True, lm=0.5, seeds=5… The same call on the same folder
    goes on where it was stopped; what is finished there is not done again, unless `again`.
    """
    settings = finetune_config(overrides)
    chosen, out = named_task(task) if isinstance(task, str) else task, Path(out)
    work = gather(chosen, data, dev, settings, _start(model, settings, out), join(device).device)
    return learn(work, settings, out, again=again)


def learn(work: Work, settings: FinetuneConfig, out: Path, *, again: bool = False) -> Result:
    """Every run that the settings ask for; the one that is kept is written to the folder."""
    measure = work.task.judged[0]
    variants = settings.variants()
    folders = [out] if len(variants) == 1 else [out / _called(settings, v) for v in variants]
    with alone(out):
        runs = [_run(work, v, folder, again=again) for v, folder in zip(variants, folders, strict=True)]
        kept = _kept(runs, measure, best=settings.grid)
        if len(runs) > 1:
            _save(work, settings, kept.checkpoint, out)
            _tell(measure, runs)
        _finish(work, kept, runs, out)
    every = tuple(run.outcome.metrics for run in runs)
    usable = read(out, device=work.device) if is_adapter(out) else kept.checkpoint
    return Result(kept.outcome.metrics, every, out, Model(usable), kept.steps)


def _called(settings: FinetuneConfig, v: FinetuneConfig) -> str:
    return f"lr{v.lr:g}-batch{v.batch}-epochs{v.epochs:g}" if settings.grid else f"seed-{v.seed}"


def _start(model: str | Path | Model, settings: FinetuneConfig, out: Path) -> Checkpoint:
    start = model.checkpoint if isinstance(model, Model) else read(model)
    if start.tokenizer is None:
        raise UsageError("This model's folder has no tokenizer; put its tokenizer.json beside the weights.")
    if start.network.trunk.soft is not None or start.network.trunk.past is not None:
        raise UsageError("This model is a soft prompt or a prefix on a base; fine-tune the base itself.")
    if settings.adapter.kind != "none":
        check_target(out)
        if start.source is None or is_adapter(start.source):
            raise UsageError("An adapter needs a base in a folder of its own; save this model first, and name that.")
    return start


def _save(work: Work, settings: FinetuneConfig, checkpoint: Checkpoint, out: Path) -> None:
    """The whole model, or beside the one that it started from what was learnt."""
    if settings.adapter.kind == "none":
        write(checkpoint, out)
    else:
        write_adapter(checkpoint, work.start, settings.adapter, out)


# ------------------------------------------------------------------ one run


def _run(work: Work, settings: FinetuneConfig, out: Path, *, again: bool) -> Run:
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = for_task(work.start, work.task, work.labels, settings)
    record = {"task": work.task.name, **settings.to_dict(), "of": work.of, **work.taught}
    if begin(out, record, again=again):
        return _finished(work, settings, out)
    checkpoint.network.to(work.device)
    reading = replace(Reading.of(checkpoint), cuts=work.cuts)
    items = _items(work, checkpoint, reading)
    describe(work, settings, checkpoint.network, items)

    def evaluate() -> Outcome:
        return judged(work, reading)

    objective = make_objective(work, settings, say(items) if reading.words else None)
    tuner = Tuner(checkpoint.network, objective, settings, out, evaluate, work.task.judged[0])
    with remembered(checkpoint.network, lambda: _rows(work, checkpoint, reading, items)):
        best = tuner.fit(items)
    if best.threshold is not None:
        checkpoint.extra["threshold"] = best.threshold
    _save(work, settings, checkpoint, out)
    if tuner.stopped:
        where = f"the best so far is in {out}, the same command goes on from here"
        print(f"Stopped at step {tuner.step:,} and saved: {where}.", file=sys.stderr)
        raise Stopped(tuner.stopped)
    # before the run is finished, so that a kill from here on leaves them as they are
    _write_predictions(work, best, out)
    finish(out, record, best.metrics, tuner.step)
    return Run(settings, checkpoint, best, tuner.step)


def judged(work: Work, reading: Reading) -> Outcome:
    """What a model says of the development set."""
    return (with_threshold if _may_be_unanswered(work.task, work.train) else outcome)(work.task, work.dev, reading)


def _finished(work: Work, settings: FinetuneConfig, out: Path) -> Run:
    """A run that was done before: its model and what it said are read, nothing is learnt.

    Judged again, a score can differ in its last digit: weights that are mapped from a file lie at other addresses than
    those that learnt, and a product of another alignment is summed in another order.
    """
    steps, metrics = finished(out)
    print(f"{out} is finished (step {steps:,}); --again (again=True) would start it anew.", file=sys.stderr)
    checkpoint = read(out, device=work.device)
    said = _read_predictions(work, metrics, out)
    if said is not None:
        return Run(settings, checkpoint, said, steps)
    with choose_execution(work.device, settings.training(1)).computing():
        return Run(settings, checkpoint, judged(work, Reading.of(checkpoint)), steps)


def _items(work: Work, checkpoint: Checkpoint, reading: Reading) -> list[Item]:
    if reading.words is not None:
        return said_items(work.train, reading, reading.words)
    return work.items(_view(work, checkpoint, reading))


def _rows(work: Work, checkpoint: Checkpoint, reading: Reading, items: Sequence[Item]) -> list[TokenRow]:
    """Every row that is learnt from or judged by."""
    judged = features(work.task, work.dev, _view(work, checkpoint, reading))
    return [row for item in (*items, *judged) for row in item.rows]


def _view(work: Work, checkpoint: Checkpoint, reading: Reading) -> View:
    last = checkpoint.network.config.pool == "last"
    return View(reading.tokenizer, work.labels, reading.longest, reading.stride, reading.both, last)


def make_objective(work: Work, settings: FinetuneConfig, words: Objective | None = None) -> Objective:
    """The loss of the task or of its words and, for GPT-1, λ times the language model's: L3 = L2 + λ·L1 (eq. 5).

    Where there is a teacher, the labels have only a share of it.
    """
    rare = _weights(work) if settings.class_weights else None
    makers: dict[str, Callable[[], Objective]] = {
        "classification": lambda: classify(rare),
        "regression": regress,
        "tagging": lambda: tag(rare),
        "choice": choose,
        "answer": span,
    }
    objective = words or makers[work.task.kind]()
    objective = objective + settings.lm * lm() if settings.lm else objective
    return objective if work.teaching is None else work.teaching.beside(objective, work.task.kind)


def _weights(work: Work) -> list[float]:
    """n / (N · count) of each label: rare ones count more, the mean over the examples stays 1."""
    tagged = work.task.kind == "tagging"
    counts = Counter(label for e in work.train for label in (e.label if tagged else [e.label]))
    total = sum(counts.values())
    return [total / (len(work.labels) * counts[name]) if counts[name] else 1.0 for name in work.labels]


def _may_be_unanswered(task: Task, examples: Sequence[Example]) -> bool:
    return task.kind == "answer" and any(not e.label for e in examples)


# ------------------------------------------------------------------ what is said and written


def _kept(runs: Sequence[Run], measure: str, *, best: bool) -> Run:
    """The best run of a grid; of several seeds the median one, which promises nothing that luck brought."""
    ordered = sorted(runs, key=lambda run: goodness(measure, run.outcome.metrics[measure]))
    return ordered[-1] if best else ordered[(len(ordered) - 1) // 2]


def _tell(measure: str, runs: Sequence[Run]) -> None:
    found = mean([run.outcome.metrics[measure] for run in runs])
    spread = f"{found.mean:.4f} ± {found.deviation:.4f} (standard deviation)"
    print(f"{len(runs)} runs: {measure} {spread}.", file=sys.stderr)


def _finish(work: Work, kept: Run, runs: Sequence[Run], out: Path) -> None:
    done = kept.outcome
    rows = _write_predictions(work, done, out)
    if work.task.kind == "answer":  # SQuAD's own format
        answers = {e.id: said for e, said in zip(work.dev, done.said, strict=True)}
        write_text(out / "predictions.json", json.dumps(answers, ensure_ascii=False) + "\n")
    table = [{**run.settings.to_dict(), **run.outcome.metrics} for run in runs]
    write_task_report(out, work.task, work.labels, done, rows, table)


def _write_predictions(work: Work, done: Outcome, out: Path) -> list[dict[str, Any]]:
    """predictions.jsonl: every example of the development set, what was right, what was said."""
    rows = [_row(*each) for each in zip(work.dev, done.gold, done.said, done.sure, strict=True)]
    write_text(out / "predictions.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def _read_predictions(work: Work, metrics: dict[str, float], out: Path) -> Outcome | None:
    """What a finished run said of this development set; none where its file is not there or of other examples."""
    try:
        lines = (out / "predictions.jsonl").read_text("utf-8").removesuffix("\n").split("\n")
        rows = [json.loads(line) for line in lines]
        seen = [[row["id"], row["text"]] for row in rows]
        gold, said, sure = ([row[name] for row in rows] for name in ("gold", "said", "sure"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Outcome(metrics, gold, said, sure) if seen == [[e.id, e.text] for e in work.dev] else None


def _row(example: Example, gold: Any, said: Any, sure: float) -> dict[str, Any]:
    pair = {} if example.pair is None else {"pair": example.pair}
    choices = {"choices": list(example.choices)} if example.choices else {}
    seen = {"id": example.id, "text": example.text, **pair, **choices}
    return {**seen, "gold": gold, "said": said, "sure": round(sure, 5)}
