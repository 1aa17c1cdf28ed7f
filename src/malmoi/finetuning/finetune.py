"""Fine-tunes a pre-trained model on labelled rows and writes the result to a folder."""

import math
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.adapters.store import check_target, read_with_adapter
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.config import ModelConfig
from malmoi.errors import require_that
from malmoi.evaluation.kinds import HeadKind, by_metric, head_kind
from malmoi.evaluation.task import Task
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning import unlabelled
from malmoi.finetuning.candidates import RECORD
from malmoi.finetuning.config import BUDGET_FIELDS, FINER_OUTPUT, FinetuneConfig, finetune_config
from malmoi.finetuning.few_labels import choose_contrast, choose_prompt
from malmoi.finetuning.from_names import rows_by_names, say_first_guess
from malmoi.finetuning.own_cosines import can_say_cosines
from malmoi.finetuning.results import run_folder_lock, save_model, write_results
from malmoi.finetuning.run import run_once
from malmoi.finetuning.search import FIRST_TIME, search_settings
from malmoi.finetuning.task_data import MAX_FEW_ROWS, FinetuneData, Protocol, classes_in, load_data
from malmoi.inference import Model
from malmoi.messages import joined, logger, msg
from malmoi.metrics import goodness, mean_with_error
from malmoi.model import Network
from malmoi.system.machine import per_device
from malmoi.system.paths import is_adapter
from malmoi.system.result import Result
from malmoi.system.storage import working_copy
from malmoi.text.rows import RowSource
from malmoi.training.log import check_trackers
from malmoi.training.parallel import join_process_group


@dataclass(frozen=True, repr=False)
class FinetuneResult(Result):
    """A finished fine-tuning: metrics on the evaluation rows and of each run, and the model."""

    metrics: dict[str, float]
    runs: tuple[dict[str, float], ...]
    out: Path
    model: Model
    steps: int  # updates of the run that was kept
    protocol: Protocol  # numbers of training, selection and evaluation rows


def run_finetuning(
    model: str | Path | Model,
    task: str | Task,
    data: RowSource,
    out: str | Path,
    dev: RowSource | None = None,
    **options: Any,
) -> FinetuneResult:
    """Fine-tunes a BERT or a GPT on a task (see `malmoi.finetune`).

    Options are `device`, `overwrite`, and fields of `FinetuneConfig`.
    """
    began = time.monotonic()
    overwrite = bool(options.pop("overwrite", False))
    start = model.checkpoint if isinstance(model, Model) else read_with_adapter(model)
    chosen = named_task(task) if isinstance(task, str) else task
    kind = head_kind(chosen)
    gpt = _is_gpt(start.network)
    device = join_process_group(options.pop("device", None)).device
    given = {name for name, value in options.items() if value is not None}
    settings = finetune_config(options, gpt=gpt, defaults=kind.defaults)
    settings = default_budget(settings, given, kind, device.type)
    check_trackers(settings.track)
    chosen = by_metric(chosen, settings.metric)
    with working_copy(out) as folder:
        start = _checked(start, settings, folder, reads=not kind.writes)
        work = replace(load_data(chosen, data, dev, settings, start, device), began=began)
        settings = frozen_if_few(settings, given, work)
        names = tuple(Path(path).name for path in settings.unlabelled)
        settings = replace(settings, unlabelled=names)
        learn = partial(_learn, given=given, overwrite=overwrite, gpt=gpt)
        work, settings = rows_by_names(work, settings)
        if work.unlabelled and not settings.best and not unlabelled.has_clouds(work, settings):
            lesson = unlabelled.teachers_settings(work, settings)
            teacher = learn(work.labelled, lesson, folder / unlabelled.FOLDER)
            # usable, should the student be stopped
            write_checkpoint(teacher.model.checkpoint, folder)
            work = unlabelled.taught(work, settings, unlabelled.teachers_folders(lesson, folder))
            settings = replace(settings, frozen_first=False, minutes=lesson.minutes)
        done = learn(work, settings, folder)
    say_first_guess(settings, kind)
    return done


