"""`malmoi plan`: the cost of a run before it starts."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from malmoi.api.tools import plan
from malmoi.cli import shared as cli
from malmoi.messages import joined, msg, translate
from malmoi.planning.gpus import GPUS, PlanSettings
from malmoi.system.limits import format_size
from malmoi.training.recipe import TrainConfig

if TYPE_CHECKING:
    from malmoi.planning.plan import MemoryUse, RunPlan

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
        _list(json)
        return
    cli.load_torch()  # the network is built, on the meta device
    changes = cli.changes_of(settings) | {f"train.{name}": value for name, value in again.items()}
    made = plan(recipe, gpus=gpus, gpu=gpu, settings=changes, **assumed)
    cli.print_json(made.to_dict()) if json else _print_plan(made)


def _list(json: bool) -> None:
    if json:
        for gpu in GPUS.values():
            cli.print_json(asdict(gpu))
        return
    columns = ("gpu", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB", "GB/s", "watts")
    rows = [
        (gpu.name, *(f"{v:g}" for v in list(asdict(gpu).values())[1:])) for gpu in GPUS.values()
    ]
    cli.print_table(columns, rows)
    print(f"\n{translate('Example')}: {EXAMPLE}")


def _print_plan(made: "RunPlan") -> None:
    cli.print_facts(("what", "expected"), plan_rows(made))
    print()
    columns = ("memory of one GPU", "model", "activations", "total", "micro-batch", "fits")
    cli.print_facts(columns, [_row(one, made.fleet.room) for one in made.ways])
    print()
    rows = [(str(n), *map(format_size, sizes)) for n, sizes in made.activations.items()]
    cli.print_table(("micro-batch", "activations", "checkpointed"), rows)
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
    return msg(
        "{ratio}; for this size Kaplan 2020 takes {kaplan} tokens, Hoffmann 2022 {hoffmann} "
        "(20 per parameter); for these FLOPs {same_parameters} parameters and {same_tokens} tokens",
        ratio=ratio,
        **{name: cli.format_count(count) for name, count in vars(made.optimal).items()},
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
