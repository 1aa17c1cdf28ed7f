"""Data that all runs of a fine-tuning share: checked examples and the initial model."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from malmoi.checkpoint import Checkpoint
from malmoi.errors import MalmoiError
from malmoi.evaluation.evaluate import Split
from malmoi.evaluation.examples import (
    files_in,
    label_names,
    load_examples,
    require_labels,
    unseen_labels,
)
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.kinds import encode_examples, head_kind
from malmoi.evaluation.task import Example, Task, metric_names
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.protocol import (
    FROZEN_OR_TUNED,
    Protocol,
    Rows,
    file_names,
    frozen_rows,
    hold_out,
    judged_rows,
    judged_twins,
    selected_settings,
    selection_rows,
)
from malmoi.finetuning.run_state import distillation_record, run_fingerprint
from malmoi.finetuning.task_network import MAX_ROW_TOKENS
from malmoi.inference.predict import EncodeFunctions, Predictor
from malmoi.inference.verbalizer import Verbalizer
from malmoi.messages import joined, msg
from malmoi.model import Network, count_parameters
from malmoi.text.rows import RowSource
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.extend import unknown_note
from malmoi.training.device import choose_execution
from malmoi.training.losses.distil import Distillation

logger = logging.getLogger(__name__)

MAX_TRAINING_ROWS = 20_000
MAX_JUDGED_ROWS = 2_000
FEWEST_ROWS = 10  # with fewer rows, all labels may differ: it may just be a trial


@dataclass(frozen=True, kw_only=True)
class FinetuneData(Split):
    """Data shared by all runs of a fine-tuning."""

    task: Task
    labels: tuple[str, ...]
    start: Checkpoint
    device: torch.device
    model_name: str  # hash of the model and the examples
    protocol: Protocol
    teaching: Distillation | None = None  # the teacher's part of the loss, if any
    words: Verbalizer | None = None  # label words to use instead of training
    # when the run began, by time.monotonic(): reading the rows counts against a time budget
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def primary_metric(self) -> str:
        """The metric that selects the best checkpoint and the best run."""
        return metric_names(self.task)[0]

    def record(self, settings: FinetuneConfig) -> dict[str, Any]:
        """What identifies a run in its folder."""
        values = settings.to_dict()
        values.pop("track")  # a resumed run may be tracked elsewhere
        taught = {} if self.teaching is None else distillation_record(self.teaching)
        return {"task": self.task.name, **values, "of": self.model_name, **taught}

    def computing(self, settings: FinetuneConfig) -> AbstractContextManager[None]:
        """Evaluates in the precision that these settings train in."""
        return choose_execution(self.device, settings.training(1)).computing()

    @cached_property
    def word_baseline(self) -> float | None:
        """The accuracy of naive Bayes on the tokens, where each row has one label."""
        words = self.start.tokenizer
        if not head_kind(self.task).exclusive or words is None:
            return None
        return word_baseline(self.train, self.dev, self.labels, words)

    @cached_property
    def encode(self) -> EncodeFunctions:
        """Cached encoding, since the same rows are evaluated after each epoch of each run."""
        return EncodeFunctions().cached()

    def predictor(self, checkpoint: Checkpoint) -> Predictor:
        return replace(Predictor.of(checkpoint), encode=self.encode)

    @cached_property
    def items(self) -> Callable[[FeatureView], list[TrainingItem]]:
        """Encodes the training examples, cached for runs with the same view."""
        return lru_cache(maxsize=1)(lambda view: encode_examples(self.task, self.train, view))

    def as_trained(self, checkpoint: Checkpoint) -> "FinetuneData":
        """These data without the rows that a model skips, since their answers do not fit."""
        if not head_kind(self.task).windows:
            return self
        items = self.items(FeatureView.of(self.predictor(checkpoint), self.labels))
        rows = sum(not item.continues for item in items)
        return replace(self, protocol=replace(self.protocol, trained_on=rows))


def load_data(
    task: Task,
    data: RowSource,
    dev: RowSource | None,
    settings: FinetuneConfig,
    start: Checkpoint,
    device: torch.device,
) -> FinetuneData:
    """Reads the examples, and holds out rows for selection and, without a file, evaluation."""
    if dev is None and isinstance(data, str | Path):
        data, dev = files_in(task, data)
    sources = [data] if dev is None else [data, dev]
    given = [load_examples(task, files, skip_bad=settings.skip_bad) for files in sources]
    for note in (note for some in given for note in some.notes):
        logger.warning(note)
    every = [row for some in given for row in some.rows]
    require_labels(every)
    _check_classes(task, every)
    task = _fit(task, every, start)
    rows = given[0].rows
    if dev is None:
        rows, judged = hold_out(task, rows, judged_rows(len(rows), settings), settings.seed)
    else:
        judged = given[1].rows
    if twins := judged_twins(rows, judged):
        logger.warning(
            msg(
                "{twins:,} of the {judged:,} evaluation rows are also training rows, or "
                "differ from one by a typo: the result will look better than it is.",
                twins=twins,
                judged=len(judged),
            )
        )
    rows, held, selects = _hold_out_to_select(task, rows, settings)
    _check_training_labels(task, rows, judged)
    return FinetuneData(
        task=task,
        train=rows,
        dev=judged,
        held=held,
        label_thresholds=settings.label_thresholds,
        labels=label_names(task, every),
        start=start,
        device=device,
        model_name=run_fingerprint(start.network, [*rows, *held, *judged]),
        protocol=Protocol(
            trained_on=len(rows),
            selected_on=len(held),
            judged_on=len(judged),
            judged_rows="held out of the training rows" if dev is None else "a file of their own",
            selects=selects,
            judged_twins=twins,
            trained_files=file_names(rows),
        ),
    )


def _hold_out_to_select(
    task: Task, rows: Rows, settings: FinetuneConfig
) -> tuple[Rows, Rows, tuple[str, ...]]:
    """The rows to train on, those to select on, if any, and the names of what they select."""
    selects = selected_settings(task, rows, settings)
    count = selection_rows(len(rows), head_kind(task), settings, needed=bool(selects))
    if frozen := frozen_rows(len(rows), settings):
        count = max(count, frozen)
        selects = (*selects, FROZEN_OR_TUNED)
    if count:
        rest, held = hold_out(task, rows, count, settings.seed)
        return rest, held, (*selects, *(("temperature",) if head_kind(task).calibrated else ()))
    if selects:
        names = joined(", ", map(msg, selects))
        logger.warning(
            msg(
                "Too few rows ({rows:,}) to hold some out for selection ({names}): nothing is "
                "selected.",
                rows=len(rows),
                names=names,
            )
        )
    return rows, (), ()


def _check_training_labels(task: Task, rows: Rows, judged: Rows) -> None:
    learnt = {name for e in rows for name in classes_in(task, e)}
    others = {name for e in judged for name in classes_in(task, e)} - learnt
    if head_kind(task).exclusive and len(learnt) == 1 and others:
        raise MalmoiError(
            "All training rows have the label {next!r}, and only evaluation rows have others: "
            "give more rows.",
            next=next(iter(learnt)),
        )
    for note in unseen_labels(task, judged, learnt):
        logger.warning(note)


def _fit(task: Task, rows: Sequence[Example], start: Checkpoint) -> Task:
    """Adapts the task to its rows; notes a vocabulary that does not cover them."""
    if start.tokenizer is None:
        return task
    if unknown := unknown_note(start.tokenizer, (text for row in rows for text in row.texts)):
        logger.warning(unknown)
    return head_kind(task).fit(task, rows, start.tokenizer)


def classes_in(task: Task, example: Example) -> Iterable[Any]:
    classes = head_kind(task).classes
    return () if classes is None else classes(example.label)


def _check_classes(task: Task, rows: Sequence[Example]) -> None:
    """Checks that labels repeat: a column of ids or free text is not a column of classes."""
    if not head_kind(task).exclusive or task.labels or len(rows) < FEWEST_ROWS:
        return
    classes = dict.fromkeys(row.label for row in rows)
    if len(classes) == len(rows):
        first, second = list(classes)[:2]
        raise MalmoiError(
            "Each of the {rows:,} rows has a different label ({first!r:.40}, "
            "{second!r:.40}…), so there is nothing to learn: give the column of the classes "
            "with --label COLUMN, or use regression for numbers.",
            rows=len(rows),
            first=first,
            second=second,
        )
    if 2 * len(classes) > len(rows):
        logger.warning(
            msg(
                "{classes:,} labels for {rows:,} rows: most appear only once.",
                classes=len(classes),
                rows=len(rows),
            )
        )


def describe_run(
    work: FinetuneData, settings: FinetuneConfig, network: Network, items: Sequence[TrainingItem]
) -> None:
    """Logs the data, the baselines and any warnings before training."""
    logger.info(work.protocol.describe())
    learning = sum(p.numel() for p in network.parameters() if p.requires_grad)
    whole = count_parameters(network)
    logger.info(
        msg(
            "{task}: {learning:,} weights are trained ({learning2:.2%}), {budget}.",
            task=work.task.name,
            learning=learning,
            learning2=learning / whole,
            budget=settings.describe_budget(),
        )
    )
    if head_kind(work.task).text_labels:
        _describe_labels(work)
    if work.word_baseline is not None:
        logger.info(
            msg(
                "Bag-of-words baseline: accuracy {baseline:.1%} (naive Bayes, no network).",
                baseline=work.word_baseline,
            )
        )
    limit = min(settings.length or MAX_ROW_TOKENS, network.config.context)
    cut = sum(item.length >= limit for item in items)
    if cut > 1 and not head_kind(work.task).windows:
        logger.warning(
            msg(
                "Up to {cut:,} texts are longer than {limit} tokens and are truncated.",
                cut=cut,
                limit=limit,
            )
        )


def _describe_labels(work: FinetuneData) -> None:
    before = work.start.labels
    if head_kind(work.task).head in work.start.network.heads and before != work.labels:
        logger.info(
            msg(
                "The output layer for {before} is replaced by a new one for {labels}.",
                before=", ".join(before)[:80],
                labels=", ".join(work.labels)[:80],
            )
        )
    label, times = Counter(e.label for e in work.dev).most_common(1)[0]
    text = ", ".join(label) if isinstance(label, tuple) else label
    share = f"{times / len(work.dev):.1%}"
    logger.info(
        msg(
            "Always predicting {text!r} would be right for {share} of the evaluation rows.",
            text=text or msg("no label"),
            share=share,
        )
    )


# ------------------------------------------------------------------ the words alone


def word_baseline(
    train: Sequence[Example], judged: Sequence[Example], labels: Sequence[str], tokenizer: Tokenizer
) -> float:
    """The accuracy of multinomial naive Bayes on which tokens occur, with Laplace's smoothing."""
    train = _sample(train, MAX_TRAINING_ROWS)
    judged = _sample(judged, MAX_JUDGED_ROWS)
    place = {name: i for i, name in enumerate(labels)}
    counts = np.ones((len(labels), tokenizer.vocab_size))
    rows = np.ones(len(labels))
    for row, tokens in zip(train, _tokens(train, tokenizer), strict=True):
        counts[place[row.label], tokens] += 1
        rows[place[row.label]] += 1
    logs = np.log(counts) - np.log(counts.sum(1, keepdims=True))
    prior = np.log(rows / rows.sum())
    best = [(prior + logs[:, tokens].sum(1)).argmax() for tokens in _tokens(judged, tokenizer)]
    right = sum(labels[i] == row.label for i, row in zip(best, judged, strict=True))
    return float(right / len(judged))


def _sample(rows: Sequence[Example], limit: int) -> Sequence[Example]:
    return rows if len(rows) <= limit else random.Random(0).sample(rows, limit)


def _tokens(rows: Sequence[Example], tokenizer: Tokenizer) -> list[list[int]]:
    """The distinct tokens of each row's texts."""
    texts = [" ".join(row.texts) for row in rows]
    return [sorted(set(tokens)) for tokens in tokenizer.ids(texts)]
