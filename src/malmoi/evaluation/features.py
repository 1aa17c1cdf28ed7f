"""Examples as a BERT, or a GPT with frame tokens, sees them, kind by kind; and predictions."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from malmoi.errors import ensure
from malmoi.evaluation.task import Example
from malmoi.inference.batches import in_order, rows_by
from malmoi.inference.embed import pair_cosines, sentence_vectors
from malmoi.inference.predict import (
    Predictor,
    choice_pairs,
    classify_texts,
    held_labels,
    label_texts,
    score_choices,
    score_classes,
)
from malmoi.inference.score import ScoredRow, token_logprobs
from malmoi.inference.spans import answer_questions, tag_words
from malmoi.inference.writing import AnswerRow, as_messages, encode_answer, write_answers
from malmoi.messages import logger, msg
from malmoi.metrics.labels import apply_temperature, best_label_thresholds, best_temperature
from malmoi.metrics.texts import best_threshold, bleu
from malmoi.tokenizer import Tokenizer, TokenRow
from malmoi.tokenizer.windows import ContextWindow, context_windows, word_pieces
from malmoi.training.losses import IGNORE_LABEL


@dataclass(frozen=True)
class TrainingItem:
    """A unit of training: one row, or the rows of an example's choices or orders, and its label."""

    rows: tuple[TokenRow, ...]
    label: Any
    continues: bool = False  # a further window of the example before it

    @property
    def length(self) -> int:
        return max(len(row.tokens) for row in self.rows)


@dataclass(frozen=True)
class AnswerItem(TrainingItem):
    """A conversation; its label has the next token at each position before an answer's token."""


@dataclass(frozen=True)
class FeatureView:
    """How examples are encoded."""

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    length: int  # maximum number of tokens in a row
    stride: int = 128  # between the windows over a long context
    both: bool = False  # pairs in both orders
    last: bool = False  # pools the last token, not the first
    choice_apart: bool = False  # the delimiter comes before a choice, not before its question
    ends: tuple[int, ...] = ()  # tokens that end an answer

    @classmethod
    def of(cls, reading: Predictor, labels: tuple[str, ...]) -> "FeatureView":
        """The encoding that a predictor uses."""
        return cls(
            reading.tokenizer,
            labels,
            reading.max_tokens,
            stride=reading.stride,
            both=reading.both,
            last=reading.network.config.pool == "last",
            choice_apart=reading.choice_apart,
            ends=reading.ends,
        )


def _encode(
    examples: Sequence[Example], view: FeatureView, *, turned: bool = False
) -> list[TokenRow]:
    """Encodes texts and pairs in separate batches; returns them in the examples' order."""

    def encoded(some: list[Example], *, paired: bool) -> list[TokenRow]:
        columns = [[e.text for e in some], [e.pair or "" for e in some]]
        firsts, seconds = reversed(columns) if turned else columns
        return view.tokenizer.rows(firsts, seconds if paired else None, max_tokens=view.length)

    groups = rows_by(e.pair is not None for e in examples)
    return in_order(
        (places, encoded([examples[i] for i in places], paired=paired))
        for paired, places in groups.items()
    )


def _labelled(
    examples: Sequence[Example], view: FeatureView, label: Callable[[Any], Any]
) -> Iterator[TrainingItem]:
    rows = [_encode(examples, view)] + ([_encode(examples, view, turned=True)] if view.both else [])
    for example, *some in zip(examples, *rows, strict=True):
        yield TrainingItem(tuple(some), label(example.label))


def classification_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    numbers = {name: i for i, name in enumerate(view.labels)}
    return _labelled(examples, view, numbers.__getitem__)


