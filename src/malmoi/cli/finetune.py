"""`malmoi finetune`, `malmoi merge`: a model for a task, and a LoRA made one with its base."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Any

from malmoi.api.records import ColumnOptions
from malmoi.api.run_options import RunOptions
from malmoi.api.runs import announced
from malmoi.cli import shared as cli
from malmoi.errors import UsageError, nearest, require_that
from malmoi.evaluation.task import Task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.messages import joined, msg, plural
from malmoi.pair import BERT, GPT, introduction
from malmoi.system.paths import require_path, similar_path
from malmoi.system.run_folder import read_metrics
from malmoi.system.storage import address, local_path

FEW_ROWS = 10  # evaluated: fewer show nothing
LEARNT_F1 = 0.05
KNOWN_LOSS = 0.3  # share of the first loss below which the training rows are known by heart


def finetune_command(
    arguments: list[str] | None = cli.argument(
        None,
        "Rows: csv, tsv, jsonl… or a folder with train and dev. TASK: a name (malmoi tasks) or a "
        "kind such as classification; omit it to detect the kind.",
        metavar="[TASK] FILE…",
        autocompletion=cli.complete_tasks,
    ),
    model: str | None = cli.option(
        None,
        "Model to start from: a folder, or a hub id.",
        "--model",
        "-m",
        shown="malmoi-bert, or malmoi-gpt where it writes",
        metavar="DIR",
    ),
    data: list[Path] | None = cli.option(None, "Training rows, if not given as FILE."),
    out: Path | None = cli.option(
        None, "Output folder.", "--out", "-o", shown="runs/FILE's name", metavar="DIR"
    ),
    dev: list[Path] | None = cli.option(
        None,
        "Test rows, used for evaluation only; repeatable.",
        "--dev",
        "--test",
        shown="a tenth of the rows",
    ),
    columns: dict[str, Any] = cli.options_of(ColumnOptions),
    changes: dict[str, Any] = cli.options_of(FinetuneConfig, RunOptions),
    settings: cli.Set = None,
    dry_run: bool = cli.option(
        False, "Only compare the models at hand, by a linear layer on each frozen one.", "--dry-run"
    ),
    json: cli.Json = False,
) -> None:
    """Fine-tune a BERT or a GPT on your rows, or on a known task.

    Columns, kind and baseline are detected from the file and printed. Without a budget it takes
    a few minutes. The result is a folder that predict, evaluate and transformers open. Ctrl-C
    saves the best so far and stops; the same command resumes.

    Example: malmoi finetune reviews.csv

    Example: malmoi finetune sst2 SST-2/train.tsv --dev SST-2/dev.tsv -m runs/bert -o runs/sst2
    """
    name, files = task_and_files(arguments or [], data)
    require_that(
        bool(files) != bool(changes.get("labels")),
        "Give rows (malmoi finetune rows.csv), or the labels' names and rows without labels "
        "(malmoi finetune --labels positive,negative --unlabelled texts.txt).",
    )
    rows = files[0] if len(files) == 1 else files
    from malmoi.evaluation.guess import guess_task
    from malmoi.evaluation.kinds import head_kind

    # with labels alone, the test rows have the columns
    read = rows or dev or None
    task = announced(*guess_task(name or None, read, **cli.parsed_columns(columns)))
    base = model or (GPT if head_kind(task).writes else BERT)
    if model is None:
        cli.note(introduction(base))
    if dry_run:
        return _compare_bases(base, task, rows, changes.get("device"))
    named = [*files, *map(Path, changes.get("unlabelled", ())), Path("labels")]
    folder = out or Path("runs") / named[0].name.split(".")[0]
    if model is None or out is None:
        cli.say("model = {base}, out = {folder}", base=base, folder=folder)

    cli.load_torch()
    from malmoi.finetuning.bases import note_better_base
    from malmoi.finetuning.candidates import read_tried
    from malmoi.finetuning.finetune import run_finetuning
    from malmoi.report.task_page import TRIAL_COLUMNS

    changes |= cli.changes_of(settings)
    done = run_finetuning(base, task, rows, folder, dev or None, **changes)
    facts = {**done.metrics, "model": address(done.out), "protocol": done.protocol.to_dict()}
    show_facts(facts, json)
    if not json:
        if tried := read_tried(folder):
            cli.print_table(TRIAL_COLUMNS, [one.table_row for one in tried.values()])
        _next_lines(task, folder)
    _verdict(folder, done.metrics)
    note_better_base(base, task, rows, done)


def _compare_bases(base: str, task: Task, rows: Any, device: str | None) -> None:
    """Prints what the models at hand are worth on some of the rows."""
    cli.load_torch()
    from malmoi.evaluation.tasks import metric_names
    from malmoi.finetuning.bases import advice, models_at_hand, probe_bases
    from malmoi.system.machine import pick_device

    found = list(probe_bases(models_at_hand(base, BERT), task, rows, pick_device(device)))
    columns = ("model", "weights", "rows/s", metric_names(task)[0], "beside the first", "note")
    cli.print_table(columns, [one.table_row for one in found])
    cli.note(advice(found))


def task_and_files(words: Sequence[str], data: Sequence[Path] | None) -> tuple[str, list[Path]]:
    """The task ("" if none is given) and the files; either may come first."""
    from malmoi.evaluation.tasks import KIND_ALIASES, KIND_METRICS, TASKS

    known = {**KIND_METRICS, **TASKS, **KIND_ALIASES}
    named = [word for word in words if word in known]
    at = words.index(named[0]) if named else len(words)  # a folder may have the task's name
    given: list[str | Path] = [*words[:at], *words[at + 1 :], *(data or [])]
    files = [*map(local_path, given)]
    for file in files:
        if not named and not file.suffix and not file.exists():
            hint = similar_path(file) or nearest(str(file), known)
            raise UsageError(
                "There is no task and no file {file!r}.{hint}", file=str(file), hint=hint
            )
        require_path(file)
    name = (named or [""])[0]
    return KIND_ALIASES.get(name, name), files


def _next_lines(task: Task, out: Path) -> None:
    from malmoi.evaluation.kinds import head_kind
    from malmoi.inference.predictors import CHOICE, SENTENCE, WRITING

    output = head_kind(task).output
    use = 'predict -m {} "…"'
    if output is WRITING:
        use = 'chat -m {} "…"'
    elif output is CHOICE:
        use = 'predict -m {} --choice "…" --choice "…" "…"'
    elif output is SENTENCE or "{pair}" in task.prompt:
        use = 'predict -m {} --pairs "…" "…"'
    cli.say_next(use, out)


def _verdict(out: Path, metrics: Mapping[str, float]) -> None:
    """Says if the model is no better than a baseline, or was judged on very few rows."""
    rows = (out / "predictions.jsonl").read_text("utf-8").split("\n")[:-1]
    if len(rows) < FEW_ROWS:
        if rows:
            cli.note(
                "Evaluated on only {shown}: chance decides. Give more rows, or others with --dev.",
                shown=plural(len(rows), "row"),
            )
        return
    report = loads((out / "report.json").read_text("utf-8"))
    if doubt := _doubt([loads(row)["label"] for row in rows], report, metrics):
        cli.note(joined(" ", (doubt, _advice(out, report))))


def _doubt(golds: list[Any], report: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """The baseline that is as good as the model; empty if none is."""
    labels = Counter(", ".join(gold) if isinstance(gold, list) else str(gold) for gold in golds)
    label, times = labels.most_common(1)[0]
    share = times / len(golds)
    words = report.get("word_baseline")
    measure, value = next(iter(metrics.items()))
    accuracy = metrics.get("accuracy", math.inf)
    if accuracy <= share:
        return msg(
            "This model is no better than always predicting {label!r}, which is right for "
            "{share:.0%} of the evaluation rows.",
            label=label,
            share=share,
        )
    if words is not None and accuracy <= words and accuracy < 1:
        return msg(
            "Counting words (naive Bayes) is at least as good: right for {words:.1%}.", words=words
        )
    if measure.endswith("f1") and value < LEARNT_F1:
        return msg(
            "This model has learnt next to nothing ({name} {value:.2f}).",
            name=measure.replace("_", " "),
            value=value,
        )
    return ""


def _advice(out: Path, report: Mapping[str, Any]) -> str:
    """What may help a model that is no better than a baseline, by what it read and learnt."""
    read = report["steps"] * report["settings"]["batch"] / report["protocol"]["trained_on"]
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    if 0 < read < 1:
        return msg(
            "It has read only {read:.0%} of the training rows: give it more --epochs, "
            "--steps or --minutes.",
            read=read,
        )
    if not losses or losses[-1] < KNOWN_LOSS * losses[0]:
        return msg("More epochs would not help: try more rows, or a model pre-trained for longer.")
    return msg("Try more --epochs, a higher --lr, or a model that was pre-trained for longer.")


def show_facts(facts: dict[str, Any], json: bool) -> None:
    if json:
        cli.print_json(facts)
        return
    plain = {name: value for name, value in facts.items() if not isinstance(value, dict | list)}
    if calibration := facts.get("calibration"):
        plain["calibration error"] = calibration["error"]
    rows = [(k, f"{v:.4f}" if isinstance(v, float) else v) for k, v in plain.items()]
    cli.print_table(("measure", "value"), rows)
    if labels := facts.get("labels"):
        print()
        columns = ("precision", "recall", "f1")
        table = [
            (name, *(f"{one[column]:.4f}" for column in columns), one["support"])
            for name, one in labels.items()
        ]
        cli.print_table(("label", *columns, "support"), table)


def merge_command(
    model: cli.Model, out: cli.Out, overwrite: cli.Overwrite = False, json: cli.Json = False
) -> None:
    """Merge a LoRA into its base model.

    Example: malmoi merge --model runs/sst2-lora --out runs/sst2
    """
    from malmoi.inference.export import merge_adapter

    merge_adapter(model, out, overwrite=overwrite)
    cli.print_one(json, {"model": str(out)}, out)
