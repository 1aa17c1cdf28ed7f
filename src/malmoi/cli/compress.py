"""Make a model smaller: quantize, prune, distil, share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.cli.options import (
    DeviceOption,
    JsonOption,
    LabelOption,
    ModelOption,
    OutOption,
    OverwriteOption,
    PairOption,
    SetOption,
    TaskOption,
    TextOption,
    changes_of,
    chosen_task,
    load_torch,
)
from malmoi.cli.output import note, print_json, print_table
from malmoi.errors import UsageError
from malmoi.system.files import require_free

if TYPE_CHECKING:
    from malmoi.compression.result import CompressionResult
    from malmoi.evaluation.tasks import Task

JudgedOption = Annotated[
    Path | None,
    typer.Option("--data", help="Text, or rows of the task, to evaluate on before and after."),
]


def quantize_command(
    model: ModelOption,
    out: OutOption,
    bits: Annotated[int, typer.Option(help="Bits per weight: 8 or 4.")] = 8,
    group: Annotated[
        int, typer.Option(help="Inputs that share a scale; 0: a whole row, at 4 bits 32.")
    ] = 0,
    task: TaskOption = None,
    data: JudgedOption = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    device: DeviceOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Quantize the linear layers to 8 or 4 bits.

    Example: malmoi compress quantize --model runs/gpt --out runs/gpt-8bit --data held-out.txt
    """
    load_torch()
    from malmoi.compression.quantize import quantize_model

    require_free(out, overwrite=overwrite)
    asked = _task(task, text, pair, label)
    _show(
        quantize_model(model, out, bits=bits, group=group, task=asked, data=data, device=device),
        json,
    )
    _remark(out)


def prune_command(
    model: ModelOption,
    out: OutOption,
    sparsity: Annotated[
        float | None, typer.Option(help="Fraction of the weights to set to zero.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="Zeros in a pattern: 2:4 is two of every four.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to keep, e.g. 0,2,4.", metavar="N,…")
    ] = None,
    heads: Annotated[
        float | None, typer.Option(help="Fraction of each layer's heads to keep.")
    ] = None,
    neurons: Annotated[
        float | None, typer.Option(help="Fraction of each MLP's neurons to keep.")
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(
            help="Text, or rows of the task, to measure which heads or neurons matter least."
        ),
    ] = None,
    task: TaskOption = None,
    data: JudgedOption = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    device: DeviceOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Remove the least important weights, layers, heads or neurons.

    Example: malmoi compress prune --model runs/bert --out runs/bert-half --layers 0,2,4
    """
    load_torch()
    from malmoi.compression.prune import prune_model

    require_free(out, overwrite=overwrite)
    ways: dict[str, Any] = dict(
        sparsity=sparsity, pattern=pattern, layers=layers, heads=heads, neurons=neurons
    )
    asked = _task(task, text, pair, label)
    _show(prune_model(model, out, **ways, train=train, task=asked, data=data, device=device), json)
    blind = train is None and (heads or neurons)
    ranked = [
        "They were chosen by their weights alone; --train FILE chooses by the loss, which costs "
        "far less quality."
    ]
    again = "Train it again: malmoi finetune, pretrain --start, or compress distil --student."
    _remark(out, *(ranked if blind else []), again)


def distil_command(
    model: ModelOption,
    data: Annotated[
        list[Path], typer.Option(help="Text, or rows of the task, to train the student on.")
    ],
    out: OutOption,
    task: TaskOption = None,
    dev: Annotated[
        list[Path] | None,
        typer.Option(help="Evaluation rows.", show_default="a tenth of --data"),
    ] = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the student.", show_default="half the teacher's")
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="A student of another shape.", metavar="DIR")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Softmax temperature of the teacher.")] = 2.0,
    soft: Annotated[
        float | None,
        typer.Option(
            help="Weight of the teacher's loss; the labels get the rest.",
            show_default="5/7 for text, 1/2 for a task",
        ),
    ] = None,
    settings: SetOption = None,
    overwrite: OverwriteOption = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Distil a model into a smaller student.

    On a task's rows, or on plain text.

    Example: malmoi compress distil --model runs/sst2 --task sst2 --data train.tsv --dev dev.tsv
    --out runs/sst2-3
    """
    load_torch()
    from malmoi.compression.distil import distil_model

    ways: dict[str, Any] = dict(layers=layers, student=student, temperature=temperature, soft=soft)
    changes: dict[str, Any] = {**changes_of(settings), "overwrite": overwrite}
    asked = _task(task, text, pair, label)
    _show(
        distil_model(
            model, out, data, task=asked, dev=dev or None, **ways, device=device, **changes
        ),
        json,
    )
    _remark(out)


def share_command(
    model: ModelOption,
    out: OutOption,
    groups: Annotated[int, typer.Option(help="Distinct blocks, shared over the depth.")] = 1,
    embedding: Annotated[
        int, typer.Option(help="Width of a factorised embedding; 0: unchanged.")
    ] = 0,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Share weights between layers, as ALBERT does.

    Train the result again: with compress distil --student, finetune, or pretrain --start.

    Example: malmoi compress share --model runs/bert --groups 1 --embedding 128 --out
    runs/bert-shared
    """
    from malmoi.checkpoint.folder import read_model_json
    from malmoi.compression.share import share_layers

    require_free(out, overwrite=overwrite)
    _show(share_layers(model, out, groups=groups, embedding=embedding), json)
    kind = (
        f"It is written as a model of type "
        f"{read_model_json(out / 'config.json')['model_type']}, in fp32."
    )
    _remark(
        out,
        kind,
        "Train it again: malmoi compress distil --student, finetune, or pretrain --start.",
    )


def _task(name: str | None, text: str | None, pair: str | None, label: str | None) -> "Task | None":
    if name is None and (text or pair or label):
        raise UsageError(
            "--text, --pair and --label are columns of a task's rows: name the --task too."
        )
    return chosen_task(name, text=text, pair=pair, label=label) if name else None


def _remark(out: Path, *others: str) -> None:
    """Prints what the user should know about the smaller model on stderr."""
    from malmoi.compression.models import remarks

    for remark in (*remarks(out), *others):
        note(remark)


def _show(found: "CompressionResult", json: bool) -> None:
    if json:
        sizes: dict[str, tuple[float, float]] = {"weights": found.weights, "bytes": found.size}
        if found.costs is not None:
            before, after = found.costs
            sizes["memory"] = (before.memory, after.memory)
            sizes[before.unit.replace("/s", "_per_second")] = (before.rate, after.rate)
        print_json(
            {
                **{name: list(pair) for name, pair in (sizes | dict(found.metrics)).items()},
                "model": str(found.out),
            }
        )
    else:
        print_table(("what", "before", "after"), list(found.rows()))
        print(found.out)