def multilabel_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Label vectors: 1 for each label of the example, 0 for the others."""
    return _labelled(
        examples, view, lambda held: tuple(float(name in held) for name in view.labels)
    )


def regression_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    return _labelled(examples, view, float)


def tagging_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Labels on the first token of each word."""
    numbers = {name: i for i, name in enumerate(view.labels)}
    for example, pieces in zip(
        examples, word_pieces(view.tokenizer, [e.words for e in examples], view.length), strict=True
    ):
        for number, piece in enumerate(pieces):
            labels = [IGNORE_LABEL] * len(piece.row.tokens)
            for word, place in enumerate(piece.firsts, start=piece.start):
                if place is not None:
                    labels[place] = numbers[example.label[word]]
            yield TrainingItem((piece.row,), labels, continues=number > 0)


def choice_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """One row per choice: (context, question + choice)."""
    questions = [(e.text, e.pair or "", e.choices) for e in examples]
    pairs = choice_pairs(view.tokenizer, questions, view.length if view.choice_apart else None)
    rows = iter(_encode([Example(*pair) for pair in pairs], view))
    for example in examples:
        yield TrainingItem(tuple(next(rows) for _ in example.choices), example.label)


def answer_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Windows over the context; without the answer, the null token is the target."""
    pairs = [(e.text, e.pair or "") for e in examples]
    lost = []
    for example, some in zip(
        examples, context_windows(view.tokenizer, pairs, view.length, view.stride), strict=True
    ):
        places = [_place(window, example.label) for window in some]
        if example.label and not any(places):
            lost.append(example.place)  # it would teach that there is no answer
            continue
        for number, (window, place) in enumerate(zip(some, places, strict=True)):
            null = len(window.tokens) - 1 if view.last else 0
            row = TokenRow(window.tokens, window.segments)
            yield TrainingItem((row,), place or (null, null), continues=number > 0)
    useful = not lost or len(lost) != len(examples)
    ensure(useful, "No answer fits into {length} tokens; raise --length.", length=view.length)
    if lost:
        logger.warning(
            "{lost:,} of {many:,} rows are skipped, the first at {first}: their answers do not fit "
            "into {length} tokens.",
            lost=len(lost),
            many=len(examples),
            first=lost[0],
            length=view.length,
        )


def _place(window: ContextWindow, answers: Sequence[tuple[str, int]]) -> tuple[int, int] | None:
    """The first and last token of the first answer, if the window contains all of it."""
    if not answers:
        return None
    text, start = answers[0]
    end, (begins, ends) = start + len(text), window.offsets.T
    inside = np.flatnonzero((ends > start) & (begins < end)) + window.first
    if not len(inside) or begins[0] > start or ends[-1] < end:
        return None
    return int(inside[0]), int(inside[-1])


def writing_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Conversations with their answers; only the answers' tokens are learnt, their end included."""
    rows = [answer_row(example, view) for example in examples]
    ensure(
        any(row.spans for row in rows),
        "No answer fits with its prompt into {n} tokens; raise --length, or shorten prompts.",
        n=view.length,
    )
    _note_cuts(examples, rows, view.length)
    for row in rows:
        if row.spans:
            tokens = np.array(row.tokens, np.int32)
            labels = [IGNORE_LABEL] * len(tokens)
            for first, end in row.spans:
                labels[first - 1 : end - 1] = row.tokens[first:end]
            yield AnswerItem((TokenRow(tokens, np.zeros_like(tokens)),), labels)


def answer_row(example: Example, view: FeatureView) -> AnswerRow:
    """The tokens of an example's conversation and its first reference answer."""
    messages = list(example.messages) or as_messages(example.input)
    return encode_answer(view.tokenizer, messages, example.label[0], view.ends, view.length)


def _note_cuts(examples: Sequence[Example], rows: Sequence[AnswerRow], length: int) -> None:
    about = dict(many=len(rows), length=length)
    cut = "{n:,} of {many:,} {what} into {length} tokens and are truncated at the end."
    if n := sum(row.prompt_cut for row in rows):
        logger.warning(cut, n=n, what=msg("prompts do not fit with their answers"), **about)
    if n := sum(row.answer_cut and bool(row.spans) for row in rows):
        logger.warning(cut, n=n, what=msg("answers do not fit"), **about)
    if lost := [e.place for e, row in zip(examples, rows, strict=True) if not row.spans]:
        logger.warning(
            "{n:,} of {many:,} rows are skipped, the first at {first}: no room for an answer.",
            n=len(lost),
            many=len(rows),
            first=lost[0],
        )


