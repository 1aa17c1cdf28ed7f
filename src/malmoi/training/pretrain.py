"""From text to a trained model: tokenizer → token store → network → `Trainer.fit` → folder."""

import gc
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from malmoi.checkpoint import Checkpoint, read_checkpoint
from malmoi.errors import require_that
from malmoi.messages import logger, msg, plural, translate
from malmoi.model import Network
from malmoi.report.chart import ChartPoints, Line, chart, page_chart, short_number, smooth_points
from malmoi.report.console import format_duration
from malmoi.report.page import machine_name, render
from malmoi.system.files import folder_lock, write_text
from malmoi.system.run_folder import read_metrics
from malmoi.system.storage import address, local_path, working_copy
from malmoi.text.documents import read_documents
from malmoi.text.sentences import sentence_splitter
from malmoi.training.budget import estimate_run, verdict
from malmoi.training.data.encode import build_stores
from malmoi.training.feed import make_feeds
from malmoi.training.loop import COMPILING
from malmoi.training.losses import objective
from malmoi.training.losses.distil import Distillation
from malmoi.training.parallel import ProcessGroup, process_group
from malmoi.training.prepare import DISTIL, RunSources, TrainingRun, prepare_run
from malmoi.training.recipe import BUDGETS, Recipe, pretraining_folder, read_recipe
from malmoi.training.recipes import RECIPES, SIZED, names_budget, resolve_recipe
from malmoi.training.signals import Stopped
from malmoi.training.sizing import SizedRecipe, encoded_fraction, size_recipe
from malmoi.training.trainer import Trainer

if TYPE_CHECKING:
    from malmoi.inference import Model

Rows = Sequence[Mapping[str, Any]]  # of metrics.jsonl

LONG_MINUTES = 10  # a run of more that nobody asked for is announced
# files that a run writes
RUN_FOLDERS = ("train_state", "data", "snapshots", "tensorboard")
RUN_FILES = ("recipe.json", "metrics.jsonl", "distil.json", "tokenizer.json", "model.safetensors")


def run_pretraining(  # noqa: PLR0913  # the options of a run
    recipe: str | Recipe,
    *,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    tokenizer: str | Path | None = None,
    start: str | Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    distillation: Distillation | None = None,
    **overrides: Any,
) -> "Model":
    """Trains a model from raw text into a Hugging Face folder; the same call on it resumes.

    `recipe` is a name, a recipe.json or a Recipe; `tokenizer` an existing vocabulary, `start` a
    model to start from; `overwrite` starts over. Overrides are fields of the recipe (`minutes=3`).
    """
    chosen = resolve_recipe(recipe, overrides)
    named = recipe if isinstance(recipe, str) else ""
    sources = (data,) if isinstance(data, str | Path) else data
    known = local_path(tokenizer) if tokenizer else None
    origin = RunSources(tuple(map(str, sources)), known, start)
    with working_copy(out) as out, process_group(device) as group:
        if overwrite:
            if group.first:
                discard_run(out)
            group.barrier()
        sized = None
        if named in SIZED:
            chosen, sized = _sized(chosen, overrides, origin, out, group)
        elif (named in RECIPES or distillation) and not names_budget(overrides):
            announce_time(chosen, origin, group, begun=(out / "recipe.json").is_file())
        with folder_lock(out) if group.first else nullcontext():
            if distillation is None and (out / DISTIL).is_file():
                raise pretraining_folder(out).refusal(["of a student with its teacher"])
            with compiling_ahead(sized, group) as rehearsed:
                run = prepare_run(chosen, origin, out, group)
                run.rehearsed = rehearsed
            _train(Trainer(run, distillation))
            from malmoi.inference import Model  # only at the end

            # one sharded over processes is read back from its folder
            if run.sharded:
                return Model(read_checkpoint(out))
            return Model(replace(run.checkpoint, source=out))


def _train(trainer: Trainer) -> None:
    """Trains a prepared run and writes its report, also when a signal stops it."""
    try:
        trainer.fit()
    except Stopped:
        _report(trainer)
        raise
    _report(trainer)


def discard_run(out: Path) -> None:
    """Removes the files of a pre-training run from the folder, and nothing else."""
    if not (out / "recipe.json").is_file():
        return
    with folder_lock(out):
        for name in RUN_FOLDERS:
            shutil.rmtree(out / name, ignore_errors=True)
        for name in RUN_FILES:
            (out / name).unlink(missing_ok=True)


def _report(trainer: Trainer) -> None:
    if trainer.group.first:
        write_report(trainer.out, trainer.recipe)
    trainer.log.close()
    trainer.group.barrier()