def _learn(
    work: FinetuneData,
    settings: FinetuneConfig,
    out: Path,
    *,
    given: set[str],
    overwrite: bool,
    gpt: bool,
) -> FinetuneResult:
    """Chooses the way and the settings that were not given, and runs them."""
    if overwrite:
        (out / RECORD).unlink(missing_ok=True)
    if unlabelled.has_clouds(work, settings):
        settings = replace(_unsearched(settings), frozen_first=False)
        return run_all(work, settings, out, overwrite=overwrite)
    work, settings = choose_prompt(work, settings, given, out)
    settings = choose_contrast(work, settings, given)
    if settings.contrastive or settings.prompt:
        settings = _unsearched(settings)
    settings = apply_defaults(settings, given, work, gpt=gpt)
    return run_all(work, settings, out, overwrite=overwrite)


def _unsearched(settings: FinetuneConfig) -> FinetuneConfig:
    """The settings for few labels, with which nothing is searched."""
    if not settings.best:
        return settings
    logger.info("There are too few rows to compare settings: best uses the defaults for them.")
    return replace(settings, best=False, minutes=0.0)


def run_all(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool = False
) -> FinetuneResult:
    """Runs all variants of the settings, and writes the selected one to the folder."""
    measure = work.primary_metric
    variants = settings.variants()
    names = [
        f"lr{v.lr:g}-batch{v.batch}-epochs{v.epochs:g}" if settings.grid else f"seed-{v.seed}"
        for v in variants
    ]
    folders = [out] if len(variants) == 1 else [out / name for name in names]
    with run_folder_lock(out):
        if settings.best:
            runs = [search_settings(work, settings, out, overwrite=overwrite)]
        else:
            runs = [
                run_once(work, v, folder, overwrite=overwrite)
                for v, folder in zip(variants, folders, strict=True)
            ]
        kept = runs[0]
        if settings.grid and kept.held:
            kept = max(runs, key=lambda run: goodness(measure, run.held[measure]))
        work = work.as_trained(kept.checkpoint)
        if len(runs) > 1:
            save_model(work, settings, kept.checkpoint, out)
            found = mean_with_error([run.outcome.metrics[measure] for run in runs])
            value = f"{measure} {found.mean:.4f} ± {found.deviation:.4f}"
            logger.info("{runs} runs: {value} (standard deviation).", runs=len(runs), value=value)
        write_results(work, kept, runs, out)
    if is_adapter(out):
        usable = read_with_adapter(out, device=work.device)
    else:  # with its folder, which knows the task and its columns
        usable = replace(kept.checkpoint, source=out.absolute())
    metrics = [run.outcome.metrics for run in (kept, *runs)]
    return FinetuneResult(
        metrics[0], tuple(metrics[1:]), out, Model(usable), kept.steps, work.protocol
    )


def _is_gpt(network: Network) -> bool:
    """Whether GPT-1's defaults apply: transformers has no untied language head beside a task's."""
    c = network.config
    return "lm" in network.heads and c.pool == "last" and c.tied and not c.both_ways


def _checked(start: Checkpoint, settings: FinetuneConfig, out: Path, *, reads: bool) -> Checkpoint:
    if start.network.config.both_ways and reads and not settings.lm and not settings.words:
        start = replace(start, network=start.network.masked())  # a label depends on the whole text
    _ = start.required_tokenizer
    start.network.require_one_text("Fine-tuning")
    require_that(
        not start.network.trunk.has_soft_tokens,
        "This model is a soft prompt or a prefix on a base model; fine-tune the base itself.",
    )
    if settings.adapter.kind != "none":
        check_target(out)
        require_that(
            start.source is not None and not is_adapter(start.source),
            "An adapter needs its base in a folder; save this model first and use that folder.",
        )
    return start


# ------------------------------------------------------------------ settings that were not given

