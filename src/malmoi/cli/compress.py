"""Verbs that make a model smaller: quantize, prune, distil, share."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malmoi.cli.app import add_group
from malmoi.cli.inputs import DeviceOption, JsonOption, ModelOption, changes_of
from malmoi.cli.show import print_json, print_table
from malmoi.cli.tasks import LabelOption, PairOption, TextOption, chosen_task
from malmoi.errors import UsageError

if TYPE_CHECKING:
    from malmoi.compress import Shrunk
    from malmoi.tasks import Task

OutOption = Annotated[Path, typer.Option(help="The folder of the smaller model.", metavar="DIR")]
TaskOption = Annotated[str | None, typer.Option(help="The task of the rows in --data (see malmoi tasks).")]
JudgedOption = Annotated[
    Path | None, typer.Option("--data", help="Text, or rows of the task: judged before and after.")
]


def add(app: typer.Typer) -> None:
    add_group(app, "compress", "Make a model smaller.", quantize, prune, distil, share)


def quantize(
    model: ModelOption,
    out: OutOption,
    bits: Annotated[int, typer.Option(help="8, or 4.")] = 8,
    group: Annotated[int, typer.Option(help="Inputs that share a scale; 0: a whole row, at 4 bits 32.")] = 0,
    task: TaskOption = None,
    data: JudgedOption = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Keep the weights of linear layers as whole numbers of few bits, with scales.

    Example: malmoi compress quantize --model runs/gpt --out runs/gpt-8bit --data held-out.txt
    """
    from malmoi.compress.quantize import quantize as done

    asked = _task(task, text, pair, label)
    _show(done(model, out, bits=bits, group=group, task=asked, data=data, device=device), json)
    _remark(out)


def prune(
    model: ModelOption,
    out: OutOption,
    sparsity: Annotated[float | None, typer.Option(help="The share of the weights that become zero.")] = None,
    pattern: Annotated[str | None, typer.Option(help="Zeros in a pattern: 2:4 is two of every four.")] = None,
    layers: Annotated[str | None, typer.Option(help="The layers that stay, e.g. 0,2,4.", metavar="N,…")] = None,
    heads: Annotated[float | None, typer.Option(help="The share of each layer's heads that stays.")] = None,
    neurons: Annotated[float | None, typer.Option(help="The share of each MLP's neurons that stays.")] = None,
    train: Annotated[
        Path | None, typer.Option(help="Text, or rows of the task: heads or neurons that it needs least go.")
    ] = None,
    task: TaskOption = None,
    data: JudgedOption = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Take parts out of a model: single weights, layers, heads, or neurons, the least important first.

    Example: malmoi compress prune --model runs/bert --out runs/bert-half --layers 0,2,4
    """
    from malmoi.compress.prune import prune as done

    ways: dict[str, Any] = dict(sparsity=sparsity, pattern=pattern, layers=layers, heads=heads, neurons=neurons)
    asked = _task(task, text, pair, label)
    _show(done(model, out, **ways, train=train, task=asked, data=data, device=device), json)
    blind = train is None and (heads or neurons)
    ranked = ["They went by their weights alone; --train FILE finds what the loss needs, which costs far less."]
    again = "It should learn again: malmoi finetune, pretrain --start, or compress distil --student."
    _remark(out, *(ranked if blind else []), again)


def distil(
    model: ModelOption,
    data: Annotated[list[Path], typer.Option(help="Text, or rows of the task, from which the student learns.")],
    out: OutOption,
    task: TaskOption = None,
    dev: Annotated[list[Path] | None, typer.Option(help="Rows to judge by; else a tenth is held out.")] = None,
    text: TextOption = None,
    pair: PairOption = None,
    label: LabelOption = None,
    layers: Annotated[int | None, typer.Option(help="The student's; else half of the teacher's.")] = None,
    student: Annotated[str | None, typer.Option(help="A student of another shape.", metavar="DIR")] = None,
    temperature: Annotated[float, typer.Option(help="Softens what the teacher says.")] = 2.0,
    soft: Annotated[float, typer.Option(help="The teacher's share of the loss; the labels have the rest.")] = 0.5,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of finetune or pretrain.", metavar="K=V")
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Teach a smaller student what a model says: of a task's rows, or of plain text.

    Example: malmoi compress distil --model runs/sst2 --task sst2 --data train.tsv --dev dev.tsv --out runs/sst2-3
    """
    from malmoi.compress.distil import distil as done

    ways: dict[str, Any] = dict(layers=layers, student=student, temperature=temperature, soft=soft)
    changes: dict[str, Any] = {**changes_of(settings)}
    asked = _task(task, text, pair, label)
    _show(done(model, out, data, task=asked, dev=dev or None, **ways, device=device, **changes), json)
    _remark(out)


def share(
    model: ModelOption,
    out: OutOption,
    groups: Annotated[int, typer.Option(help="Distinct blocks, shared over the depth.")] = 1,
    embedding: Annotated[int, typer.Option(help="The width of a factorised embedding; 0: as it is.")] = 0,
    json: JsonOption = False,
) -> None:
    """Let layers share their weights, and factorise the embedding, as ALBERT does; then it must learn again.

    Example: malmoi compress share --model runs/bert --groups 1 --embedding 128 --out runs/bert-shared
    """
    from malmoi.checkpoint.folder import read_json
    from malmoi.compress.share import share as done

    _show(done(model, out, groups=groups, embedding=embedding), json)
    kind = f"It is written as a model of type {read_json(out / 'config.json')['model_type']}, in fp32."
    _remark(out, kind, "It must learn again: malmoi compress distil --student, finetune, or pretrain --start.")


def _task(name: str | None, text: str | None, pair: str | None, label: str | None) -> "Task | None":
    if name is None and (text or pair or label):
        raise UsageError("--text, --pair and --label are columns of a task's rows: name the --task too.")
    return chosen_task(name, text, pair, label, None) if name else None


def _remark(out: Path, *others: str) -> None:
    """Says on stderr what should be known of the smaller model."""
    from malmoi.compress.opened import remarks

    for remark in (*remarks(out), *others):
        print(f"note: {remark}", file=sys.stderr)


def _show(found: "Shrunk", json: bool) -> None:
    if json:
        sizes: dict[str, tuple[float, float]] = {"weights": found.weights, "bytes": found.size}
        if found.costs is not None:
            before, after = found.costs
            sizes["memory"] = (before.memory, after.memory)
            sizes[before.unit.replace("/s", "_per_second")] = (before.rate, after.rate)
        print_json(
            {**{name: list(pair) for name, pair in (sizes | dict(found.metrics)).items()}, "model": str(found.out)}
        )
    else:
        print_table(("what", "before", "after"), list(found.rows()))
        print(found.out)
