"""`malmoi doctor`, `malmoi plan`, `malmoi launch`: what this machine or others can do."""

import math
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from malmoi import __version__
from malmoi.api.tools import plan
from malmoi.cli import shared as cli
from malmoi.cli.pretrain import is_recipe
from malmoi.errors import require_that
from malmoi.messages import joined, msg, plural, translate
from malmoi.planning.gpus import GPUS, PlanSettings
from malmoi.planning.launch import Engine, Launch
from malmoi.system.machine import GIB, Machine, free_memory, this_machine
from malmoi.system.untrusted import format_size
from malmoi.training.recipe import BUDGETS, TrainConfig
from malmoi.training.recipes import SIZED

if TYPE_CHECKING:
    from malmoi.planning.plan import MemoryUse, RunPlan


# ------------------------------------------------------------------ this one

NAMES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}
EXTRAS = {  # modules of each optional part of the installation
    "hub": ("huggingface_hub", "sentencepiece"),
    "data": ("datasets", "openpyxl", "pyarrow", "zstandard"),
    "web": ("trafilatura", "lxml_html_clean"),
    "cluster": ("ray",),
    "ko": ("kiwipiepy",),
    "eval": ("lm_eval",),
    "serve": ("httptools", "uvloop"),
    "track": ("tensorboard", "wandb", "mlflow", "trackio"),
    "export": ("onnx", "onnxscript", "onnxruntime", "gguf"),
}
ELSEWHERE = ("uvloop",) if sys.platform == "win32" else ()  # modules for other systems only


def doctor_command(json: cli.Json = False) -> None:
    """Show what this machine can do, and what is missing.

    Example: malmoi doctor
    """
    found = _facts(this_machine())
    extras = _extras()
    named = ((msg("extra {name}", name=name), status) for name, status in extras.items())
    if json:
        cli.print_json({**found, "extras": extras})
    else:
        cli.print_facts(("what", "found"), [*found.items(), *named])


def _facts(machine: Machine) -> dict[str, str]:
    kind = machine.default_device()
    system = f"{platform.system()} {platform.machine()}"
    instructions = ", ".join(sorted(machine.features)) or msg("no known vector instructions")
    cores = plural(machine.cores, "core")
    free, total = free_memory() / GIB, machine.memory / GIB
    usage = shutil.disk_usage(Path.cwd())
    disk = dict(free=usage.free / GIB, total=usage.total / GIB)
    return {
        "python": f"Python {platform.python_version()}, malmoi {__version__}, {system}",
        "torch": f"torch {version('torch')}",  # its metadata: importing it takes seconds
        "processor": joined(", ", (machine.architecture, cores, instructions)),
        "precision": _precision(machine, kind),
        "int8": _int8(machine),
        "compiler": _compiler(machine, kind),
        "gpu": _gpu(machine),
        "memory": msg("{total:.1f} GiB, {free:.1f} GiB free", total=total, free=free),
        "disk": msg("{free:.0f} of {total:.0f} GiB free here", **disk),
        "tested on": (
            "Linux on x86 and ARM, NVIDIA GPUs; never run on Windows, macOS or an Apple GPU"
        ),
    }


def _precision(machine: Machine, kind: str) -> str:
    """The precision the machine computes in, and why."""
    name = msg(NAMES[kind])
    if machine.fast_bf16(kind):
        return msg("bf16 on the {name}'s matrix units", name=name)
    if machine.native_bf16(kind):
        return msg("fp32 for training; bf16 weights are used as they are on the {name}", name=name)
    return msg(
        "fp32: the {name} has no bf16 units, and emulated bf16 is many times slower", name=name
    )


def _int8(machine: Machine) -> str:
    if machine.int8_instructions:
        return msg(
            "a kernel for {machine.int8_instructions}, compiled with {machine.compiler}",
            machine=machine,
        )
    if machine.compiler is None:
        return "slower than fp32 here: no C compiler to build the kernel with"
    return "slower than fp32 here: neither AVX2 nor ARM's dotprod"


def _compiler(machine: Machine, kind: str) -> str:
    if machine.compiler is None:
        return "none; torch.compile is not used on the processor"
    runs = msg("used in long runs" if machine.compile_pays(kind, math.inf) else "not used")
    return msg("{compiler}; torch.compile is {runs}", compiler=machine.compiler, runs=runs)


def _gpu(machine: Machine) -> str:
    if not machine.accelerators:
        return "none; models run on the processor"
    each = "{gpu.count} × {gpu.name}, {memory:.0f} GiB each ({gpu.kind})"
    return joined(
        "; ", (msg(each, gpu=gpu, memory=gpu.memory / GIB) for gpu in machine.accelerators)
    )


