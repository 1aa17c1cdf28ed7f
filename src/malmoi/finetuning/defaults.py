"""Settings of full fine-tuning of an encoder, by its width, the kind of task and the rows.

| rows up to | epochs | examples per step |
|---|---|---|
| 200 | 30 | 16 |
| 1,000 | 20 | 16 |
| 8,000 | 10 | 16 |
| 20,000 | 5 | 16 |
| 100,000 | 3 | 32 |
| more | 2 | 32 |

Small sets need more updates than three epochs have (Mosbach et al. 2021, Zhang et al. 2021: BERT on
RTE), and small encoders a higher rate: 4e-5 · 768 / width, half as much again for numbers, tags and
answers. Each layer learns at 0.9 of the rate of the one above it (Clark et al. 2020 §3.1), and the
result is the mean of the weights over the last third, so that no epoch has to be selected.

A classifier of a deep encoder starts with a new top layer if it has 1,000 to 5,000 rows (Zhang et
al. 2021): with MiniLM it took RTE from 58 to 64. R-Drop and twice the epochs change nothing there
(docs/lab.md).

Without a budget a run ends after some minutes, its rate decayed by then, however many epochs are
left; on a processor it begins with a frozen model (see first_answer.py).

A writer has a rate of its own and three epochs, but a hundred updates at least, in smaller batches:
after the six of 54 rows a GPT still writes what it wrote before.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import HeadKind, head_kind
from malmoi.finetuning.config import BUDGET_FIELDS, FinetuneConfig
from malmoi.finetuning.task_data import FinetuneData, classes_in
from malmoi.messages import joined, msg
from malmoi.system.machine import per_device

logger = logging.getLogger(__name__)

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
WRITING_BY_ROWS: RowTable = (
    (200, 15, 8),
    (1_000, 6, 16),
    (math.inf, 3, 32),
)
RATE = 4e-5  # at a width of 768
RATE_WIDTH = 768
MAX_RATE = 1e-3
FINER_OUTPUT = 1.5  # factor of the rate for numbers, tags and answers
LAYER_DECAY = 0.9
AVERAGED = 0.33  # share of the run
NEW_TOP_ROWS = range(1_001, 5_001)
NEW_TOP_DEPTH = 6
MINUTES = {"cpu": 4.0, "cuda": 10.0}  # of a run without a budget
# Labels are imbalanced if the rarest has less than this fraction of a uniform share
RARE = 0.2


def default_budget(
    settings: FinetuneConfig, given: Collection[str], kind: HeadKind, device: str
) -> FinetuneConfig:
    """Limits a run without a budget, which begins with a frozen model if it can on a processor."""
    alone = settings.seeds == 1 and not settings.grid
    able = kind.head == "classify" and settings.trains_all and not settings.from_scratch and alone
    if settings.frozen_first and not able:
        raise UsageError(
            "frozen_first needs one run of full fine-tuning for classification, multilabel or "
            "regression: leave it out."
        )
    if not {*BUDGET_FIELDS, "max_minutes"}.isdisjoint(given):
        return settings
    first = settings.frozen_first if "frozen_first" in given else able and device != "cuda"
    return replace(settings, max_minutes=per_device(MINUTES, device), frozen_first=first)


def default_settings(rows: int, kind: HeadKind, config: ModelConfig) -> dict[str, Any]:
    """Defaults of full fine-tuning for settings that were not given."""
    rate = RATE * RATE_WIDTH / config.width * (1 if kind.calibrated else FINER_OUTPUT)
    chosen = {
        **_by_rows(BY_ROWS, rows),
        "lr": float(f"{min(MAX_RATE, rate):.1e}"),
        "layer_decay": LAYER_DECAY,
        "average": AVERAGED,
    }
    if kind.exclusive and rows in NEW_TOP_ROWS and config.distinct >= NEW_TOP_DEPTH:
        chosen["layers_transferred"] = config.distinct - 1
    return chosen


def _by_rows(table: RowTable, rows: int) -> dict[str, Any]:
    epochs, batch = next((e, b) for limit, e, b in table if rows <= limit)
    return {"epochs": epochs, "batch": batch}


def apply_defaults(
    settings: FinetuneConfig, given: Collection[str], work: FinetuneData, *, gpt: bool
) -> FinetuneConfig:
    """Chooses settings that were not given by the rows, the kind and the model; logs the choice.

    A GPT uses GPT-1's defaults; frozen trunks, adapters and some kinds have their own.
    """
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
        logger.info(
            msg("Labels are imbalanced (the rarest is {rare}): using class weights.", rare=rare)
        )
    if chosen:
        logger.info(_sentence(settings, len(work.train)))
    return settings


def _encoder_settings(settings: FinetuneConfig, work: FinetuneData) -> dict[str, Any]:
    """Defaults of full fine-tuning that fit these settings and the model."""
    kind = head_kind(work.task)
    network = work.start.network
    chosen = default_settings(len(work.train), kind, network.config)
    if settings.from_scratch:
        chosen["layer_decay"] = 1.0
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
    parts: list[str] = [
        settings.describe_budget(),
        msg("batches of {batch}", batch=settings.batch),
        msg("rate {lr:g}", lr=settings.lr),
    ]
    parts += (
        [msg("layer decay {decay:g}", decay=settings.layer_decay)]
        if settings.layer_decay < 1
        else []
    )
    parts += (
        [msg("averaged over the last {average:.0%}", average=settings.average)]
        if settings.average
        else []
    )
    parts += [msg("a new top layer")] if settings.layers_transferred is not None else []
    parts += [f"R-Drop {settings.rdrop:g}"] if settings.rdrop else []
    return msg("{rows:,} rows: {parts}.", rows=rows, parts=joined(", ", parts))