def _sized(
    requested: Recipe,
    overrides: Mapping[str, Any],
    origin: RunSources,
    out: Path,
    group: ProcessGroup,
) -> tuple[Recipe, SizedRecipe | None]:
    """The folder's recipe, or one that the first process chooses for all, and what it measured."""
    begun = out / "recipe.json"
    if begun.is_file() and (before := read_recipe(begun)).name == requested.name:
        return _with_enough_text(resolve_recipe(before, overrides), before), None
    sized = None
    chosen = ""
    if group.first:
        logger.info("Reading the text and measuring this machine …")
        sized = size_recipe(requested, overrides, origin, group)
        for sentence in sized.reasons:
            logger.info(sentence)
        chosen = sized.recipe.to_json()
    return Recipe.from_json(group.broadcast(chosen)).check(), sized


def _with_enough_text(recipe: Recipe, before: Recipe) -> Recipe:
    """A run that is continued for longer reads more of the text, or all of it."""
    longer = max(1.0, recipe.train.minutes / (before.train.minutes or math.inf))
    if recipe.data.fraction != before.data.fraction:  # it was given
        return recipe
    share = before.data.fraction * longer if recipe.train.minutes else 1.0
    return recipe.override({"data.fraction": encoded_fraction(share)})


def explain_size(
    kind: str,
    data: Sequence[str],
    *,
    tokenizer: Path | None = None,
    device: str | None = None,
    **overrides: Any,
) -> SizedRecipe:
    """The recipe that `pretrain gpt|bert|both` would take, and why; nothing is written."""
    requested = resolve_recipe(kind, overrides)
    with process_group(device) as group:
        return size_recipe(requested, overrides, RunSources(tuple(data), tokenizer), group)


def announce_time(recipe: Recipe, origin: RunSources, group: ProcessGroup, *, begun: bool) -> None:
    """Says how long a budget that nobody gave takes here; refuses one of more than a day."""
    _, made = estimate_run(
        recipe, tokenizer=origin.tokenizer, start=origin.start, device=str(group.device)
    )
    minutes = made.seconds / group.world / 60
    budget = next(name for name in BUDGETS if getattr(recipe.train, name))
    require_that(
        minutes <= 1440,
        "This would take about {days} here. Give --minutes, --steps or --tokens, or {paper} for "
        "the paper's budget.",
        days=plural(round(minutes / 1440), "day"),
        paper=f"--set train.{budget}={getattr(recipe.train, budget)}",
    )
    if minutes > LONG_MINUTES and group.first and not begun:
        logger.info(
            "{recipe} takes about {minutes} here; --minutes 10 (minutes=10) makes it shorter.",
            recipe=recipe.name,
            minutes=plural(round(minutes), "minute"),
        )


# ------------------------------------------------------------------ compiling ahead

REHEARSED_STEPS = 3  # batches of varied shapes are compiled for one shape first, then for all


@contextmanager
def compiling_ahead(sized: SizedRecipe | None, group: ProcessGroup) -> Iterator[bool]:
    """Compiles, on a GPU of its own, beside what is done within the context; yields whether."""
    if sized is None or group.device.type != "cuda" or group.world > 1:
        yield False
        return
    logger.info(COMPILING, seconds=20)
    thread = Thread(target=_rehearse, args=(sized, group, torch.get_num_threads()), daemon=True)
    before = sys.getswitchinterval()
    # a thread that loads files waits this long after each for one that computes
    sys.setswitchinterval(before / 20)
    try:
        thread.start()
        yield True
        thread.join()
    finally:
        sys.setswitchinterval(before)


def _rehearse(sized: SizedRecipe, group: ProcessGroup, threads: int) -> None:
    """Takes steps on the sample; all networks of these shapes share what was compiled."""
    torch.set_num_threads(threads)  # of this thread; other code would be compiled for others
    with suppress(Exception), TemporaryDirectory() as folder:
        trainer = Trainer(_sample_run(sized, Path(folder), group))
        trainer.network.train()
        c = trainer.config
        for step in range(REHEARSED_STEPS):
            passes = trainer.feeds[0]._step(step * c.batch, c.batch, trainer.micro, group.device)
            trainer.learn_eagerly([one.tensors for one in passes])
        trainer.log.close()
        del trainer, passes
    gc.collect()
    torch.cuda.empty_cache()


def _sample_run(sized: SizedRecipe, folder: Path, group: ProcessGroup) -> TrainingRun:
    recipe, words = sized.recipe, sized.words
    recipe = replace(recipe, train=replace(recipe.train, tensorboard=False, track=()))
    text = folder / "sample.txt"
    text.write_text("\n\n\n".join(sized.sample), "utf-8")
    sentences = None if recipe.causal else sentence_splitter(recipe.data.sentences)
    end = words.specials.eos if recipe.causal else None
    reader = read_documents(text, documents="blanks")
    stores = build_stores(reader, words, folder / "data", sentences=sentences, end=end)
    feeds, _ = make_feeds(recipe, [stores], words, packed=True)
    network = Network(recipe.model, dict.fromkeys(objective(recipe.objective).heads, 0))
    return TrainingRun(recipe, Checkpoint(network, words), feeds, [], folder, group)


