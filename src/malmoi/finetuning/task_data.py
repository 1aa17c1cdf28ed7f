"""Data that all runs of a fine-tuning share: checked examples and the initial model."""

import operator
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.errors import ensure, require_that
from malmoi.evaluation.evaluate import word_baseline
from malmoi.evaluation.examples import (
    Examples,
    files_in,
    label_names,
    load_examples,
    require_labels,
    unseen_labels,
)
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.guess import is_plain_text, published_format
from malmoi.evaluation.kinds import (
    TAGGING,
    HeadKind,
    by_tags,
    custom_task,
    encode_examples,
    head_kind,
)
from malmoi.evaluation.task import Example, Task, metric_names, read_columns
from malmoi.evaluation.tasks import named_task
from malmoi.finetuning.config import FinetuneConfig
from malmoi.finetuning.frozen_features import hash_weights
from malmoi.finetuning.task_network import MAX_ROW_TOKENS
from malmoi.inference.predict import Predictor, Verbalizer
from malmoi.inference.spans import OUTSIDE_TAG
from malmoi.inference.zero_shot import ZERO_SHOT_PROMPTS, label_words, prompt_language
from malmoi.messages import joined, logger, msg, plural
from malmoi.model import Network, count_parameters
from malmoi.model.heads import LABEL_HEADS
from malmoi.settings import Config
from malmoi.system.machine import per_device
from malmoi.system.paths import require_path
from malmoi.text.rows import RowSource, text_lines
from malmoi.tokenizer.extend import unknown_note
from malmoi.training.device import choose_execution
from malmoi.training.losses.distil import Distillation

if TYPE_CHECKING:
    from malmoi.finetuning.candidates import Rival

JUDGED_SHARE = 0.1  # of the rows, if there is no evaluation file
SELECTION_SHARE = 0.1
MIN_SELECTION_ROWS = 50  # fewer cannot tell which of two runs is better
MAX_SELECTION_ROWS = 2000
# Held out to compare a frozen model with the fine-tuned one, of so many rows: reading them must not
# take longer than learning does.
FROZEN_OR_TUNED = "frozen or fine-tuned"
FROZEN_ROWS = (50, 200)
LARGEST_SELECTION_SHARE = 0.25  # if 50 rows are more than this, nothing is held out
# A temperature needs few rows, and held-out rows are lost for training: 4 % of RTE's rows cost
# about 0.2 points (each doubling of its rows gains 3 to 4).
TEMPERATURE_SHARE = 0.02
TEMPERATURE_ROWS = (100, 500)
MIN_ROWS_FOR_TEMPERATURE = 2000
MAX_FEW_ROWS = 200  # more labelled rows are fine-tuned in the usual way
MOST_UNLABELLED = {"cpu": 3_000, "cuda": 30_000}  # rows, to read or learn from in minutes
MIN_TWIN_WORDS = 8  # shorter texts must be identical
PART_END = "\0"  # between the texts of a row
TWIN_SIMILARITY = 0.95  # difflib's ratio: one word of twenty, or a letter in each of a few

Rows = tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Protocol(Config):
    """The numbers of training, selection and evaluation rows, and what is selected."""

    trained_on: int
    unlabelled: int = 0  # rows without labels that were learnt from, too
    selected_on: int  # rows held out of the training set; 0: nothing is selected
    judged_on: int  # rows used only for evaluation
    judged_rows: str  # "a file of their own", or "held out of the training rows"
    selects: tuple[str, ...] = ()  # settings selected on the held-out rows
    judged_twins: int = 0  # evaluation rows whose text is also a training row, except for typos
    trained_files: tuple[str, ...] = ()  # names only: a published folder must not reveal paths

    def describe(self) -> str:
        rows = plural(self.trained_on, "row")
        if not self.trained_on:
            rows = msg("{count:,} rows without labels", count=self.unlabelled)
        elif self.unlabelled:
            rows = msg("{rows} and {count:,} without labels", rows=rows, count=self.unlabelled)
        held = plural(self.selected_on, "held-out row")
        names = joined(", ", map(msg, self.selects))
        judged = plural(self.judged_on, "row")
        parts = (
            msg("Training on {rows}", rows=rows),
            self.selected_on > 0 and msg("{rows} for selection: {names}", rows=held, names=names),
            msg("evaluation on {rows} ({which}).", rows=judged, which=msg(self.judged_rows))
            if self.judged_on
            else msg("nothing is evaluated."),
        )
        return joined("; ", [part for part in parts if part])


