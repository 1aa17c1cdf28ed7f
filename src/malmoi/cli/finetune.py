"""`malmoi finetune`: fine-tune a model for a task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.cli.options import DeviceOption, JsonOption, ModelOption, changes_of
from malmoi.cli.output import print_json, print_table
from malmoi.errors import UsageError

if TYPE_CHECKING:
    from malmoi.evaluation.tasks import Task

TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help=(
            "A name (see malmoi tasks), or classification, regression, tagging, choice, answer on "
            "your own columns."
        ),
    ),
]
TextOption = Annotated[
    str | None, typer.Option("--text", help="Column of the text.", metavar="COLUMN")
]
PairOption = Annotated[
    str | None,
    typer.Option("--pair", help="Column of a second text or a context.", metavar="COLUMN"),
]
LabelOption = Annotated[
    str | None, typer.Option("--label", help="Column of the label.", metavar="COLUMN")
]
ChoicesOption = Annotated[
    str | None,
    typer.Option("--choices", help="Columns of the choices, comma-separated.", metavar="A,B,…"),
]
SkipOption = Annotated[
    bool, typer.Option("--skip-bad", help="Skip bad rows instead of stopping at the first.")
]


def register(app: typer.Typer) -> None:
    app.command("finetune")(finetune_command)


def finetune_command(
    task: TaskArgument,
    model: ModelOption,
    data: Annotated[
        list[Path], typer.Option(help="Training rows: files, or a folder with train and dev.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the fine-tuned model.", metavar="DIR")],
    dev: Annotated[
        list[Path] | None,
        typer.Option(help="Evaluation rows; default: a held-out tenth of the training rows."),
    ] = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    choices: ChoicesOption = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training rows (3).")] = None,
    steps: Annotated[int | None, typer.Option(help="… or number of updates,", metavar="N")] = None,
    minutes: Annotated[float | None, typer.Option(help="… or minutes.", metavar="N")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate (5e-5).")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per update (32).")] = None,
    length: Annotated[
        int | None, typer.Option(help="Maximum tokens per row (512).", metavar="N")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of runs: the mean is reported, the median run is kept."),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="Search the paper's grid of learning rates, batch sizes and epochs."
        ),
    ] = False,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Train only the new output layer.")
    ] = False,
    features: Annotated[
        str | None,
        typer.Option(
            help="A small model on frozen layers: last4, last, weighted-all, layers=5,6…",
            metavar="LAYERS",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Train only a lora, prompt or prefix adapter; the model itself is frozen.",
            metavar="KIND",
        ),
    ] = None,
    lm: Annotated[
        float | None, typer.Option(help="λ of GPT-1's auxiliary language model (0).")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the run in this folder and start over.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights: the baseline.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, e.g. layer_decay=0.9.", metavar="K=V"),
    ] = None,
    skip_bad: SkipOption = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Fine-tune a BERT or a GPT to a task; the result is a folder that predict, evaluate and
    transformers open.

    Example: malmoi finetune sst2 --model runs/bert --data SST-2/train.tsv --dev SST-2/dev.tsv --out
    runs/sst2
    """
    from malmoi.finetuning.finetune import finetune as tune
    from malmoi.training.signals import Stopped

    changes: dict[str, Any] = dict(
        epochs=epochs, steps=steps, minutes=minutes, lr=lr, batch=batch, length=length
    )
    changes |= dict(seeds=seeds, features=features, adapter=adapter, lm=lm)
    flags = dict(grid=grid, freeze=freeze, from_scratch=from_scratch, skip_bad=skip_bad)
    changes |= {name: True for name, given in flags.items() if given} | changes_of(settings)
    chosen = chosen_task(task, text, pair, label, choices)
    try:
        files = data[0] if len(data) == 1 else data
        done = tune(
            model, chosen, files, out, dev or None, device=device, restart=restart, **changes
        )
    except Stopped as stopped:
        raise typer.Exit(stopped.code) from stopped
    show_facts({**done.metrics, "model": str(done.out)}, json)


def chosen_task(
    name: str, text: str | None, pair: str | None, label: str | None, choices: str | None
) -> "Task":
    """A named task, or one on the user's columns."""
    from malmoi.evaluation.tasks import KIND_METRICS, custom_task, named_task

    columns: dict[str, Any] = {"text": text, "pair": pair, "label": label}
    columns["choices"] = tuple(choices.split(",")) if choices else None
    given = {key: value for key, value in columns.items() if value is not None}
    if name in KIND_METRICS and (given or name == "choice"):
        return custom_task(name, **given)  # type: ignore[arg-type]
    if given:
        raise UsageError(
            f"The task {name} knows its columns; --{next(iter(given))} is for a kind such as "
            "classification."
        )
    return named_task(name)


def show_facts(facts: dict[str, Any], json: bool) -> None:
    if json:
        print_json(facts)
    else:
        print_table(
            ("measure", "value"),
            [(k, f"{v:.4f}" if isinstance(v, float) else v) for k, v in facts.items()],
        )