def _extras() -> dict[str, str]:
    """Each optional part: installed, or the line that installs it."""
    found = {}
    for name, modules in EXTRAS.items():
        missing = [part for part in modules if part not in ELSEWHERE and find_spec(part) is None]
        line = msg("missing: pip install {missing}", missing=" ".join(missing))
        found[name] = line if missing else "installed"
    return found


# ------------------------------------------------------------------ others

EXAMPLE = (
    "malmoi plan gpt3-175b --gpus 512 --gpu h200 --gradient-checkpointing --set "
    "train.parallel=fsdp --set train.batch=1536"
)
LAYOUT_NAMES = {"one": "one GPU", "ddp": "DDP", "fsdp": "FSDP", "hybrid": "hybrid FSDP"}
# parts of a GPU's memory besides activations
MEMORY_PARTS = ("weights", "gradients", "optimizer", "copies", "exchange")


def plan_command(
    recipe: str | None = cli.argument(
        None,
        "A name or a recipe.json; omit to list the GPUs.",
        metavar="[RECIPE]",
        autocompletion=cli.complete_recipes,
    ),
    gpus: int = cli.option(1, "Number of GPUs.", metavar="N"),
    gpu: str = cli.option(
        "h200", "GPU model; any name together with --gpu-memory and --gpu-tflops."
    ),
    assumed: dict[str, Any] = cli.options_of(PlanSettings),
    again: dict[str, Any] = cli.options_of(TrainConfig, names="gradient_checkpointing"),
    settings: cli.Set = None,
    json: cli.Json = False,
) -> None:
    """Estimate memory, days and cost of a run on any GPUs.

    Example: malmoi plan gpt2-small --gpus 8 --gpu h100 --price 2.50
    """
    if recipe is None:
        return _list_gpus(json)
    cli.load_torch()  # the network is built, on the meta device
    changes = cli.changes_of(settings) | {f"train.{name}": value for name, value in again.items()}
    made = plan(recipe, gpus=gpus, gpu=gpu, settings=changes, **assumed)
    cli.print_json(made.to_dict()) if json else _print_plan(made)