# ------------------------------------------------------------------ the page of a run


def _points(rows: Rows, name: str) -> ChartPoints:
    return [(row["tokens"], row[name]) for row in rows if name in row]


def _smoothed(points: ChartPoints, name: str) -> dict[str, ChartPoints | Line]:
    """Their mean, with single steps faint behind it."""
    return {"steps": Line(points, beside=name), name: smooth_points(points)}


def loss_chart(rows: Rows) -> str:
    """Chart of training and validation loss by tokens."""
    lines = _smoothed(_points(rows, "loss"), translate("training"))
    lines[translate("validation")] = _points(rows, "valid_loss")
    return page_chart(lines, translate("tokens"), translate("loss"))


def _speed_charts(rows: Rows) -> tuple[str, str]:
    """Charts of the learning rate and the speed."""
    x = translate("tokens")
    speeds = _smoothed([p for p in _points(rows, "tokens_per_second") if p[1]], "speed")
    return (
        chart({"": _points(rows, "lr")}, x, translate("learning rate"), (400, 180)),
        chart(speeds, x, translate("tokens per second"), (400, 180)),
    )


def _numbers(rows: Rows, recipe: Recipe) -> list[tuple[str, str]]:
    """The run's final metrics."""
    valid = [r for r in rows if "valid_loss" in r]
    known = ("step", "tokens", "seconds", "sample")
    final = valid[-1].items() if valid else ()
    measures = [(k.replace("_", " "), f"{v:.4g}") for k, v in final if k not in known]
    last: Mapping[str, Any] = rows[-1] if rows else {"step": 0, "tokens": 0, "seconds": 0.0}
    return [
        *measures,
        ("steps", f"{last['step']:,}"),
        ("tokens", short_number(last["tokens"])),
        ("time", format_duration(last["seconds"])),
        ("shape", f"{recipe.model.depth} × {recipe.model.width}"),
        ("vocabulary", f"{recipe.model.vocab:,}"),
    ]


def _warning(rows: Rows, recipe: Recipe) -> str:
    """A warning if the run learned almost nothing."""
    last: Mapping[str, Any] = next((r for r in reversed(rows) if "valid_loss" in r), {})
    if "guessing_loss" not in last:
        return ""
    training = next((r["loss"] for r in reversed(rows) if "loss" in r), math.inf)
    losses = (last["valid_loss"], last["guessing_loss"], training)
    return verdict(recipe, last["step"], *losses, last.get("epochs", 1.0))


def _samples(rows: Rows) -> list[tuple[str, str]]:
    """Samples from the whole run including the first and last, without repetitions."""
    samples = [(f"{r['step']:,}", r["sample"]) for r in rows if r.get("sample")]
    fresh = samples[:1] + [now for before, now in pairwise(samples) if now[1] != before[1]]
    last = len(fresh) - 1
    count = min(len(fresh), 8)
    return [fresh[round(i * last / max(1, count - 1))] for i in range(count)]


def write_report(out: Path, recipe: Recipe, memory: object = None) -> None:
    """Writes the report of a pre-training run from its metrics.jsonl, and from what is known of
    its memory (`malmoi.tracing`).
    """
    rows = read_metrics(out / "metrics.jsonl")
    page = render(
        "report/run_page.jinja",
        title=msg("A run of {recipe}", recipe=recipe.name),
        lead=recipe.about,
        numbers=_numbers(rows, recipe),
        warning=_warning(rows, recipe),
        loss=loss_chart(rows),
        speeds=_speed_charts(rows),
        samples=_samples(rows),
        memory=memory,
        facts=_facts(out, recipe),
        settings=recipe.to_json(),
    )
    write_text(out / "report.html", page)


def _facts(out: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """The run's settings and provenance, shown beside its curves."""
    c = recipe.train
    budget = next(plural(getattr(c, n), n.removesuffix("s")) for n in BUDGETS if getattr(c, n))
    return [
        (translate("date"), f"{datetime.now():%Y-%m-%d %H:%M}"),
        (translate("folder"), address(out)),
        (translate("learns by"), recipe.objective),
        (translate("budget"), translate(budget)),
        (translate("batch"), f"{c.batch} × {', '.join(str(n) for n, _ in recipe.phases)}"),
        (translate("learning rate"), f"{c.lr:g} ({c.optimizer}, {c.schedule})"),
        (translate("machine"), machine_name()),
    ]