# Small sets need more updates than three epochs have (Mosbach et al. 2021, Zhang et al. 2021: BERT
# on RTE), and small encoders a higher rate: 4e-5 · 768 / width, half as much again for numbers,
# tags and answers. Each layer learns at 0.9 of the rate of the one above it (Clark et al. 2020
# §3.1), and the result is the mean of the weights over the last third, so that no epoch has to be
# selected.
# A classifier of a deep encoder starts with a new top layer if it has 1,000 to 5,000 rows (Zhang et
# al. 2021): with MiniLM it took RTE from 58 to 64. Twice the epochs change nothing there; from
# 4,000 rows on half of them are better (docs/lab.md). Without a budget a run ends after some
# minutes, its rate decayed by then, however many epochs are left. A writer has three epochs, but a
# hundred updates at least, in smaller batches: after the six of 54 rows a GPT still writes what it
# wrote before.

# rows up to → epochs, examples per step
RowTable = tuple[tuple[float, float, int], ...]
BY_ROWS: RowTable = (
    (200, 30, 16),
    (1_000, 20, 16),
    (8_000, 10, 16),
    (20_000, 5, 16),
    (100_000, 3, 32),
    (math.inf, 2, 32),
)
WRITING_BY_ROWS: RowTable = ((200, 15, 8), (1_000, 6, 16), (math.inf, 3, 32))
RATE = 4e-5  # at a width of 768
RATE_WIDTH = 768
MAX_RATE = 1e-3
LAYER_DECAY = 0.9
AVERAGED = 0.33  # share of the run
NEW_TOP_ROWS = range(1_001, 5_001)
NEW_TOP_DEPTH = 6
HALVED_ROWS = range(4_001, 8_001)
# rows up to → epochs of own cosines on a GPU: a processor has no time for them (docs/lab.md)
COSINES_BY_ROWS = ((5_000, 6.0), (20_000, 2.0), (math.inf, 0.0))
MINUTES = {"cpu": 4.0, "cuda": 10.0}  # of a run without a budget
ROWS_PER_MINUTE = 150  # of few rows: a hundred should take less than a minute in all
MIN_MINUTES = 0.5
# Labels are imbalanced if the rarest has less than this fraction of a uniform share
RARE = 0.2


def default_budget(
    settings: FinetuneConfig, given: Collection[str], kind: HeadKind, device: str
) -> FinetuneConfig:
    """Limits a run without a budget, which begins with a frozen model if it can on a processor."""
    able = _can_start_frozen(settings, kind)
    require_that(
        not settings.frozen_first or able,
        "frozen_first needs one run of full fine-tuning for labels or numbers: leave it out.",
    )
    if settings.best:  # minutes are the budget of all runs, not of one
        limit = min(settings.max_minutes or math.inf, FIRST_TIME * settings.minutes)
        settings = replace(settings, max_minutes=limit)
        given = {*given} - {"minutes"}
    if not {*BUDGET_FIELDS, "max_minutes"}.isdisjoint(given):
        return settings
    first = settings.frozen_first if "frozen_first" in given else able and device != "cuda"
    limit = settings.max_minutes or per_device(MINUTES, device)
    return replace(settings, max_minutes=limit, frozen_first=first)


def frozen_if_few(
    settings: FinetuneConfig, given: Collection[str], work: FinetuneData
) -> FinetuneConfig:
    """A GPU begins with the frozen model, too, where rows are too few to hold some out."""
    chosen = {*BUDGET_FIELDS, "max_minutes", "frozen_first"}.isdisjoint(given)
    able = chosen and _can_start_frozen(settings, head_kind(work.task))
    return replace(
        settings, frozen_first=settings.frozen_first or (able and len(work.train) <= MAX_FEW_ROWS)
    )


def _can_start_frozen(settings: FinetuneConfig, kind: HeadKind) -> bool:
    return (
        kind.head == "classify"
        and settings.trains_all
        and not (settings.from_scratch or settings.grid or settings.seeds > 1)
    )