def similarity_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """Scores are mapped to 0…1, from the lowest to the highest of the rows."""
    scores = [float(e.label) for e in examples]
    low = min(scores, default=0.0)
    width = max(scores, default=1.0) - low or 1.0
    yield from _items(examples, view, [(score - low) / width for score in scores])


def retrieval_items(examples: Sequence[Example], view: FeatureView) -> Iterator[TrainingItem]:
    """The label numbers the distinct positives, so that equal ones do not repel each other."""
    numbers = {text: i for i, text in enumerate(dict.fromkeys(e.pair for e in examples))}
    yield from _items(examples, view, [numbers[e.pair] for e in examples])


def _items(
    examples: Sequence[Example], view: FeatureView, labels: Sequence[Any]
) -> Iterator[TrainingItem]:
    texts = [(e.text, e.pair or "", *e.choices) for e in examples]
    flat = [text for some in texts for text in some]
    rows = iter(view.tokenizer.rows(flat, max_tokens=view.length))
    for some, label in zip(texts, labels, strict=True):
        yield TrainingItem(tuple(next(rows) for _ in some), label)


# ------------------------------------------------------------------ predictions

QUERIES_AT_ONCE = 1024  # rows of the table of cosines held in memory
LEAST_PROBABILITY = 1e-30  # of an answer; its logarithm must be finite


@dataclass(frozen=True)
class ExamplePrediction:
    """A model's prediction for one example."""

    prediction: Any
    # its probability, the number itself, or the margin of "no answer" over the best span
    score: float
    probabilities: dict[str, float] = field(default_factory=dict)  # by label, or choice index


@dataclass(frozen=True)
class Outcome:
    """Metrics, and the gold label and prediction of each example."""

    metrics: dict[str, float]
    labels: list[Any] = field(repr=False)
    said: list[ExamplePrediction] = field(repr=False)
    # selected thresholds: fields of a `Predictor`, saved with the model
    chosen: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def predictions(self) -> list[Any]:
        return [one.prediction for one in self.said]


