"""Fine-tunes a pre-trained model on labelled rows and writes the result to a folder."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malmoi.adapters.store import check_target, read_with_adapter
from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import by_metric, head_kind
from malmoi.evaluation.task import Task
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.candidates import RECORD
from malmoi.finetuning.config import FinetuneConfig, finetune_config
from malmoi.finetuning.defaults import apply_defaults, default_budget
from malmoi.finetuning.few_labels import choose_contrast
from malmoi.finetuning.label_prompts import choose_prompt
from malmoi.finetuning.protocol import Protocol
from malmoi.finetuning.results import best_run, log_spread, save_model, write_results
from malmoi.finetuning.run import run_once
from malmoi.finetuning.run_state import run_folder_lock
from malmoi.finetuning.search import search_settings
from malmoi.finetuning.task_data import FinetuneData, load_data
from malmoi.inference import Model
from malmoi.model import Network
from malmoi.system.paths import is_adapter
from malmoi.system.result import Result
from malmoi.text.rows import RowSource
from malmoi.training.log import check_trackers
from malmoi.training.parallel import join_process_group

logger = logging.getLogger(__name__)


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
    """Fine-tunes a BERT or a GPT on a task; transformers can open the resulting folder.

    `data` is the training rows: files, a folder with train and dev files, or a table in memory.
    `dev` is only for evaluation; without it a tenth of the rows is held out. Everything that is
    selected is selected on training rows. Options are `device`, `overwrite`, and fields of
    `FinetuneConfig`: epochs=3, lr=2e-5, freeze=True, lm=0.5, seeds=5… A GPT starts from GPT-1's
    defaults, other models from BERT's. The same call on the same folder resumes an unfinished run;
    a finished one is not repeated unless `overwrite` is set.
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
    out = Path(out)
    start = _checked(start, settings, out, reads=not kind.writes)
    work = replace(load_data(chosen, data, dev, settings, start, device), began=began)
    if overwrite:
        (out / RECORD).unlink(missing_ok=True)
    work, settings = choose_prompt(work, settings, given, out)
    settings = choose_contrast(work, settings, given)
    if settings.best and (settings.contrastive or settings.prompt):
        settings = _without_search(settings)
    settings = apply_defaults(settings, given, work, gpt=gpt)
    return run_all(work, settings, out, overwrite=overwrite)


def run_all(
    work: FinetuneData, settings: FinetuneConfig, out: Path, *, overwrite: bool = False
) -> FinetuneResult:
    """Runs all variants of the settings, and writes the selected one to the folder."""
    measure = work.primary_metric
    variants = settings.variants()
    folders = [out] if len(variants) == 1 else [out / _called(settings, v) for v in variants]
    with run_folder_lock(out):
        if settings.best:
            runs = [search_settings(work, settings, out, overwrite=overwrite)]
        else:
            runs = [
                run_once(work, v, folder, overwrite=overwrite)
                for v, folder in zip(variants, folders, strict=True)
            ]
        kept = best_run(runs, measure, select=settings.grid)
        work = work.as_trained(kept.checkpoint)
        if len(runs) > 1:
            save_model(work, settings, kept.checkpoint, out)
            log_spread(measure, runs)
        write_results(work, kept, runs, out)
    every = tuple(run.outcome.metrics for run in runs)
    if is_adapter(out):
        usable = read_with_adapter(out, device=work.device)
    else:  # with its folder, which knows the task and its columns
        usable = replace(kept.checkpoint, source=out.absolute())
    return FinetuneResult(
        kept.outcome.metrics, every, out, Model(usable), kept.steps, work.protocol
    )


def _without_search(settings: FinetuneConfig) -> FinetuneConfig:
    """Few labels are learnt as without `best`: they cannot tell one setting from another."""
    logger.info(
        "There are too few rows to compare settings: best uses the defaults for few labels."
    )
    return replace(settings, best=False, minutes=0.0, max_minutes=settings.minutes)


def _called(settings: FinetuneConfig, v: FinetuneConfig) -> str:
    return f"lr{v.lr:g}-batch{v.batch}-epochs{v.epochs:g}" if settings.grid else f"seed-{v.seed}"


def _is_gpt(network: Network) -> bool:
    """Whether GPT-1's defaults apply.

    An untied language head would have to be saved with the task's head, and transformers has no
    such model.
    """
    c = network.config
    return "lm" in network.heads and c.pool == "last" and c.tied and not c.both_ways


def _checked(start: Checkpoint, settings: FinetuneConfig, out: Path, *, reads: bool) -> Checkpoint:
    if start.network.config.both_ways and reads and not settings.lm and not settings.words:
        start = replace(start, network=start.network.masked())  # a label depends on the whole text
    _ = start.required_tokenizer
    start.network.require_one_text("Fine-tuning")
    if start.network.trunk.has_soft_tokens:
        raise UsageError(
            "This model is a soft prompt or a prefix on a base model; fine-tune the base itself."
        )
    if settings.adapter.kind != "none":
        check_target(out)
        if start.source is None or is_adapter(start.source):
            raise UsageError(
                "An adapter needs its base in a folder; save this model first and use that folder."
            )
    return start
