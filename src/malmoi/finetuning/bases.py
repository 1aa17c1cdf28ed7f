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
from malmoi.finetuning.task_data import FinetuneData, load_data
from malmoi.messages import msg
from malmoi.model import count_parameters
from malmoi.text.rows import RowSource
from malmoi.tokenizer.extend import unknown_note

MAX_ROWS = 300  # that each model reads
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
        size, speed = f"{self.weights / 1e6:.0f}M", f"{self.rows_per_second:.0f}"
        return (self.name, size, speed, f"{self.value:.4f}", str(self.gain or "–"), self.problem)


def models_at_hand(*named: str) -> list[str]:
    """The named models, those in runs/, and those that the hub's cache has."""
    from huggingface_hub.constants import HF_HUB_CACHE

    runs = [str(path.parent) for path in sorted(Path("runs").glob("*/config.json"))]
    cached = sorted(path.parents[2].name for path in Path(HF_HUB_CACHE).glob(HUB_CACHE))
    hub = [name.removeprefix("models--").replace("--", "/") for name in cached]
    return list(dict.fromkeys((*named, *runs, *hub)))


def probe_bases(
    names: Iterable[str], task: Task, data: RowSource, device: torch.device
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
            found, outcome = _probe(name, few_labels.rows_by_label(work, MAX_ROWS), start, first)
        except MalmoiError as problem:
            yield ProbedBase(name, problem=str(problem))
            continue
        first = first or outcome
        yield found


def _probe(
    name: str, work: FinetuneData, start: Checkpoint, first: Outcome | None
) -> tuple[ProbedBase, Outcome]:
    checkpoint = few_labels.frozen_model(work, FinetuneConfig())
    network = checkpoint.network.eval()
    items = encode_examples(work.task, work.held, work.view(checkpoint))
    began = time.monotonic()
    x = few_labels.item_vectors(network, items)
    speed = len(items) / (time.monotonic() - began)
    scores = few_labels.cross_validated(
        x, torch.tensor([item.label for item in items]), len(work.labels)
    )
    outcome = few_labels.label_outcome(work, scores)
    gain = None if first is None else paired_gain(held_out_score(work), first, outcome)
    value = outcome.metrics[work.primary_metric]
    covers = unknown_note(start.required_tokenizer, (t for row in work.held for t in row.texts))
    weights = count_parameters(start.network)
    return ProbedBase(name, weights, speed, value, gain, covers or ""), outcome


def advice(found: list[ProbedBase]) -> str:
    """The model that is clearly better than the first, if any."""
    better = [one for one in found if one.gain is not None and one.gain.clear]
    if not better:
        return msg("None is clearly better than the first.")
    best = max(better, key=lambda one: one.gain.value if one.gain else 0.0)
    return msg("Clearly better than the first: -m {name}", name=best.name)