def predict_labels(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    return [
        ExamplePrediction(one.label, one.scores[one.label], one.scores)
        for one in classify_texts(reading, [e.input for e in examples])
    ]


def predict_label_sets(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """Predicts label sets; the score is that of the least certain label."""
    return [
        ExamplePrediction(
            one.labels,
            min(p if name in one.labels else 1 - p for name, p in one.scores.items()),
            one.scores,
        )
        for one in label_texts(reading, [e.input for e in examples])
    ]


def predict_numbers(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    values = score_classes(reading, [e.input for e in examples])[:, 0]
    return [ExamplePrediction(value, value) for value in values.tolist()]


def predict_cosines(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    values = pair_cosines(reading, [(e.text, e.pair or "") for e in examples])
    return [ExamplePrediction(value, value) for value in values]


def predict_ranks(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """The rank, from 1, of the text that belongs to each anchor among all texts; its cosine."""
    itself = all(e.pair == e.text for e in examples)
    queries = [" ".join(e.text.split()[::2]) if itself else e.text for e in examples]
    pool = list(dict.fromkeys(text for e in examples for text in (e.pair or "", *e.choices)))
    places = {text: i for i, text in enumerate(pool)}
    targets = sentence_vectors(reading, pool)
    wanted = torch.tensor([places[e.pair or ""] for e in examples], dtype=torch.long)
    found: list[ExamplePrediction] = []
    for group, own in zip(
        sentence_vectors(reading, queries).split(QUERIES_AT_ONCE),
        wanted.split(QUERIES_AT_ONCE),
        strict=True,
    ):
        cosines = group @ targets.T
        right = cosines.gather(1, own[:, None])
        ranks = 1 + (cosines > right).sum(1)
        found += map(ExamplePrediction, ranks.tolist(), right[:, 0].tolist())
    return found


def predict_tags(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    found = tag_words(reading, [e.words for e in examples])
    return [
        ExamplePrediction(tags, float(list(tags) == list(e.label or ())))
        for tags, e in zip(found, examples, strict=True)
    ]


def predict_choices(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    scores = score_choices(reading, [(e.text, e.pair or "", e.choices) for e in examples])
    chances = [(some / reading.temperature).softmax(-1) for some in scores]
    return [
        ExamplePrediction(
            int(some.argmax()),
            float(some.max()),
            {str(i): chance for i, chance in enumerate(some.tolist())},
        )
        for some in chances
    ]


def predict_answers(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    return [
        ExamplePrediction(one.text, one.null)
        for one in answer_questions(reading, [(e.text, e.pair or "") for e in examples], top=1)
    ]


def predict_writing(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """Writes answers; the score is the reference's probability, its tokens' geometric mean."""
    view = FeatureView.of(reading, ())
    rows = [answer_row(example, view) for example in examples]
    scored = [ScoredRow(row.tokens[:end], first) for row in rows for first, end in row.spans[-1:]]
    found = (math.exp(fmean(logprobs)) for logprobs, _ in token_logprobs(reading.network, scored))
    scores = [next(found) if row.spans else 0.0 for row in rows]
    replies = write_answers(reading, [e.input for e in examples])
    return [ExamplePrediction(r.text, p) for r, p in zip(replies, scores, strict=True)]


def measure_writing(
    examples: Sequence[Example], predictions: Sequence[ExamplePrediction]
) -> dict[str, float]:
    """The loss on the reference answers, and as a baseline the BLEU of copying the prompt."""
    return {
        "answer_loss": fmean(-math.log(max(one.score, LEAST_PROBABILITY)) for one in predictions),
        "bleu_copying": bleu([e.label for e in examples], [e.pair or e.text for e in examples]),
    }


# ------------------------------------------------------------------ thresholds


def choose_no_answer(outcome: Outcome, labels: Sequence[str], *, per_label: bool) -> dict[str, Any]:
    """The "no answer" threshold with the best F1 (BERT §4.3)."""
    nulls = [one.score for one in outcome.said]
    return {"threshold": best_threshold(outcome.labels, outcome.predictions, nulls).threshold}


def choose_label_thresholds(
    outcome: Outcome, labels: Sequence[str], *, per_label: bool
) -> dict[str, Any]:
    chances = [list(one.probabilities.values()) for one in outcome.said]
    found = best_label_thresholds(outcome.labels, chances, labels, per_label=per_label)
    return {"thresholds": found}


def decide_labels(one: ExamplePrediction, chosen: Mapping[str, Any]) -> ExamplePrediction:
    return replace(one, prediction=held_labels(one.probabilities, chosen["thresholds"]))


def decide_answer(one: ExamplePrediction, chosen: Mapping[str, Any]) -> ExamplePrediction:
    return replace(one, prediction="" if one.score > chosen["threshold"] else one.prediction)


def choose_temperature(
    outcome: Outcome, labels: Sequence[str], *, per_label: bool
) -> dict[str, Any]:
    """The temperature with the least cross-entropy (Guo et al. 2017 §4.2)."""
    chances = [one.probabilities for one in outcome.said]
    return {"temperature": best_temperature([str(label) for label in outcome.labels], chances)}


def with_temperature(one: ExamplePrediction, chosen: Mapping[str, Any]) -> ExamplePrediction:
    softer = apply_temperature(one.probabilities, chosen["temperature"])
    return replace(one, score=softer[str(one.prediction)], probabilities=softer)
