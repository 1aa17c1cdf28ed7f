"""Verbs of tasks: finetune, tasks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.cli.inputs import DeviceOption, JsonOption, ModelOption, changes_of
from malmoi.cli.show import print_json, print_table
from malmoi.errors import UsageError

if TYPE_CHECKING:
    from malmoi.tasks import Task

TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="A name (see malmoi tasks), or classification, regression, tagging, choice, answer on your own columns.",
    ),
]
TextOption = Annotated[str | None, typer.Option("--text", help="Your column of the text.", metavar="COLUMN")]
PairOption = Annotated[
    str | None,
    typer.Option("--pair", help="Your column of a second text or a context.", metavar="COLUMN"),
]
LabelOption = Annotated[str | None, typer.Option("--label", help="Your column of the label.", metavar="COLUMN")]
ChoicesOption = Annotated[
    str | None, typer.Option("--choices", help="Your columns of the choices, with commas between.", metavar="A,B,…")
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out instead of stopping at them.")]


def add(app: typer.Typer) -> None:
    for verb in (finetune, tasks):
        app.command()(verb)


def finetune(
    task: TaskArgument,
    model: ModelOption,
    data: Annotated[list[Path], typer.Option(help="Training rows: files, or a folder with train and dev.")],
    out: Annotated[Path, typer.Option(help="The folder of the fine-tuned model.", metavar="DIR")],
    dev: Annotated[list[Path] | None, typer.Option(help="Rows to judge by; else a tenth is held out.")] = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    choices: ChoicesOption = None,
    epochs: Annotated[float | None, typer.Option(help="Times through the rows (3).")] = None,
    steps: Annotated[int | None, typer.Option(help="… or so many updates,", metavar="N")] = None,
    minutes: Annotated[float | None, typer.Option(help="… or so long.", metavar="N")] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate (5e-5).")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in an update (32).")] = None,
    length: Annotated[int | None, typer.Option(help="The most tokens of a row (512).", metavar="N")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs; their mean is told and the median one kept.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Try the paper's rates, batches and epochs.")] = False,
    freeze: Annotated[bool, typer.Option("--freeze", help="Train only the new layer.")] = False,
    features: Annotated[
        str | None,
        typer.Option(help="A small model on frozen layers: last4, last, weighted-all, layers=5,6…", metavar="LAYERS"),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Learn only lora, prompt or prefix; the model stays as it is.", metavar="KIND"),
    ] = None,
    lm: Annotated[float | None, typer.Option(help="λ of GPT-1's auxiliary language model (0).")] = None,
    again: Annotated[bool, typer.Option("--again", help="Start anew in a folder that holds a run.")] = False,
    untrained: Annotated[bool, typer.Option("--untrained", help="From new weights: the baseline.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, e.g. layer_decay=0.9.", metavar="K=V")
    ] = None,
    skip_bad: SkipOption = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Fine-tune a BERT or a GPT to a task; the result is a folder that predict, evaluate and transformers open.

    Example: malmoi finetune sst2 --model runs/bert --data SST-2/train.tsv --dev SST-2/dev.tsv --out runs/sst2
    """
    from malmoi.train import Stopped
    from malmoi.tune.finetune import finetune as tune

    changes: dict[str, Any] = dict(epochs=epochs, steps=steps, minutes=minutes, lr=lr, batch=batch, length=length)
    changes |= dict(seeds=seeds, features=features, adapter=adapter, lm=lm)
    flags = dict(grid=grid, freeze=freeze, untrained=untrained, skip_bad=skip_bad)
    changes |= {name: True for name, given in flags.items() if given} | changes_of(settings)
    chosen = chosen_task(task, text, pair, label, choices)
    try:
        files = data[0] if len(data) == 1 else data
        done = tune(model, chosen, files, out, dev or None, device=device, again=again, **changes)
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from stopped
    show_facts({**done.metrics, "model": str(done.out)}, json)


def tasks(json: JsonOption = False) -> None:
    """List the tasks that there are, how they are judged and what their folders hold.

    Example: malmoi tasks
    """
    from malmoi.tasks import TASKS

    for one in TASKS.values() if json else ():
        print_json({"task": one.name, "kind": one.kind, "metrics": one.judged, "about": one.about, "files": one.files})
    if not json:
        rows = [(one.name, one.kind, ", ".join(one.judged), one.about) for one in TASKS.values()]
        print_table(("task", "kind", "judged by", "what is asked"), rows)


def chosen_task(name: str, text: str | None, pair: str | None, label: str | None, choices: str | None) -> "Task":
    """A named task, or one on the user's columns."""
    from malmoi.tasks import METRICS, own
    from malmoi.tasks import task as named

    columns: dict[str, Any] = {"text": text, "pair": pair, "label": label}
    columns["choices"] = tuple(choices.split(",")) if choices else None
    given = {key: value for key, value in columns.items() if value is not None}
    if name in METRICS and (given or name == "choice"):
        return own(name, **given)  # type: ignore[arg-type]
    if given:
        raise UsageError(
            f"The task {name} knows its columns; --{next(iter(given))} is for a kind such as classification."
        )
    return named(name)


def show_facts(facts: dict[str, Any], json: bool) -> None:
    if json:
        print_json(facts)
    else:
        print_table(("measure", "value"), [(k, f"{v:.4f}" if isinstance(v, float) else v) for k, v in facts.items()])
