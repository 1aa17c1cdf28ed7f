"""The first answer of a run without a budget: a linear layer on the frozen model's vectors.

One reading of as many rows as fit into half a minute gives a model that is saved at once. Held-out
rows tell in the end whether it or the fine-tuned model is kept. Where too few updates fit for a new
layer to learn, fine-tuning starts with one that is solved for in the same way: first the layer,
then all weights (LP-FT, Kumar et al. 2022).
"""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.evaluation.evaluate import judge, judge_held_out
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.kinds import head_kind
from malmoi.evaluation.predictions import Outcome
from malmoi.finetuning.candidates import (
    Candidate,
    Fitted,
    Tried,
    compare_held_out,
    held_out_score,
)
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.linear_head import LOSSES, fit_head, item_vectors
from malmoi.finetuning.task_data import FinetuneData
from malmoi.finetuning.task_network import build_task_network
from malmoi.inference.predict import Predictor
from malmoi.messages import msg, plural
from malmoi.metrics import goodness
from malmoi.system.progress import part_of
from malmoi.training.budget import USEFUL_UPDATES
from malmoi.training.signals import Stopped, StopSignals

logger = logging.getLogger(__name__)

LAYERS = "last4"  # their means: on pairs far better than the last layer's alone (docs/lab.md)
READ_SECONDS = 25.0  # of the training rows
JUDGE_SECONDS = 8.0  # of the held-out rows, and of the evaluation rows
MIN_JUDGED_ROWS = 32
CHUNK_ROWS = 16  # read between two looks at the clock
TRAINED_PER_READ = 3.0  # time of a token in training beside one that is only read
MIN_EPOCHS = 2  # of rows that are cut to fewer tokens rather than seen less often
LENGTHS = (384, 256, 192, 128, 96, 64)
FROZEN = "frozen"  # the candidate's name


@dataclass(frozen=True)
class FirstAnswer:
    """A model whose head was solved for on frozen vectors, and what it is worth."""

    work: FinetuneData
    tried: Tried
    folder: Path

    @property
    def places(self) -> list[int]:
        """Numbers of the held-out rows that it was evaluated on."""
        return _places(len(self.work.held), self.tried.per_row)

    def beats(self, outcome: Outcome) -> bool:
        """Whether it is better than this outcome of the held-out rows; not without any."""
        if self.tried.value is None:
            return False
        value = goodness(self.work.primary_metric, self.tried.value)
        return held_out_score(self.work)(outcome, self.places) < value

    def fitting_length(self, settings: FinetuneConfig, items: Sequence[TrainingItem]) -> int:
        """Tokens to which training rows are cut, so that the time holds two epochs; 0: all."""
        if settings.length or not settings.max_minutes:
            return 0
        tokens = sum(item.length for item in items)
        second = self.tried.per_row * len(items) / tokens  # of reading a token
        most = 60 * settings.max_minutes / (MIN_EPOCHS * TRAINED_PER_READ * second)
        if tokens <= most:
            return 0
        cut = {length: sum(min(length, item.length) for item in items) for length in LENGTHS}
        return next((length for length in LENGTHS if cut[length] <= most), LENGTHS[-1])

    def hurries(self, settings: FinetuneConfig, share: float) -> bool:
        """Whether too few updates fit for a new layer to learn, on this share of the tokens."""
        update = TRAINED_PER_READ * self.tried.per_row * share * settings.batch
        return 0 < 60 * settings.max_minutes < USEFUL_UPDATES * update


def first_answer(work: FinetuneData, settings: FinetuneConfig, out: Path) -> FirstAnswer:
    """Fits, saves and evaluates it; a resumed run has it already."""
    comparison = compare_held_out(work, out / "train_state")
    known = comparison.known.get(FROZEN)
    try:
        if known is None:
            with StopSignals() as stop, work.computing(settings):
                fit = partial(_fit_frozen, work, settings, stop, out)
                known, _ = comparison.run(Candidate(FROZEN, READ_SECONDS, fit))
            stop.check()
    except Stopped:
        logger.info(msg("Stopped and saved: the best model so far is in {out}.", out=out))
        raise
    return FirstAnswer(work, known, comparison.folder(FROZEN))


def start_solved(
    work: FinetuneData, settings: FinetuneConfig, checkpoint: Checkpoint, out: Path
) -> None:
    """Solves for the new layer of a network that is fine-tuned next, unless a run goes on."""
    if any((out / "train_state").glob("step-*")):
        return
    logger.info("Few updates fit: the new layer starts as a linear layer on the frozen model, too.")
    with StopSignals() as stop, work.computing(settings):
        _solve(work, checkpoint, stop, READ_SECONDS)
    stop.check()


def _fit_frozen(
    work: FinetuneData,
    settings: FinetuneConfig,
    stop: StopSignals,
    out: Path,
    folder: Path,
    seconds: float,
) -> Fitted:
    """Solves for the head, writes the model, to the run's folder too, and evaluates it."""
    frozen = replace(settings, features=LAYERS, tune_features=True, lm=0.0, layers_transferred=None)
    checkpoint = build_task_network(work.start, work.task, work.labels, frozen)
    checkpoint.network.to(work.device)
    read, per_row = _solve(work, checkpoint, stop, seconds)
    for place in (out, folder):
        write_checkpoint(checkpoint, place)
    stop.check()
    outcome = _judge(work, checkpoint, per_row, read)
    return Fitted(checkpoint, outcome, steps=0, per_row=per_row)


def _solve(
    work: FinetuneData, checkpoint: Checkpoint, stop: StopSignals, limit: float
) -> tuple[int, float]:
    """Fits the head on the rows, in random order, that can be read in so many seconds.

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
        if stop.number or time.monotonic() - began > limit:
            break
    seconds = time.monotonic() - began
    vectors = torch.cat(parts)
    labels = torch.tensor([item.label for item in items[: len(vectors)]])
    fit_head(checkpoint.network, vectors, labels, LOSSES[head_kind(work.task).output])
    return len(vectors), seconds / len(vectors)


def _judge(work: FinetuneData, checkpoint: Checkpoint, per_row: float, read: int) -> Outcome:
    """Evaluates it on some held-out rows and evaluation rows; says the result of the latter."""
    reading = Predictor.of(checkpoint)
    some = replace(
        work,
        held=tuple(work.held[i] for i in _places(len(work.held), per_row)),
        dev=tuple(work.dev[i] for i in _places(len(work.dev), per_row)),
    )
    measure = work.primary_metric
    held = judge_held_out(work.task, some, reading) if some.held else Outcome({}, [], [])
    metrics = judge(work.task, some, reading, held.chosen if some.held else None).metrics
    score = f"{measure.replace('_', ' ')} {metrics[measure]:.4g}"
    logger.info(
        msg(
            "After {monotonic:.0f} s: {score} on {rows} with the model frozen, by a linear "
            "layer that learnt from {read:,} of {rows2}.",
            monotonic=time.monotonic() - work.began,
            score=score,
            rows=plural(len(some.dev), "evaluation row"),
            read=read,
            rows2=plural(len(work.train), "row"),
        )
    )
    return held


def _places(count: int, per_row: float) -> list[int]:
    """The numbers of some of so many rows, at random: as many as are evaluated in time."""
    most = max(MIN_JUDGED_ROWS, round(JUDGE_SECONDS / per_row))
    return random.Random(0).sample(range(count), min(most, count))
