"""What models predict for the examples of each kind, and thresholds that decide by it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from malmoi.evaluation.features import FeatureView, answer_row
from malmoi.evaluation.task import Example
from malmoi.inference import predict
from malmoi.inference.answer import answer_questions
from malmoi.inference.embed import pair_cosines, sentence_vectors
from malmoi.inference.likelihood import ScoredRow
from malmoi.inference.predict import Predictor
from malmoi.inference.shared_prefix import token_logprobs
from malmoi.inference.tagging import tag_words
from malmoi.inference.writing import write_answers
from malmoi.metrics.labels import apply_temperature, best_label_thresholds, best_temperature
from malmoi.metrics.texts import best_threshold, bleu

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
    found = predict.classify_texts(reading, [e.input for e in examples])
    return [ExamplePrediction(one.label, one.scores[one.label], one.scores) for one in found]


def predict_label_sets(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """Predicts label sets; the score is that of the least certain label."""
    found = predict.label_texts(reading, [e.input for e in examples])
    return [
        ExamplePrediction(
            one.labels,
            min(p if name in one.labels else 1 - p for name, p in one.scores.items()),
            one.scores,
        )
        for one in found
    ]


def predict_numbers(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    values = predict.score_classes(reading, [e.input for e in examples])[:, 0].tolist()
    return [ExamplePrediction(value, value) for value in values]


def predict_cosines(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    values = pair_cosines(reading, [(e.text, e.pair or "") for e in examples])
    return [ExamplePrediction(value, value) for value in values]


def predict_ranks(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """The rank of each anchor's text among all texts of the rows, from 1; the score is its cosine.

    A text that belongs to itself is searched for by every second word of it.
    """
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
        ExamplePrediction(tags, float(list(tags) == list(e.label)))
        for tags, e in zip(found, examples, strict=True)
    ]


def predict_choices(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    questions = [(e.text, e.pair or "", e.choices) for e in examples]
    scores = predict.score_choices(reading, questions)
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
    found = answer_questions(reading, [(e.text, e.pair or "") for e in examples], top=1)
    return [ExamplePrediction(one.text, one.null) for one in found]


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
    loss = fmean(-math.log(max(one.score, LEAST_PROBABILITY)) for one in predictions)
    copied = [e.pair or e.text for e in examples]
    return {"answer_loss": loss, "bleu_copying": bleu([e.label for e in examples], copied)}


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
    pairs = zip(one.probabilities.items(), chosen["thresholds"], strict=True)
    found = tuple(name for (name, chance), threshold in pairs if chance >= threshold)
    return replace(one, prediction=found)


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