def file_names(rows: Sequence[Example]) -> tuple[str, ...]:
    """The names of the files that rows were read from."""
    names = dict.fromkeys(Path(row.place.rpartition(":")[0]).name for row in rows)
    return tuple(name for name in names if name)


def selection_rows(count: int, kind: HeadKind, settings: FinetuneConfig, *, needed: bool) -> int:
    """Number of training rows held out for selection; 0: none."""
    enough = settings.holdout or count >= MIN_ROWS_FOR_TEMPERATURE
    if not needed and not (kind.calibrated and enough):
        return 0
    if settings.holdout:
        return max(1, round(count * settings.holdout))
    if not needed:
        low, high = TEMPERATURE_ROWS
        return min(high, max(low, round(count * TEMPERATURE_SHARE)))
    rows = min(MAX_SELECTION_ROWS, max(MIN_SELECTION_ROWS, round(count * SELECTION_SHARE)))
    return rows if rows <= count * LARGEST_SELECTION_SHARE else 0


def frozen_rows(count: int, settings: FinetuneConfig) -> int:
    """Number of training rows held out to compare a frozen model with a fine-tuned one."""
    low, high = FROZEN_ROWS
    rows = min(high, round(count * SELECTION_SHARE))
    return rows if settings.frozen_first and rows >= low else 0


def hold_out(task: Task, rows: Sequence[Example], count: int, seed: int) -> tuple[Rows, Rows]:
    """Splits rows into the rest and about `count` held-out ones.

    Questions about one passage, and rows of one text, stay together, unless there are more of them
    than are held out. Labels are stratified, and the only row of a label is never held out.
    """
    ensure(
        len(rows) > 1,
        "There is only one example ({place}): two are needed, one for evaluation.",
        place=rows[0].place,
    )
    ensure(
        count < len(rows),
        "Holding out {count:,} of {rows:,} rows leaves none: give more rows or a smaller holdout.",
        count=count,
        rows=len(rows),
    )
    kind = head_kind(task)
    groups: dict[Hashable, list[int]] = {}
    for i in random.Random(seed).sample(range(len(rows)), len(rows)):
        row = rows[i]
        key = row.pair if kind.by_id else (row.text, row.pair, row.choices)
        groups.setdefault(key, []).append(i)
    found = list(groups.values())
    if max(map(len, found)) > count:
        found = [[i] for group in found for i in group]
    held = _spread(_stratified(kind, rows, found), count)
    rest = tuple(row for i, row in enumerate(rows) if i not in held)
    return rest, tuple(rows[i] for i in sorted(held))


def _spread(groups: Sequence[Sequence[int]], count: int) -> set[int]:
    """About `count` members: every so many, so that sorted labels give the same share of each."""
    held: set[int] = set()
    step = sum(map(len, groups)) / count
    seen = 0
    for group in groups:
        if seen >= step * len(held) and len(held) < count:
            held.update(group)
        seen += len(group)
    return held


def _stratified(
    kind: HeadKind, rows: Sequence[Example], groups: list[list[int]]
) -> list[list[int]]:
    """The groups by label, without those that have all rows of a label."""
    if not kind.exclusive:
        return groups
    counts = Counter(str(row.label) for row in rows)
    several = [group for group in groups if counts[str(rows[group[0]].label)] > len(group)]
    ensure(
        several,
        "Each label has only one text ({place}…), which cannot teach it and test it too: give two "
        "or more of each label, or evaluation rows with --dev FILE (dev=…).",
        place=rows[0].place,
    )
    return sorted(several, key=lambda group: str(rows[group[0]].label))


def judged_twins(train: Sequence[Example], judged: Sequence[Example]) -> int:
    """Number of evaluation rows whose text is also a training row, ignoring case and spaces.

    A longer text may differ in a few letters: a typo leaves one of its halves as it was.
    """
    known = {_plain(row) for row in train}
    halves: dict[Hashable, str] = {}
    for words in known:
        for half in _halves(words):
            halves.setdefault(half, " ".join(words))
    return sum(words in known or _nearly(words, halves) for words in map(_plain, judged))


def _nearly(words: tuple[str, ...], halves: Mapping[Hashable, str]) -> bool:
    text = " ".join(words)
    others = (halves[half] for half in _halves(words) if half in halves)
    return any(SequenceMatcher(None, text, o).ratio() >= TWIN_SIMILARITY for o in others)