def _list_gpus(json: bool) -> None:
    columns = ("gpu", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB", "GB/s", "watts")
    facts = [asdict(gpu) for gpu in GPUS.values()]
    rows = [(one["name"], *(f"{v:g}" for v in list(one.values())[1:])) for one in facts]
    cli.print_rows(json, facts, columns, rows)
    if not json:
        print(f"\n{translate('Example')}: {EXAMPLE}")


def _print_plan(made: "RunPlan") -> None:
    cli.print_facts(("what", "expected"), plan_rows(made))
    print()
    columns = ("memory of one GPU", "model", "activations", "total", "micro-batch", "fits")
    cli.print_facts(columns, [_row(one, made.fleet.room) for one in made.ways])
    print()
    cli.print_table(
        ("micro-batch", "activations", "checkpointed"),
        ((str(n), *map(format_size, sizes)) for n, sizes in made.activations.items()),
    )
    print("".join(f"\n{translate('note: ')}{translate(note)}" for note in made.notes))


def plan_rows(made: "RunPlan") -> Iterator[tuple[str, str]]:
    fleet = made.fleet
    again = made.flops.again * made.tokens
    yield (
        "recipe",
        msg("{made.recipe.name} on {fleet.gpus:,} × {fleet.gpu.name}", made=made, fleet=fleet),
    )
    yield "parameters", f"{made.parameters:,}"
    parts = "embedding {made.embedding:,}, blocks {made.blocks:,}, head {made.head:,}"
    yield "of them", msg(parts, made=made)
    in_steps = msg("{made.tokens:,} in {made.steps:,} steps", made=made)
    yield "tokens", in_steps if made.steps else f"{made.tokens:,}"
    yield "FLOPs, 6·N·D", f"{made.flops.rule * made.tokens:.3g}"
    exact = msg("{exact:.3g}: every product, attention too", exact=made.flops.exact * made.tokens)
    recomputed = msg("; {again:.3g} more are recomputed", again=again) if again else ""
    yield "FLOPs, exact", exact + recomputed
    yield "tokens per parameter", _compared(made)
    yield "memory", _fit(made)
    speed = msg("{tokens:,.0f} tokens per second", tokens=made.tokens / made.seconds)
    peak = fleet.peak(made.recipe) / 1e12
    pace = msg("at {fleet.utilisation:.0%} of {peak:,.4g} TFLOP/s", fleet=fleet, peak=peak)
    yield "time", joined(", ", (cli.format_span(made.seconds), speed, pace))
    yield "GPU-hours", f"{_short(made.gpu_hours)}"
    if made.kwh is not None:
        energy = "{kwh} kWh at {fleet.gpu.watts:g} W per GPU and a PUE of {fleet.pue:g}"
        yield "energy", msg(energy, kwh=_short(made.kwh), fleet=fleet)
    if made.cost is not None:
        yield "cost", msg("{made.cost:,.2f} at {made.fleet.price:g} per GPU-hour", made=made)
    sizes = dict(storage=format_size(made.storage), state=format_size(made.state))
    yield "storage", msg("up to {storage}: checkpoints of {state} and the model", **sizes)


def _compared(made: "RunPlan") -> str:
    ratio = f"{made.tokens / made.parameters:.3g}"
    if made.optimal is None:
        return ratio
    from malmoi.report.chart import short_number

    return msg(
        "{ratio}; for this size Kaplan 2020 takes {kaplan} tokens, Hoffmann 2022 {hoffmann} "
        "(20 per parameter); for these FLOPs {same_parameters} parameters and {same_tokens} tokens",
        ratio=ratio,
        **{name: short_number(count, 3) for name, count in vars(made.optimal).items()},
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _fit(made: "RunPlan") -> str:
    one = made.memory
    way = msg(LAYOUT_NAMES[one.way])
    how = msg("{way}, micro-batch {one.micro}, passes per step {one.passes}", way=way, one=one)
    total = format_size(one.total)
    room = made.fleet.gpu.memory
    usage = msg("about {total} of {room:g} GB ({how})", total=total, room=room, how=how)
    if made.fits:
        return msg("fits: {usage}", usage=usage)
    return joined(". ", (msg("does not fit: {usage}", usage=usage), msg(made.help)))


def _row(one: "MemoryUse", room: float) -> list[str]:
    name = msg(LAYOUT_NAMES[one.way]) + (f" × {one.gpus}" if one.gpus > 1 else "")
    name += msg(", checkpointed") if one.gradient_checkpointing else ""
    model = sum(getattr(one, part) for part in MEMORY_PARTS)
    fits = "yes" if one.total <= room else "no"
    return [name, *map(format_size, (model, one.activations, one.total)), str(one.micro), fits]


# ------------------------------------------------------------------ several at once


def launch_command(
    command: list[str] = cli.argument(
        ..., "The command, as on one machine, after --.", metavar="-- pretrain …"
    ),
    gpus: int | None = cli.option(
        None,
        "GPUs of each machine, or processes without any.",
        shown="those of this machine",
        metavar="1≤N",
    ),
    engine: Engine = cli.option(
        "torchrun", "What starts the processes: torchrun, slurm, kubernetes or ray.", "--on"
    ),
    options: dict[str, Any] = cli.options_of(Launch),
    gpu: str = cli.option("", "GPU model: what the run will take on it.", metavar="NAME"),
    assumed: dict[str, Any] = cli.options_of(PlanSettings, names="price utilisation pue"),
    dry_run: bool = cli.option(False, "Only print the script and the estimate.", "--dry-run"),
) -> None:
    """Start a run on several GPUs or machines.

    Every process is told its part; a lost one costs what was not yet saved.

    Example: malmoi launch --gpus 8 -- pretrain gpt2-small texts/ -o runs/gpt2

    Example: malmoi launch --on slurm --nodes 4 --gpus 8 --dry-run -- pretrain bert-base texts/
    """
    require_that(
        command[0] == "pretrain",
        "launch starts pretrain: corpus build, predict and embed take --part instead.",
    )
    processes = max(1, this_machine().count("cuda")) if gpus is None else gpus
    made = Launch(command=command, engine=engine, processes=processes, **options)
    _estimate(command[1:], made, gpu, assumed)
    if dry_run:
        print(made.script(), end="")
        return
    if made.engine == "torchrun" and made.nodes > 1:
        cli.say("Type the same on the other {machines}.", machines=made.nodes - 1)
    raise typer.Exit(made.run())


def _estimate(words: list[str], made: Launch, gpu: str, assumed: dict[str, Any]) -> None:
    """Says what the plan of a named recipe is; a wrong option of pretrain is an error here."""
    from typer.main import get_command

    from malmoi.cli.app import build_app

    group: Any = get_command(build_app("pretrain"))
    given = group.commands["pretrain"].make_context("pretrain", words).params
    recipe = next((word for word in given["words"] if is_recipe(word)), "gpt")
    if recipe in SIZED or not gpu:
        return
    budget = {f"train.{name}": given[name] for name in BUDGETS if given[name]}
    changes = cli.changes_of(given["settings"]) | budget
    planned = plan(recipe, gpus=made.nodes * made.processes, gpu=gpu, settings=changes, **assumed)
    for name, value in plan_rows(planned):
        if name in ("memory", "time", "energy", "cost"):
            cli.say("{name}: {value}", name=msg(name), value=value)
