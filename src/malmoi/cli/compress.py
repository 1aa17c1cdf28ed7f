"""Make a model smaller: quantize, prune, distil, share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from malmoi.api.records import ColumnOptions
from malmoi.cli import options as opt
from malmoi.cli.inputs import changes_of, load_torch, parsed_columns
from malmoi.cli.options import described, option, options_of
from malmoi.cli.output import note, print_facts, print_json, print_result
from malmoi.compression.options import (
    DistilOptions,
    JudgedOptions,
    PruneOptions,
    QuantizeOptions,
    ShareOptions,
)
from malmoi.errors import UsageError
from malmoi.finetuning.config import FinetuneConfig
from malmoi.messages import msg
from malmoi.system.files import require_free

if TYPE_CHECKING:
    from malmoi.compression.result import CompressionResult
    from malmoi.evaluation.tasks import Task


def quantize_command(
    model: opt.Model,
    out: opt.Out,
    options: dict[str, Any] = options_of(QuantizeOptions),
    method: Literal["round", "gptq"] = option(
        "round", "round to nearest, or gptq, which is more accurate at 4 bits."
    ),
    task: opt.Task = None,
    judged: dict[str, Any] = options_of(JudgedOptions),
    columns: dict[str, Any] = options_of(ColumnOptions, names="text pair label"),
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
    if (method == "gptq") != ("calibration" in options):
        raise UsageError("--method gptq needs --calibration FILE, and no other method uses it.")
    options |= {**judged, "task": _task(task, columns), "device": device}
    found = quantize_model(model, out, **options)
    _show(found, json)
    _remark(out)


def prune_command(
    model: opt.Model,
    out: opt.Out,
    options: dict[str, Any] = options_of(PruneOptions),
    task: opt.Task = None,
    judged: dict[str, Any] = options_of(JudgedOptions),
    columns: dict[str, Any] = options_of(ColumnOptions, names="text pair label"),
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
    blind = "train" not in options and ("heads" in options or "neurons" in options)
    options |= {**judged, "task": _task(task, columns), "device": device}
    _show(prune_model(model, out, **options), json)
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
    columns: dict[str, Any] = options_of(ColumnOptions, names="text pair label"),
    options: dict[str, Any] = options_of(DistilOptions),
    budget: dict[str, Any] = options_of(FinetuneConfig, names="minutes seed"),
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

    options |= {**changes_of(settings), **budget, "overwrite": overwrite, "device": device}
    options |= {"task": _task(task, columns), "dev": dev or None}
    _show(distil_model(model, out, data, **options), json)
    _remark(out)


def share_command(
    model: opt.Model,
    out: opt.Out,
    options: dict[str, Any] = options_of(ShareOptions),
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
    _show(share_layers(model, out, **options), json)
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
    return task_on_columns(name, **parsed_columns(columns)) if name else None


def _remark(out: Path, *others: str) -> None:
    """Prints notes about the smaller model on stderr."""
    from malmoi.compression.result import remarks

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
