"""The first answer of a run without a budget: a linear layer on the frozen model's vectors.

One reading of as many rows as fit into half a minute gives a model that is saved at once. Held-out
rows tell in the end whether it or the fine-tuned model is kept. Where too few updates fit for a new
layer to learn, fine-tuning starts with one that is solved for in the same way: first the layer,
then all weights (LP-FT, Kumar et al. 2022).
"""

import logging
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.evaluation.evaluate import judge, judge_held_out
from malmoi.evaluation.features import FeatureView
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.candidates import held_out_score
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.linear_head import LOSSES, fit_head, item_vectors
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.task_network import build_task_network
from malmoi.inference.predict import Predictor
from malmoi.messages import msg, plural
from malmoi.metrics import goodness
from malmoi.system.files import write_json
from malmoi.system.progress import part_of
from malmoi.system.untrusted import JsonObject, read_object
from malmoi.training.budget import USEFUL_UPDATES
from malmoi.training.signals import Stopped, StopSignals

logger = logging.getLogger(__name__)

LAYERS = "last4"  # their means: on pairs far better than the last layer's alone (docs/lab.md)
READ_SECONDS = 25.0  # of the training rows
JUDGE_SECONDS = 8.0  # of the held-out rows, and of the evaluation rows
MIN_JUDGED_ROWS = 32
CHUNK_ROWS = 16  # read between two looks at the clock
TRAINED_PER_READ = 3.0  # time of a token in training beside one that is only read
RECORD = "first_answer.json"


@dataclass(frozen=True)
class FirstAnswer:
    """A model whose head was solved for on frozen vectors, and what it is worth."""

    folder: Path
    value: float  # goodness of the selecting metric on the held-out rows of these numbers
    places: tuple[int, ...]
    hurried: bool  # whether too few updates fit for a new layer to learn

    def beats(self, work: FinetuneData, outcome: Outcome) -> bool:
        """Whether it is better than this outcome of the held-out rows; not without any."""
        return bool(self.places) and held_out_score(work)(outcome, self.places) < self.value

    def model(self, work: FinetuneData) -> Checkpoint:
        checkpoint = read_checkpoint(self.folder)
        checkpoint.network.to(work.device)
        return checkpoint


def first_answer(work: FinetuneData, settings: FinetuneConfig, out: Path) -> FirstAnswer:
    """Fits, saves and evaluates it; a resumed run has it already."""
    folder = out / "train_state" / "first"
    if not (folder / RECORD).is_file():
        with StopSignals() as stop, work.computing(settings):
            _make(work, settings, folder, stop)
        if stop.number:
            logger.info(msg("Stopped and saved: the best model so far is in {out}.", out=out))
            raise Stopped(stop.number)
    facts = JsonObject(read_object(folder / RECORD), str(folder / RECORD))
    places = tuple(facts.list_of("places", int))
    return FirstAnswer(folder, facts.number("value"), places, facts.flag("hurried"))


def start_solved(
    work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint, out: Path
) -> None:
    """Solves for the new layer of a network that is fine-tuned next, unless a run goes on."""
    if any((out / "train_state").glob("step-*")):
        return
    logger.info("Few updates fit: the new layer starts as a linear layer on the frozen model, too.")
    with StopSignals() as stop, work.computing(settings):
        _fit(work, checkpoint, stop)
    if stop.number:
        raise Stopped(stop.number)


def _make(work: FinetuneData, settings: FinetuneConfig, folder: Path, stop: StopSignals) -> None:
    """Writes the model, to the run's folder too, and then what is known of it."""
    frozen = replace(settings, features=LAYERS, tune_features=True, lm=0.0, layers_transferred=None)
    checkpoint = build_task_network(work.start, work.task, work.labels, frozen)
    checkpoint.network.to(work.device)
    read, seconds = _fit(work, checkpoint, stop)
    for place in (folder.parents[1], folder):
        write_checkpoint(checkpoint, place)
    if stop.number:
        return
    most = max(MIN_JUDGED_ROWS, round(JUDGE_SECONDS / seconds))
    fits = 60 * settings.max_minutes / (TRAINED_PER_READ * seconds * settings.batch)
    facts = _judge(work, checkpoint, most, read) | {"hurried": 0 < fits < USEFUL_UPDATES}
    write_json(folder / RECORD, facts)


def _fit(work: FinetuneData, checkpoint: Checkpoint, stop: StopSignals) -> tuple[int, float]:
    """Fits the head on the rows, in random order, that can be read in time.

    Returns how many they were, and the seconds that one took.
    """
    items = work.items(FeatureView.of(work.predictor(checkpoint), work.labels))
    items = random.Random(0).sample(items, len(items))
    parts: list[Tensor] = []
    checkpoint.network.eval()
    began = time.monotonic()
    for start in range(0, len(items), CHUNK_ROWS):
        with part_of("predict", start, len(items)):
            parts.append(item_vectors(checkpoint.network, items[start : start + CHUNK_ROWS]))
        if stop.number or time.monotonic() - began > READ_SECONDS:
            break
    seconds = time.monotonic() - began
    vectors = torch.cat(parts)
    labels = torch.tensor([item.label for item in items[: len(vectors)]])
    fit_head(checkpoint.network, vectors, labels, LOSSES[head_kind(work.task).output])
    return len(vectors), seconds / len(vectors)


def _judge(work: FinetuneData, checkpoint: Checkpoint, most: int, read: int) -> dict[str, Any]:
    """Evaluates it on at most so many held-out rows and evaluation rows; says the result."""
    reading = Predictor.of(checkpoint)
    chance = random.Random(0)
    places = chance.sample(range(len(work.held)), min(most, len(work.held)))
    dev = tuple(chance.sample(work.dev, min(most, len(work.dev))))
    some = replace(work, held=tuple(work.held[i] for i in places), dev=dev)
    measure = work.primary_metric
    held = judge_held_out(work.task, some, reading) if places else None
    found = judge(work.task, some, reading, None if held is None else held.chosen)
    score = f"{measure.replace('_', ' ')} {found.metrics[measure]:.4g}"
    logger.info(
        msg(
            "After {monotonic:.0f} s: {score} on {rows} with the model frozen, by a linear "
            "layer that learnt from {read:,} of {rows2}.",
            monotonic=time.monotonic() - work.began,
            score=score,
            rows=plural(len(dev), "evaluation row"),
            read=read,
            rows2=plural(len(work.train), "row"),
        )
    )
    value = 0.0 if held is None else goodness(measure, held.metrics[measure])
    return {"value": value, "places": places}
