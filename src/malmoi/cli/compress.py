"""Make a model smaller: quantize, prune, distil, share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from malmoi.cli import options as opt
from malmoi.cli.inputs import changes_of, given, given_columns, load_torch
from malmoi.cli.options import described, option
from malmoi.cli.output import note, print_facts, print_json, print_result
from malmoi.errors import UsageError
from malmoi.messages import msg
from malmoi.system.files import require_free

if TYPE_CHECKING:
    from malmoi.compression.options import JudgedOptions
    from malmoi.compression.result import CompressionResult
    from malmoi.evaluation.tasks import Task

JudgedOption = Annotated[
    Path | None, described("Text, or rows of the task, to evaluate on before and after.", "--data")
]


def quantize_command(
    model: opt.Model,
    out: opt.Out,
    bits: int = option(8, "Bits per weight: 8 or 4."),
    group: int = option(0, "Inputs that share a scale; 0: a whole row, or 32 at 4 bits."),
    method: Literal["round", "gptq"] = option(
        "round", "round to nearest, or gptq, which is more accurate at 4 bits."
    ),
    calibration: Path | None = option(
        None, "Calibration text for GPTQ, similar to the model's input."
    ),
    task: opt.Task = None,
    data: JudgedOption = None,
    text: opt.Text = None,
    pair: opt.Pair = None,
    label: opt.Label = None,
    device: opt.Device = None,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
) -> None:
    """Quantize the linear layers to 8 or 4 bits.

    Example: malmoi compress quantize --model runs/gpt --out runs/gpt-8bit --data held-out.txt
    """
    load_torch()
    from malmoi.compression.quantize import quantize_model

    require_free(out, overwrite=overwrite)
    named = _task(task, given_columns(locals()))
    if (method == "gptq") != (calibration is not None):
        raise UsageError("--method gptq needs --calibration FILE, and no other method uses it.")
    judged: JudgedOptions = {"task": named, "data": data, "device": device}
    found = quantize_model(model, out, bits=bits, group=group, calibration=calibration, **judged)
    _show(found, json)
    _remark(out)


def prune_command(
    model: opt.Model,
    out: opt.Out,
    sparsity: float | None = option(None, "Fraction of the weights to set to zero."),
    pattern: str | None = option(None, "Sparsity pattern: 2:4 keeps two of every four weights."),
    layers: str | None = option(None, "Layers to keep, e.g. 0,2,4.", metavar="N,…"),
    heads: float | None = option(None, "Fraction of each layer's heads to keep."),
    neurons: float | None = option(None, "Fraction of each MLP's neurons to keep."),
    train: Path | None = option(
        None, "Text, or rows of the task, to measure which heads or neurons matter least."
    ),
    task: opt.Task = None,
    data: JudgedOption = None,
    text: opt.Text = None,
    pair: opt.Pair = None,
    label: opt.Label = None,
    device: opt.Device = None,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
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
    named = _task(task, given_columns(locals()))
    _show(prune_model(model, out, **ways, train=train, task=named, data=data, device=device), json)
    blind = train is None and (heads or neurons)
    ranked = [
        "They were chosen by their weights alone; --train FILE chooses by the loss, which costs "
        "far less quality."
    ]
    again = "Train it again: malmoi finetune, pretrain --start, or compress distil --student."
    _remark(out, *(ranked if blind else []), again)


def distil_command(
    model: opt.Model,
    data: Annotated[
        list[Path], described("Text, or rows of the task, to train the student on.", "--data")
    ],
    out: opt.Out,
    task: opt.Task = None,
    dev: list[Path] | None = option(None, "Evaluation rows.", shown="a tenth of --data"),
    text: opt.Text = None,
    pair: opt.Pair = None,
    label: opt.Label = None,
    layers: int | None = option(None, "Layers of the student.", shown="half the teacher's"),
    student: str | None = option(None, "Student with a different architecture.", metavar="DIR"),
    temperature: float = option(2.0, "Softmax temperature of the teacher."),
    soft: float | None = option(
        None,
        "Weight of the distillation loss; the labels get the rest.",
        shown="5/7 for text, 1/2 for a task",
    ),
    minutes: opt.Minutes = None,
    seed: opt.Seed = None,
    settings: opt.Set = None,
    overwrite: opt.Overwrite = False,
    device: opt.Device = None,
    json: opt.Json = False,
) -> None:
    """Distil a model into a smaller student.

    On a task's rows, or on plain text.

    Example: malmoi compress distil --model runs/sst2 --task sst2 --data train.tsv --dev dev.tsv
    --out runs/sst2-3
    """
    load_torch()
    from malmoi.compression.distil import distil_model

    ways: dict[str, Any] = dict(layers=layers, student=student, temperature=temperature, soft=soft)
    changes = {**changes_of(settings), **given(locals(), "minutes", "seed"), "overwrite": overwrite}
    named = _task(task, given_columns(locals()))
    _show(
        distil_model(
            model, out, data, task=named, dev=dev or None, **ways, device=device, **changes
        ),
        json,
    )
    _remark(out)


def share_command(
    model: opt.Model,
    out: opt.Out,
    groups: int = option(1, "Distinct blocks, shared over the depth."),
    embedding: int = option(0, "Width of a factorised embedding; 0: unchanged."),
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
) -> None:
    """Share weights between layers, as ALBERT does.

    Train the result afterwards, with compress distil --student, finetune, or pretrain --start.

    Example: malmoi compress share --model runs/bert --groups 1 --embedding 128 --out
    runs/bert-shared
    """
    from malmoi.checkpoint.folder import read_model_json
    from malmoi.compression.share import share_layers

    require_free(out, overwrite=overwrite)
    _show(share_layers(model, out, groups=groups, embedding=embedding), json)
    model_type = read_model_json(out / "config.json")["model_type"]
    again = "Train it again: malmoi compress distil --student, finetune, or pretrain --start."
    _remark(
        out,
        msg("It is written as a model of type {model_type}, in fp32.", model_type=model_type),
        again,
    )


def _task(name: str | None, columns: dict[str, Any]) -> "Task | None":
    from malmoi.evaluation.guess import task_on_columns

    if name is None and columns:
        raise UsageError(
            "--text, --pair and --label are columns of a task's rows: name the --task too."
        )
    return task_on_columns(name, **columns) if name else None


def _remark(out: Path, *others: str) -> None:
    """Prints notes about the smaller model on stderr."""
    from malmoi.compression.models import remarks

    for remark in (*remarks(out), *others):
        note(remark)


def _show(found: "CompressionResult", json: bool) -> None:
    if not json:
        print_facts(("what", "before", "after"), list(found.rows()))
        print_result(found.out)
        return
    facts: dict[str, Any] = {"weights": found.weights, "bytes": found.size}
    if found.costs is not None:
        before, after = found.costs
        facts["memory"] = (before.memory, after.memory)
        facts[before.unit.replace("/s", "_per_second")] = (before.rate, after.rate)
    print_json({**facts, **found.metrics, "model": str(found.out)})
