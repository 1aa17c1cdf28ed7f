"""Pairs on a sentence encoder: it first learns to say its own cosine, reading both texts at once.

The encoder knows how alike two texts are, but only apart; a network that reads a pair at once would
have to find that in the labelled rows. No label is needed to teach it: the encoder itself says the
cosines of the rows' own pairs, of texts that lie near, and of any (docs/lab.md). N texts, D width.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from malmoi.checkpoint import Checkpoint
from malmoi.errors import require_that
from malmoi.evaluation.kinds import REGRESSION, custom_task, head_kind
from malmoi.evaluation.task import Example
from malmoi.finetuning.config import FINER_OUTPUT, FinetuneConfig
from malmoi.finetuning.results import FinishedRun
from malmoi.finetuning.task_data import FinetuneData
from malmoi.inference import Model
from malmoi.messages import logger

CHUNK = 256  # rows whose cosines with all others are held at a time
Trial = Callable[[FinetuneData, FinetuneConfig, Path, float], FinishedRun]


def can_say_cosines(work: FinetuneData, settings: FinetuneConfig) -> bool:
    """Whether the rows are pairs, and the model has a vector for each of their texts."""
    return (
        head_kind(work.task).head == "classify"
        and work.start.sentence is not None
        and (settings.trains_all and not settings.from_scratch)
        and all(row.pair is not None and not row.choices for row in work.train)
    )


def after_own_cosines(
    work: FinetuneData, settings: FinetuneConfig, out: Path, run_trial: Trial
) -> FinetuneData:
    """The data of a run that starts from the encoder after this lesson."""
    require_that(
        can_say_cosines(work, settings),
        "own_cosines needs pairs of texts to classify or to score, and a sentence encoder to "
        "fine-tune whole.",
    )
    work.start.network.to(work.device).eval()
    pairs = tuple(taught_pairs(work.start, work.train, settings.seed))
    logger.info(
        "First the network learns the encoder's own cosines from {pairs:,} pairs of these texts.",
        pairs=len(pairs),
    )
    lesson = replace(
        work,
        task=custom_task("regression", pair="pair"),
        labels=REGRESSION.class_names,
        train=pairs,
        dev=(),
        held=(),
        teaching=None,
    )
    plain = replace(
        settings,
        own_cosines=0.0,
        epochs=settings.own_cosines,
        steps=0,
        lr=settings.lr * (FINER_OUTPUT if head_kind(work.task).calibrated else 1),
        layers_transferred=None,
        class_weights=False,
    )
    learnt = run_trial(lesson, plain, out / "train_state" / "own-cosines", math.inf)
    return replace(work, start=replace(learnt.checkpoint, labels=()))


def taught_pairs(start: Checkpoint, rows: Sequence[Example], seed: int) -> Iterator[Example]:
    """Each row's own pair, its text with a near one, and with any; the label is their cosine."""
    texts = list(dict.fromkeys(text for row in rows for text in row.texts))
    vectors = Model(start).embed(texts, truncate=True)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    at = {text: i for i, text in enumerate(texts)}
    own = np.array([[at[row.text], at[row.pair or ""]] for row in rows])
    chance = random.Random(seed)
    for some in np.array_split(own, -(-len(own) // CHUNK)):
        cosines = vectors[some[:, 0]] @ vectors.T
        for (text, pair), row in zip(some, cosines, strict=True):
            others = np.where(np.isin(np.arange(len(texts)), (text, pair)), -np.inf, row)
            for other in (pair, others.argmax(), chance.randrange(len(texts))):
                yield Example(texts[text], pair=texts[other], label=float(row[other]))
