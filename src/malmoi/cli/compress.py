"""Make a model smaller: quantize, prune, distil, share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from malmoi.api.records import ColumnOptions
from malmoi.api.run_options import BuildOptions, RunOptions
from malmoi.api.tools import compress
from malmoi.cli import shared as cli
from malmoi.compression.options import (
    DistilOptions,
    JudgedOptions,
    PruneOptions,
    QuantizeOptions,
    ShareOptions,
)
from malmoi.errors import require_that
from malmoi.finetuning.config import FinetuneConfig

if TYPE_CHECKING:
    from malmoi.compression.result import CompressionResult
    from malmoi.evaluation.tasks import Task

AGAIN = "Train it again: malmoi finetune, pretrain --start, or compress distil --student."


def quantize_command(
    model: cli.Model,
    out: cli.Out,
    options: dict[str, Any] = cli.options_of(QuantizeOptions, JudgedOptions, RunOptions),
    method: Literal["round", "gptq"] = cli.option(
        "round", "round to nearest, or gptq, which is more accurate at 4 bits."
    ),
    task: cli.Task = None,
    columns: dict[str, Any] = cli.options_of(ColumnOptions, names="text pair label"),
    json: cli.Json = False,
) -> None:
    """Quantize the linear layers to 8 or 4 bits.

    Example: malmoi compress quantize --model runs/gpt --out runs/gpt-8bit --data held-out.txt
    """
    require_that(
        (method == "gptq") == ("calibration" in options),
        "--method gptq needs --calibration FILE, and no other method uses it.",
    )
    _shrink("quantize", model, out, options | {"task": _task(task, columns)}, json)


def prune_command(
    model: cli.Model,
    out: cli.Out,
    options: dict[str, Any] = cli.options_of(PruneOptions, JudgedOptions, RunOptions),
    task: cli.Task = None,
    columns: dict[str, Any] = cli.options_of(ColumnOptions, names="text pair label"),
    json: cli.Json = False,
) -> None:
    """Remove the least important weights, layers, heads or neurons.

    Example: malmoi compress prune --model runs/bert --out runs/bert-half --layers 0,2,4
    """
    blind = "train" not in options and ("heads" in options or "neurons" in options)
    ranked = [
        "They were chosen by their weights alone; --train FILE chooses by the loss, which costs "
        "far less quality."
    ]
    options |= {"task": _task(task, columns)}
    _shrink("prune", model, out, options, json, *(ranked if blind else []), AGAIN)


def distil_command(
    model: cli.Model,
    data: Annotated[
        list[Path], cli.described("Text, or rows of the task, to train the student on.", "--data")
    ],
    out: cli.Out,
    task: cli.Task = None,
    dev: list[Path] | None = cli.option(None, "Evaluation rows.", shown="a tenth of --data"),
    columns: dict[str, Any] = cli.options_of(ColumnOptions, names="text pair label"),
    options: dict[str, Any] = cli.options_of(DistilOptions, RunOptions),
    budget: dict[str, Any] = cli.options_of(FinetuneConfig, names="minutes seed"),
    settings: cli.Set = None,
    json: cli.Json = False,
) -> None:
    """Distil a model into a smaller student.

    On a task's rows, or on plain text.

    Example: malmoi compress distil --model runs/sst2 --task sst2 --data train.tsv --dev dev.tsv
    --out runs/sst2-3
    """
    options |= {
        **budget,
        "settings": cli.changes_of(settings),
        "data": data,
        "task": _task(task, columns),
        "dev": dev or None,
    }
    _shrink("distil", model, out, options, json)


def share_command(
    model: cli.Model,
    out: cli.Out,
    options: dict[str, Any] = cli.options_of(ShareOptions, BuildOptions),
    json: cli.Json = False,
) -> None:
    """Share weights between layers, as ALBERT does.

    Train the result afterwards, with compress distil --student, finetune, or pretrain --start.

    Example: malmoi compress share --model runs/bert --groups 1 --embedding 128 --out
    runs/bert-shared
    """
    _shrink("share", model, out, options, json, AGAIN)


def _task(name: str | None, columns: dict[str, Any]) -> "Task | None":
    from malmoi.evaluation.guess import task_on_columns

    require_that(
        name is not None or not columns,
        "--text, --pair and --label are columns of a task's rows: name the --task too.",
    )
    return task_on_columns(name, **cli.parsed_columns(columns)) if name else None


def _shrink(
    method: Any, model: str, out: Path, options: dict[str, Any], json: bool, *notes: str
) -> None:
    """Makes the smaller model, prints its size and quality, and notes what to do with it."""
    cli.load_torch()
    from malmoi.compression.result import remarks

    found: CompressionResult = compress(model, out, method, **options)
    if json:
        cli.print_json(_facts(found))
    else:
        cli.print_facts(("what", "before", "after"), list(found.rows()))
        cli.print_result(found.out)
    for remark in (*remarks(out), *notes):
        cli.note(remark)


def _facts(found: "CompressionResult") -> dict[str, Any]:
    facts: dict[str, Any] = {"weights": found.weights, "bytes": found.size}
    if found.costs is not None:
        before, after = found.costs
        facts["memory"] = (before.memory, after.memory)
        facts[before.unit.replace("/s", "_per_second")] = (before.rate, after.rate)
    return {**facts, **found.metrics, "model": str(found.out)}
