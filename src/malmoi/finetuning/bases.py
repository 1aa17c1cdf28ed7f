"""Which model to start from: a linear layer on each frozen model, on some of the rows.

A model whose frozen vectors tell the labels apart mostly wins after fine-tuning, too; reading some
hundred rows takes seconds.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from malmoi.adapters.store import read_with_adapter
from malmoi.checkpoint import Checkpoint
from malmoi.errors import MalmoiError, require_that
from malmoi.evaluation.features import Outcome
from malmoi.evaluation.kinds import CLASSIFICATION, encode_examples, head_kind
from malmoi.evaluation.task import Task
from malmoi.finetuning import few_labels
from malmoi.finetuning.candidates import Gain, held_out_score, paired_gain
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.finetune import FinetuneResult
from malmoi.finetuning.task_data import FinetuneData, load_data
from malmoi.messages import logger, msg, quiet_logs
from malmoi.model import count_parameters
from malmoi.pair import BERT
from malmoi.text.rows import RowSource
from malmoi.tokenizer.extend import unknown_note

MAX_ROWS = 300  # that each model reads
QUICK_ROWS = 100  # that each reads where only a sentence is asked for
SURE = 2.0  # errors of a difference that nobody asked for
HUB_CACHE = "models--*/snapshots/*/config.json"


@dataclass(frozen=True)
class ProbedBase:
    """What a linear layer on a frozen model is worth; `problem` says why there is none."""

    name: str
    weights: int = 0
    rows_per_second: float = 0.0
    value: float = 0.0
    gain: Gain | None = None  # over the first model
    problem: str = ""

    @property
    def table_row(self) -> tuple[str, ...]:
        if not self.weights:
            return (self.name, "–", "–", "–", "–", self.problem)
        return (
            self.name,
            f"{self.weights / 1e6:.0f}M",
            f"{self.rows_per_second:.0f}",
            f"{self.value:.4f}",
            str(self.gain or "–"),
            self.problem,
        )


def models_at_hand(*named: str) -> list[str]:
    """The named models, those in runs/ that know no labels yet, and those of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = sorted(path.parents[2].name for path in Path(HF_HUB_CACHE).glob(HUB_CACHE))
    hub = [name.removeprefix("models--").replace("--", "/") for name in cached]
    runs = sorted(path.parent for path in Path("runs").glob("*/config.json"))
    free = [str(path) for path in runs if not (path / "finetune.json").exists()]
    return list(dict.fromkeys((*named, *free, *hub)))


def probe_bases(
    names: Iterable[str], task: Task, data: RowSource, device: torch.device, most: int = MAX_ROWS
) -> Iterator[ProbedBase]:
    """Each model's score on the same rows, by cross-validation; a model that cannot is named."""
    require_that(
        head_kind(task) is CLASSIFICATION,
        "--dry-run compares models by how well they tell classes apart; {kind} has none.",
        kind=task.kind,
    )
    first: Outcome | None = None
    for name in names:
        try:
            start = read_with_adapter(name)
            if start.network.config.both_ways:  # a label depends on the whole text
                start = replace(start, network=start.network.masked())
            work = load_data(task, data, None, FinetuneConfig(), start, device)
            found, outcome = _probe(name, few_labels.rows_by_label(work, most), start, first)
        except MalmoiError as problem:
            yield ProbedBase(name, problem=str(problem))
            continue
        first = first or outcome
        yield found


def _probe(
    name: str, work: FinetuneData, start: Checkpoint, first: Outcome | None
) -> tuple[ProbedBase, Outcome]:
    checkpoint = few_labels.frozen_model(work, FinetuneConfig())
    items = encode_examples(work.task, work.held, work.view(checkpoint))
    began = time.monotonic()
    x = few_labels.item_vectors(checkpoint.network.eval(), items)
    speed = len(items) / (time.monotonic() - began)
    labels = torch.tensor([item.label for item in items])
    outcome = few_labels.label_outcome(
        work, few_labels.cross_validated(x, labels, len(work.labels))
    )
    found = ProbedBase(
        name,
        count_parameters(start.network),
        speed,
        outcome.metrics[work.primary_metric],
        None if first is None else paired_gain(held_out_score(work), first, outcome),
        unknown_note(start.required_tokenizer, (t for row in work.held for t in row.texts)) or "",
    )
    return found, outcome


def advice(found: list[ProbedBase]) -> str:
    """The model that is clearly better than the first, if any."""
    name = _best_name(found, 1.0)
    better = msg("Clearly better than the first: -m {name}", name=name)
    return better if name else msg("None is clearly better than the first.")


def _best_name(found: list[ProbedBase], errors: float) -> str:
    """The model that is better than the first by the most, and by so many errors; or none."""
    gains = {one.name: one.gain for one in found if one.gain is not None}
    better = [(g.value, name) for name, g in gains.items() if g.value > errors * g.error]
    return max(better)[1] if better else ""


def note_better_base(base: str, task: Task, data: RowSource, done: FinetuneResult) -> None:
    """Says if a model of the box or of runs/ is much better than a run's base on its rows."""
    known = (base, BERT)
    names = [name for name in models_at_hand(*known) if name in known or Path(name).is_dir()]
    few = done.protocol.trained_on < QUICK_ROWS or done.protocol.unlabelled
    if few or head_kind(task) is not CLASSIFICATION or len(names) == 1:
        return
    with quiet_logs():
        found = probe_bases(names, task, data, done.model.checkpoint.network.device, QUICK_ROWS)
        name = _best_name(list(found), SURE)
    if name:
        logger.warning(
            "On {count} of the rows frozen {name} tells the labels apart clearly better than "
            "{base}: -m {name} (--dry-run compares them).",
            count=QUICK_ROWS,
            name=name,
            base=base,
        )