def default_settings(rows: int, kind: HeadKind, config: ModelConfig) -> dict[str, Any]:
    """Defaults of full fine-tuning for settings that were not given."""
    rate = RATE * RATE_WIDTH / config.width * (1 if kind.calibrated else FINER_OUTPUT)
    chosen = {
        **_by_rows(BY_ROWS, rows),
        "lr": float(f"{min(MAX_RATE, rate):.1e}"),
        "layer_decay": LAYER_DECAY,
        "average": AVERAGED,
    }
    if kind.calibrated and rows in HALVED_ROWS:
        chosen["epochs"] /= 2
    if kind.exclusive and rows in NEW_TOP_ROWS and config.distinct >= NEW_TOP_DEPTH:
        chosen["layers_transferred"] = config.distinct - 1
    return chosen


def _by_rows(table: RowTable, rows: int) -> dict[str, Any]:
    epochs, batch = next((e, b) for limit, e, b in table if rows <= limit)
    return {"epochs": epochs, "batch": batch}


def apply_defaults(
    settings: FinetuneConfig, given: Collection[str], work: FinetuneData, *, gpt: bool
) -> FinetuneConfig:
    """Chooses settings that were not given by the rows, the kind and the model; logs the choice."""
    kind = head_kind(work.task)
    chosen: dict[str, Any] = {}
    if kind.writes:
        chosen = _by_rows(WRITING_BY_ROWS, len(work.train))
    elif settings.trains_all and not gpt and not kind.defaults:
        chosen = _encoder_settings(settings, work)
    chosen = {name: value for name, value in chosen.items() if name not in given}
    settings = replace(settings, **chosen)
    if settings.class_weights is None and (rare := rare_label(work)):
        settings = replace(settings, class_weights=True)
        logger.info("Labels are imbalanced (the rarest is {rare}): using class weights.", rare=rare)
    if chosen:
        logger.info(_sentence(settings, len(work.train)))
    return settings


def _encoder_settings(settings: FinetuneConfig, work: FinetuneData) -> dict[str, Any]:
    """Defaults of full fine-tuning that fit these settings and the model."""
    kind = head_kind(work.task)
    network = work.start.network
    rows = len(work.train)
    chosen = default_settings(rows, kind, network.config)
    if settings.frozen_first:
        fitting = max(MIN_MINUTES, round(rows / ROWS_PER_MINUTE, 1))
        chosen["max_minutes"] = min(settings.max_minutes, fitting)
    if settings.from_scratch:
        chosen["layer_decay"] = 1.0
    clocked = work.device.type != "cuda" or (settings.minutes and not settings.best)
    if can_say_cosines(work, settings) and not clocked:
        chosen["own_cosines"] = next(e for most, e in COSINES_BY_ROWS if rows <= most)
    if settings.from_scratch or kind.head in network.heads:  # no top layer to replace, or …
        chosen.pop("layers_transferred", None)  # … one that was fine-tuned for such a task
    return {n: chosen[n] for n in ("layer_decay", "average")} if settings.grid else chosen


def rare_label(work: FinetuneData) -> str:
    """The rarest label and its share if labels are imbalanced, else an empty string."""
    if not head_kind(work.task).exclusive:
        return ""
    counts = Counter(name for e in work.train for name in classes_in(work.task, e))
    label, least = min(counts.items(), key=lambda pair: pair[1])
    share = least / counts.total()
    return f"{label!r}, {share:.1%}" if share * len(counts) < RARE else ""


def _sentence(settings: FinetuneConfig, rows: int) -> str:
    s = settings
    parts = [
        s.describe_budget(),
        msg("batches of {batch}", batch=s.batch),
        msg("rate {lr:g}", lr=s.lr),
        s.layer_decay < 1 and msg("layer decay {decay:g}", decay=s.layer_decay),
        s.average and msg("averaged over the last {average:.0%}", average=s.average),
        s.layers_transferred is not None and msg("a new top layer"),
    ]
    return msg(
        "{rows:,} rows: {parts}.", rows=rows, parts=joined(", ", [part for part in parts if part])
    )