def _halves(words: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    if len(words) < MIN_TWIN_WORDS or PART_END in words:  # one word may reverse a pair's label
        return []
    middle = len(words) // 2
    return [(0, words[:middle]), (1, words[middle:])]


def _plain(row: Example) -> tuple[str, ...]:
    return tuple(f" {PART_END} ".join((*row.texts, *row.choices)).casefold().split())


FEWEST_ROWS = 10  # with fewer rows, all labels may differ: it may just be a trial


@dataclass(frozen=True, kw_only=True)
class FinetuneData:
    """Data shared by all runs of a fine-tuning."""

    train: Rows
    dev: Rows  # for evaluation only
    held: Rows = ()  # out of training, for selection
    label_thresholds: bool = False  # one per label, not one for all
    task: Task
    labels: tuple[str, ...]
    start: Checkpoint
    device: torch.device
    model_name: str  # hash of the model and the examples
    protocol: Protocol
    teaching: Distillation | None = None  # the teacher's part of the loss, if any
    words: Verbalizer | None = None  # label words to use instead of training
    unlabelled: Rows = ()  # to learn from, too
    rival: "Rival | None" = None  # a model that the result must not clearly lose to
    # when the run began, by time.monotonic(): reading the rows counts against a time budget
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def primary_metric(self) -> str:
        """The metric that selects the best checkpoint and the best run."""
        return metric_names(self.task)[0]

    @property
    def labelled(self) -> "FinetuneData":
        """These data without the rows that have no label."""
        if not self.unlabelled:
            return self  # with what it has encoded
        return replace(self, unlabelled=(), protocol=replace(self.protocol, unlabelled=0))

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
        labelled = self.train[: self.protocol.trained_on]  # the others say what a teacher says
        several = len(labelled) > len(self.labels)  # else they may be the labels' names alone
        if head_kind(self.task).exclusive and words is not None and self.dev and several:
            return word_baseline(labelled, self.dev, self.labels, words)
        return None

    @cached_property
    def encode(self) -> Callable[..., Any]:
        """Cached encoding, since the same rows are evaluated after each epoch of each run."""
        return lru_cache(maxsize=4)(operator.call)  # both orders of a pair, for two sets of rows

    def predictor(self, checkpoint: Checkpoint) -> Predictor:
        return replace(Predictor.of(checkpoint), encode=self.encode)

    def view(self, checkpoint: Checkpoint) -> FeatureView:
        """How a model reads these examples."""
        return FeatureView.of(self.predictor(checkpoint), self.labels)

    @cached_property
    def items(self) -> Callable[[FeatureView], list[TrainingItem]]:
        """Encodes the training examples, cached for runs with the same view."""
        return lru_cache(maxsize=1)(lambda view: encode_examples(self.task, self.train, view))

    def as_trained(self, checkpoint: Checkpoint) -> "FinetuneData":
        """These data without the rows that a model skips, since their answers do not fit."""
        if not head_kind(self.task).windows:
            return self
        rows = sum(not item.continues for item in self.items(self.view(checkpoint)))
        # rows that a teacher labelled are counted apart
        return replace(
            self, protocol=replace(self.protocol, trained_on=rows - self.protocol.unlabelled)
        )


def load_data(
    task: Task,
    data: RowSource,
    dev: RowSource | None,
    settings: FinetuneConfig,
    start: Checkpoint,
    device: torch.device,
) -> FinetuneData:
    """Reads the examples, and holds out rows for selection and, without a file, evaluation."""
    named: list[Examples] = []
    if settings.labels:
        task, rows = _named_rows(task, settings.labels)
        named.append(Examples(rows))
    elif dev is None and isinstance(data, str | Path):
        data, dev = files_in(task, data)
    sources = [*([] if named else [data]), *([] if dev is None else [dev])]
    read = (load_examples(task, some, skip_bad=settings.skip_bad) for some in sources)
    given = [*named, *read]
    for note in (note for some in given for note in some.notes):
        logger.warning(note)
    every = [row for some in given for row in some.rows]
    require_labels(every)
    _check_classes(task, every)
    task = _fit(task, every, start)
    rows = given[0].rows
    if dev is not None:
        judged = given[1].rows
    elif settings.labels:
        judged = ()
    else:
        count = max(1, round(len(rows) * (settings.holdout or JUDGED_SHARE)))
        rows, judged = hold_out(task, rows, count, settings.seed)
    if twins := judged_twins(rows, judged):
        logger.warning(
            "{twins:,} of the {judged:,} evaluation rows are also training rows, or "
            "differ from one by a typo: the result will look better than it is.",
            twins=twins,
            judged=len(judged),
        )
    rows, held, selects = _hold_out_to_select(task, rows, settings)
    _check_training_labels(task, rows, judged)
    unlabelled = read_unlabelled(task, settings, device.type)
    labels = label_names(task, every)
    return FinetuneData(
        task=by_tags(task, labels),
        train=rows,
        dev=judged,
        held=held,
        label_thresholds=settings.label_thresholds,
        labels=labels,
        start=start,
        device=device,
        unlabelled=unlabelled,
        model_name=run_fingerprint(start.network, [*rows, *held, *judged, *unlabelled]),
        protocol=Protocol(
            trained_on=len(rows),
            unlabelled=len(unlabelled),
            selected_on=len(held),
            judged_on=len(judged),
            judged_rows="held out of the training rows" if dev is None else "a file of their own",
            selects=selects,
            judged_twins=twins,
            trained_files=file_names(rows),
        ),
    )


def _named_rows(task: Task, labels: str) -> tuple[Task, Rows]:
    """The task with these labels, whose names are the only rows that have one.

    Tags are O and I-NAME: two phrases of one name that follow each other are one.
    """
    kind = head_kind(task)
    require_that(
        kind.text_labels or kind is TAGGING,
        "labels are learnt from their names for texts, pairs and words; {kind} needs rows that "
        "have labels.",
        kind=task.kind,
    )
    words = label_words([name.strip() for name in labels.split(",")])
    if kind is TAGGING:
        outside = ZERO_SHOT_PROMPTS[prompt_language(labels)]["outside"]
        words = {OUTSIDE_TAG: outside, **{f"I-{name}": word for name, word in words.items()}}
    rows = tuple(
        Example(
            word,
            word if "{pair}" in task.prompt else None,
            label if kind.exclusive else (label,),
            words=(word,),
        )
        for label, word in words.items()
    )
    return replace(task, labels=(*words,), answers=words), rows


def _hold_out_to_select(
    task: Task, rows: Rows, settings: FinetuneConfig
) -> tuple[Rows, Rows, tuple[str, ...]]:
    """The rows to train on, those to select on, if any, and the names of what they select."""
    kind = head_kind(task)
    needs = {
        "setting": settings.grid,
        "epoch": settings.patience > 0,
        "student or defaults": settings.best and settings.holdout > 0,
        "threshold": kind.thresholds(rows) and not settings.labels,
        "student or teacher": bool(settings.unlabelled) and len(rows) > MAX_FEW_ROWS,
    }
    selects = tuple(name for name, needed in needs.items() if needed)  # a temperature alone: none
    count = selection_rows(len(rows), kind, settings, needed=bool(selects))
    if frozen := frozen_rows(len(rows), settings):
        count = max(count, frozen)
        selects = (*selects, FROZEN_OR_TUNED)
    if count:
        rest, held = hold_out(task, rows, count, settings.seed)
        return rest, held, (*selects, *(("temperature",) if kind.calibrated else ()))
    if selects:
        names = joined(", ", map(msg, selects))
        logger.warning(
            "Too few rows to hold some out for selection ({names}): nothing is selected.",
            names=names,
        )
    return rows, (), ()


def read_unlabelled(task: Task, settings: FinetuneConfig, device: str) -> Rows:
    """Rows of files without labels, some of them if they are many; a text file has one a line."""
    require_that(
        not settings.unlabelled or head_kind(task).head in LABEL_HEADS,
        "Rows without labels help to learn labels, numbers and tags, not {kind}.",
        kind=task.kind,
    )
    found: list[Example] = []
    for path in map(Path, settings.unlabelled):
        require_path(path)
        if is_plain_text(path) and published_format(TAGGING.name, path) is None:
            require_that(
                "{pair}" not in task.prompt,
                "{path} has one text a line, and a row here has two: give a table of both.",
                path=path,
            )
            lines = (line.strip() for _, line in text_lines(path))
            found += [
                Example(
                    line,
                    place=str(path),
                    words=(*line.split(),) if head_kind(task).head == "tag" else (),
                )
                for line in lines
                if line
            ]
        else:
            read = _as_written(task, path)
            found += load_examples(read, path, skip_bad=settings.skip_bad).rows
    most = per_device(MOST_UNLABELLED, device)
    if len(found) > most:
        logger.info(
            "{most:,} of the {rows:,} rows without labels are used.", most=most, rows=len(found)
        )
        found = random.Random(settings.seed).sample(found, most)
    return tuple(replace(row, label=None) for row in found)


def _as_written(task: Task, path: Path) -> Task:
    """The task that reads this file: words to tag may be in CoNLL's format or in a column."""
    if head_kind(task) is not TAGGING:
        return task
    if known := published_format(TAGGING.name, path):
        return named_task(known)
    return task if read_columns(task) else custom_task(TAGGING.name)


def _check_training_labels(task: Task, rows: Rows, judged: Rows) -> None:
    learnt = {name for e in rows for name in classes_in(task, e)}
    others = {name for e in judged for name in classes_in(task, e)} - learnt
    ensure(
        not head_kind(task).exclusive or len(learnt) != 1 or not others,
        "All training rows have the label {next!r}, evaluation rows others: give more rows.",
        next=next(iter(learnt), ""),
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
    ensure(
        len(classes) < len(rows),
        "Each of the {rows:,} rows has a different label ({labels}…): give the column of the "
        "classes with --label COLUMN, or use regression for numbers.",
        rows=len(rows),
        labels=", ".join(f"{name!r:.40}" for name in list(classes)[:2]),
    )
    if 2 * len(classes) > len(rows):
        logger.warning(
            "{classes:,} labels for {rows:,} rows: most appear only once.",
            classes=len(classes),
            rows=len(rows),
        )


def describe_run(
    work: FinetuneData, settings: FinetuneConfig, network: Network, items: Sequence[TrainingItem]
) -> None:
    """Logs the data, the baselines and any warnings before training."""
    logger.info(work.protocol.describe())
    learning = sum(p.numel() for p in network.parameters() if p.requires_grad)
    logger.info(
        "{task}: {learning:,} weights are trained ({share:.2%}), {budget}.",
        task=work.task.name,
        learning=learning,
        share=learning / count_parameters(network),
        budget=settings.describe_budget(),
    )
    if head_kind(work.task).text_labels and work.dev:
        _describe_labels(work)
    if work.word_baseline is not None:
        _describe_words(work, work.word_baseline)
    limit = min(settings.length or MAX_ROW_TOKENS, network.config.context)
    cut = sum(item.length >= limit for item in items)
    if cut > 1 and not head_kind(work.task).windows:
        logger.warning(
            "Up to {cut:,} texts are longer than {limit} tokens and are truncated.",
            cut=cut,
            limit=limit,
        )


def _describe_words(work: FinetuneData, words: float) -> None:
    """Says what counting words reaches, and how little an accuracy on few rows is worth."""
    logger.info(
        "Bag-of-words baseline: accuracy {words:.1%} (naive Bayes, no network).", words=words
    )
    if len(work.dev) < MIN_SELECTION_ROWS:
        logger.info(
            "An accuracy on {rows} is exact to ± {points:.0f} points: --dev FILE gives more.",
            rows=plural(len(work.dev), "row"),
            points=100 / len(work.dev) ** 0.5,  # two standard errors where half are right
        )


def _describe_labels(work: FinetuneData) -> None:
    before = work.start.labels
    if before not in ((), work.labels) and head_kind(work.task).head in work.start.network.heads:
        logger.info(
            "The output layer for {before} is replaced by a new one for {labels}.",
            before=", ".join(before)[:80],
            labels=", ".join(work.labels)[:80],
        )
    label, times = Counter(e.label for e in work.dev).most_common(1)[0]
    text = ", ".join(label) if isinstance(label, tuple) else label
    logger.info(
        "Always predicting {text!r} would be right for {share:.1%} of the evaluation rows.",
        text=text or msg("no label"),
        share=times / len(work.dev),
    )


def run_fingerprint(network: Network, examples: Sequence[Example]) -> str:
    """A hash of the initial weights and the examples, independent of file locations."""
    found = hash_weights(network)
    for e in examples:
        found.update(repr((e.text, e.pair, e.label, e.id, e.choices, e.words, e.messages)).encode())
    return found.hexdigest()[:32]


def distillation_record(distillation: Distillation) -> dict[str, Any]:
    """The settings that determine the teacher's part of the loss."""
    numbers = {name: getattr(distillation, name) for name in ("soft", "temperature", "cosine")}
    names = [run_fingerprint(teacher, []) for teacher in distillation.teachers]
    return {"teacher": " ".join(names), **numbers}
