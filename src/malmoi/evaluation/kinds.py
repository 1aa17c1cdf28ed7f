"""Task kinds: one record per kind holds everything that depends on it.

How rows are read and checked, trained on and predicted, prompted for, and graded.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.evaluation import features, prompts, similarity
from malmoi.evaluation import task as tables
from malmoi.evaluation.features import FeatureView, TrainingItem
from malmoi.evaluation.in_context import graders
from malmoi.evaluation.in_context.graders import Grader, written_grader
from malmoi.evaluation.prompts import NO_ANSWER, TaskPrompt, parse_labels, parse_tags
from malmoi.evaluation.task import Columns, Example, ExampleMaker, Task
from malmoi.inference import predict, predictors
from malmoi.inference.answer import answer_questions
from malmoi.inference.embed import pair_cosines
from malmoi.inference.likelihood import ScoredRow
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import TaskHead
from malmoi.inference.shared_prefix import token_logprobs
from malmoi.inference.writing import write_answers
from malmoi.metrics import (
    apply_temperature,
    best_label_thresholds,
    best_temperature,
    best_threshold,
    bleu,
)
from malmoi.text.rows import any_rows
from malmoi.tokenizer import Tokenizer
from malmoi.training.losses import Objective, sentence
from malmoi.training.losses import task as losses
from malmoi.training.losses.distil import (
    Distiller,
    binary_divergence,
    compare_scores,
    squared_distance,
)

# labels that say that no other label holds
NO_LABEL_NAMES = frozenset({"none", "clean", "no label", "없음", "해당 없음"})
LEAST_PROBABILITY = 1e-30  # of an answer; its logarithm must be finite
SPARE_TOKENS = 4  # that a written answer may have beyond a quarter more than the longest learnt


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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task; plain `Kind`s are only evaluated with language models, never fine-tuned."""

    name: str
    metrics: tuple[str, ...]  # the first is the one that selects
    columns: Callable[[Columns], ExampleMaker]  # reads a row of a user's table
    prompt: Callable[[Task, Example], TaskPrompt]
    grade: Grader  # in-context evaluation
    template: Callable[[Columns], str] = lambda by: "{text}"  # a custom task's prompt
    # what is wrong with an example; empty: nothing
    check: Callable[[Task, Example], str] = lambda task, example: ""
    text_labels: bool = False  # a text as a whole has named labels
    only_read: bool = False  # only the text's likelihood is measured: there is no label


@dataclass(frozen=True, kw_only=True)
class HeadKind(Kind):
    """A kind that is fine-tuned with its own head."""

    output: TaskHead
    features: Callable[[Sequence[Example], FeatureView], Iterator[TrainingItem]]
    objective: Callable[[Sequence[float] | None], Objective]  # given class weights
    distil: Distiller
    predict: Callable[[Predictor, Sequence[Example]], list[ExamplePrediction]]
    classes: Callable[[Any], Iterable[Any]] | None = None  # the class names in a label
    class_names: tuple[str, ...] = ()  # if they are not taken from the data
    exclusive: bool = False  # each text has exactly one label
    # converts a label for the metrics, given the model's labels
    gold: Callable[[Any, Sequence[str]], Any] = lambda label, labels: label
    windows: bool = False  # long texts are read in windows; or their features note what is cut
    by_id: bool = False  # predictions.json maps ids to answers, as SQuAD's scripts expect
    # selects thresholds or a temperature by an outcome, and applies them to a prediction; neither
    # needs the network
    choose: Callable[..., dict[str, Any]] | None = None  # (outcome, labels, per_label=…)
    decide: Callable[[ExamplePrediction, Mapping[str, Any]], ExamplePrediction] = (
        lambda one, chosen: one
    )
    # whether these rows need a threshold, and the one to take if no rows could be held out
    thresholds: Callable[[Sequence[Example]], bool] = lambda rows: False
    # instead of `objective`: given which tokens a sentence encoder pools
    sentence_objective: Callable[[str], Objective] | None = None
    unselected: Mapping[str, Any] = field(default_factory=dict)
    # further metrics, of the examples and what was predicted for them
    measure: Callable[[Sequence[Example], Sequence[ExamplePrediction]], dict[str, float]] = (
        lambda examples, said: {}
    )
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of `FinetuneConfig`
    # what the task decides from its training rows
    fit: Callable[[Task, Sequence[Example], Tokenizer], Task] = lambda task, rows, words: task
    in_context: bool = False  # a model that was not fine-tuned for it is evaluated in context

    @property
    def calibrated(self) -> bool:
        """Whether a prediction has probabilities that a temperature can correct."""
        return self.choose is _choose_temperature

    @property
    def head(self) -> str:
        return self.output.head


# ------------------------------------------------------------------ checks


def _check_label(task: Task, example: Example) -> str:
    known = not task.labels or example.label is None or example.label in task.labels
    return "" if known else f"the label {example.label!r} is not one of {', '.join(task.labels)}"


def _check_label_set(task: Task, example: Example) -> str:
    held = example.label or ()
    others = [name for name in held if task.labels and name not in task.labels]
    if others:
        return f"the label {others[0]!r} is not one of {', '.join(task.labels)}"
    none = next((name for name in held if name.lower() in NO_LABEL_NAMES), None)
    more = next((name for name in held if name != none), None)
    contradict = none is not None and more is not None
    return f"the labels {none!r} and {more!r} contradict each other" if contradict else ""


def _check_tags(task: Task, example: Example) -> str:
    if example.label is not None and len(example.label) != len(example.words):
        return f"there are {len(example.words)} words and {len(example.label)} tags"
    empty = "" in example.words
    return f"word {example.words.index('') + 1} is empty: a tag without its word" if empty else ""


def _check_choice(task: Task, example: Example) -> str:
    count = len(example.choices)
    if example.label is None or 0 <= example.label < count:
        return ""
    return f"the answer is choice {example.label}, but there are only {count} (counted from 0)"


def _check_answers(task: Task, example: Example) -> str:
    for text, start in example.label or ():
        if (example.pair or "")[start : start + len(text)] != text:
            return f"the answer {text!r:.60} is not found at character {start} of its context"
    return ""


# ------------------------------------------------------------------ prompts of custom tasks


def _text_and_pair(by: Columns) -> str:
    return "{text}\n{pair}" if by.pair else "{text}"


def _and_label(by: Columns) -> str:
    """Asks for the label by the name of its column."""
    name = by.label if isinstance(by.label, str) else "labels"
    return f"{_text_and_pair(by)}\n{name.replace('{', '{{').replace('}', '}}')}:"


# ------------------------------------------------------------------ predictions


def _texts(examples: Sequence[Example]) -> list[Any]:
    return [e.text if e.pair is None else (e.text, e.pair) for e in examples]


def _predict_labels(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    found = predict.classify_texts(reading, _texts(examples))
    return [ExamplePrediction(one.label, one.scores[one.label], one.scores) for one in found]


def _predict_label_sets(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """Predicts label sets; the score is that of the least certain label."""
    found = predict.label_texts(reading, _texts(examples))
    return [
        ExamplePrediction(
            one.labels,
            min(p if name in one.labels else 1 - p for name, p in one.scores.items()),
            one.scores,
        )
        for one in found
    ]


def _predict_numbers(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    values = predict.score_classes(reading, _texts(examples))[:, 0].tolist()
    return [ExamplePrediction(value, value) for value in values]


def _predict_cosines(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    values = pair_cosines(reading, [(e.text, e.pair or "") for e in examples])
    return [ExamplePrediction(value, value) for value in values]


def _predict_ranks(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """The prediction is the rank of the right text, the score its cosine."""
    return [ExamplePrediction(*one) for one in similarity.predict_ranks(reading, examples)]


def _no_prompt(*_: Any) -> Any:
    raise UsageError("retrieval compares vectors and has no prompt: leave --shots out.")


def _predict_tags(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    found = predict.tag_words(reading, [e.words for e in examples])
    return [
        ExamplePrediction(tags, float(list(tags) == list(e.label)))
        for tags, e in zip(found, examples, strict=True)
    ]


def _predict_choices(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
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


def _predict_answers(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    found = answer_questions(reading, [(e.text, e.pair or "") for e in examples], top=1)
    return [ExamplePrediction(one.text, one.null) for one in found]


def _predict_writing(reading: Predictor, examples: Sequence[Example]) -> list[ExamplePrediction]:
    """Writes answers; the score is the reference's probability, its tokens' geometric mean."""
    asked = [list(e.messages) or _texts([e])[0] for e in examples]
    view = FeatureView.of(reading, ())
    rows = [features.answer_row(example, view) for example in examples]
    scored = [ScoredRow(row.tokens[:end], first) for row in rows for first, end in row.spans[-1:]]
    found = (math.exp(fmean(logprobs)) for logprobs, _ in token_logprobs(reading.network, scored))
    scores = [next(found) if row.spans else 0.0 for row in rows]
    replies = write_answers(reading, asked)
    return [ExamplePrediction(r.text, p) for r, p in zip(replies, scores, strict=True)]


def _measure_writing(
    examples: Sequence[Example], said: Sequence[ExamplePrediction]
) -> dict[str, float]:
    """The loss on the reference answers, and as a baseline the BLEU of copying the prompt."""
    loss = fmean(-math.log(max(one.score, LEAST_PROBABILITY)) for one in said)
    copied = [e.pair or e.text for e in examples]
    return {"answer_loss": loss, "bleu_copying": bleu([e.label for e in examples], copied)}


def _fit_writing(task: Task, examples: Sequence[Example], tokenizer: Tokenizer) -> Task:
    """Limits a written answer to a little more than the longest that is learnt from."""
    texts = [text for e in examples for text in e.label or ()]
    longest = max(map(len, tokenizer.ids(texts)))
    return replace(task, max_answer_tokens=longest + longest // 4 + SPARE_TOKENS)


def _in_order(label: Any, labels: Sequence[str]) -> tuple[str, ...]:
    """Sorts a label set in the model's order; unknown labels come last."""
    return (*(n for n in labels if n in label), *(n for n in label if n not in labels))


# ------------------------------------------------------------------ thresholds


def _choose_no_answer(
    outcome: Outcome, labels: Sequence[str], *, per_label: bool
) -> dict[str, Any]:
    """The "no answer" threshold with the best F1 (BERT §4.3)."""
    nulls = [one.score for one in outcome.said]
    return {"threshold": best_threshold(outcome.labels, outcome.predictions, nulls).threshold}


def _choose_label_thresholds(
    outcome: Outcome, labels: Sequence[str], *, per_label: bool
) -> dict[str, Any]:
    chances = [list(one.probabilities.values()) for one in outcome.said]
    found = best_label_thresholds(outcome.labels, chances, labels, per_label=per_label)
    return {"thresholds": found}


def _decide_labels(one: ExamplePrediction, chosen: Mapping[str, Any]) -> ExamplePrediction:
    pairs = zip(one.probabilities.items(), chosen["thresholds"], strict=True)
    found = tuple(name for (name, chance), threshold in pairs if chance >= threshold)
    return replace(one, prediction=found)


def _decide_answer(one: ExamplePrediction, chosen: Mapping[str, Any]) -> ExamplePrediction:
    return replace(one, prediction="" if one.score > chosen["threshold"] else one.prediction)


def _choose_temperature(
    outcome: Outcome, labels: Sequence[str], *, per_label: bool
) -> dict[str, Any]:
    """The temperature with the least cross-entropy (Guo et al. 2017 §4.2)."""
    chances = [one.probabilities for one in outcome.said]
    return {"temperature": best_temperature([str(label) for label in outcome.labels], chances)}


def _with_temperature(one: ExamplePrediction, chosen: Mapping[str, Any]) -> ExamplePrediction:
    softer = apply_temperature(one.probabilities, chosen["temperature"])
    return replace(one, score=softer[str(one.prediction)], probabilities=softer)


# ------------------------------------------------------------------ the kinds


def _answer_texts(label: Any) -> list[str]:
    return [text for text, _ in label]


grade_texts = written_grader()
grade_answers = written_grader(
    lambda text, task, example: "" if text == NO_ANSWER else text, _answer_texts
)
grade_tags = written_grader(lambda text, task, example: list(parse_tags(text, example.words)))
grade_label_sets = written_grader(lambda text, task, example: parse_labels(text, task), tuple)

CLASSIFICATION = HeadKind(
    name="classification",
    metrics=("accuracy", "f1_macro"),
    columns=tables.label_columns,
    check=_check_label,
    template=_and_label,
    prompt=prompts.classification_prompt,
    grade=graders.grade_labels,
    text_labels=True,
    output=predictors.ONE_LABEL,
    features=features.classification_items,
    objective=losses.classification_loss,
    distil=Distiller("classify", "labels", compare_scores(losses.class_scores)),
    predict=_predict_labels,
    classes=lambda label: (label,),
    exclusive=True,
    choose=_choose_temperature,
    decide=_with_temperature,
)
MULTILABEL = HeadKind(
    name="multilabel",
    metrics=("f1_micro", "f1_macro", "accuracy"),
    columns=tables.label_set_columns,
    check=_check_label_set,
    template=_and_label,
    prompt=prompts.multilabel_prompt,
    grade=grade_label_sets,
    text_labels=True,
    output=predictors.LABEL_SET,
    features=features.multilabel_items,
    objective=losses.multilabel_loss,
    distil=Distiller("classify", "labels", compare_scores(losses.class_scores, binary_divergence)),
    predict=_predict_label_sets,
    classes=lambda label: label,
    gold=_in_order,
    choose=_choose_label_thresholds,
    decide=_decide_labels,
    thresholds=lambda rows: True,
)
REGRESSION = HeadKind(
    name="regression",
    metrics=("pearson", "spearman"),
    columns=tables.number_columns,
    template=_text_and_pair,
    prompt=prompts.regression_prompt,
    grade=graders.grade_numbers,
    output=predictors.NUMBER,
    features=features.regression_items,
    objective=losses.regression_loss,
    distil=Distiller("classify", "labels", compare_scores(losses.class_scores, squared_distance)),
    predict=_predict_numbers,
    classes=lambda label: (label,),
    class_names=("score",),
)
SIMILARITY = replace(
    REGRESSION,
    name="similarity",
    metrics=("spearman", "pearson"),
    columns=similarity.similarity_columns,
    output=predictors.SENTENCE,
    features=similarity.similarity_items,
    sentence_objective=sentence.cosine_loss,
    defaults={"lr": 5e-5, "batch": 64},  # other rows of the batch are the negatives
    predict=_predict_cosines,
    classes=None,
    class_names=(),
)
RETRIEVAL = replace(
    SIMILARITY,
    name="retrieval",
    metrics=("recall_at_1", "recall_at_10", "mrr"),
    columns=similarity.retrieval_columns,
    features=similarity.retrieval_items,
    sentence_objective=sentence.ranking_loss,
    predict=_predict_ranks,
    grade=_no_prompt,
    gold=lambda label, labels: 1,
)
TAGGING = HeadKind(
    name="tagging",
    metrics=("entity_f1", "entity_precision", "entity_recall"),
    columns=tables.tag_columns,
    check=_check_tags,
    prompt=prompts.tagging_prompt,
    grade=grade_tags,
    output=predictors.TAGS,
    features=features.tagging_items,
    objective=losses.tagging_loss,
    distil=Distiller("tag", "labels", compare_scores(losses.tag_scores)),
    predict=_predict_tags,
    classes=lambda label: label,
    windows=True,
)
MULTIPLE_CHOICE = HeadKind(
    name="choice",
    metrics=("accuracy",),
    columns=tables.choice_columns,
    check=_check_choice,
    template=_text_and_pair,
    prompt=prompts.choice_prompt,
    grade=graders.grade_choices,
    output=predictors.CHOICE,
    features=features.choice_items,
    objective=losses.choice_loss,
    distil=Distiller("choice", "labels", compare_scores(losses.choice_scores)),
    predict=_predict_choices,
    choose=_choose_temperature,
    decide=_with_temperature,
)
QUESTION_ANSWERING = HeadKind(
    name="answer",
    metrics=("span_f1", "span_exact"),
    columns=tables.answer_columns,
    check=_check_answers,
    template=lambda by: prompts.SQUAD_PROMPT,
    prompt=prompts.answer_prompt,
    grade=grade_answers,
    output=predictors.ANSWER,
    features=features.answer_items,
    objective=losses.span_loss,
    distil=Distiller("span", "labels", compare_scores(losses.span_scores)),
    predict=_predict_answers,
    gold=lambda label, labels: _answer_texts(label),
    windows=True,
    by_id=True,
    choose=_choose_no_answer,
    decide=_decide_answer,
    thresholds=lambda rows: not all(row.label for row in rows),
    unselected={"threshold": 0.0},  # no answer if it is more likely than the best span
)
CLOZE = Kind(
    name="cloze",
    metrics=("accuracy", "perplexity"),
    columns=tables.label_columns,
    prompt=prompts.cloze_prompt,
    grade=graders.grade_cloze,
)
WRITING = HeadKind(
    name="writing",
    metrics=("answer_loss", "bleu", "chrf", "rouge_l", "match"),
    columns=tables.written_columns,
    template=_text_and_pair,
    prompt=prompts.write_prompt,
    grade=grade_texts,
    output=predictors.WRITING,
    features=features.writing_items,
    objective=losses.answer_loss,
    distil=Distiller("lm", "labels", compare_scores(losses.answer_scores)),
    predict=_predict_writing,
    gold=lambda label, labels: list(label),
    measure=_measure_writing,
    defaults={"lm": 0.0, "lr": 3e-4, "warmup": 0.05},
    fit=_fit_writing,
    windows=True,
    in_context=True,
)
READING = Kind(
    name="text",
    metrics=("perplexity", "bits_per_byte"),
    columns=tables.text_columns,
    prompt=prompts.text_prompt,
    grade=graders.grade_likelihood,
    only_read=True,
)
ACCEPTABILITY = replace(
    READING,
    name="acceptability",
    metrics=("matthews", "accuracy"),
    grade=graders.grade_acceptability,
)
MINIMAL_PAIRS = replace(
    READING,
    name="pairs",
    metrics=("accuracy",),
    columns=tables.pair_columns,
    grade=graders.grade_pairs,
)
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        CLASSIFICATION, MULTILABEL, REGRESSION, SIMILARITY, RETRIEVAL, TAGGING, MULTIPLE_CHOICE,
        QUESTION_ANSWERING, CLOZE, WRITING, READING, ACCEPTABILITY, MINIMAL_PAIRS,
    )
}  # fmt: skip
KIND_ALIASES = {"write": "writing"}


def kind_named(name: str) -> Kind:
    name = KIND_ALIASES.get(name, name)
    if name not in KINDS:
        raise UsageError(f"There is no kind of task {name!r}.{nearest(name, KINDS)}")
    return KINDS[name]


def kind_of(task: Task) -> Kind:
    return kind_named(task.kind)


def head_kind(task: Task) -> HeadKind:
    """The kind of a task that can be fine-tuned; other kinds raise an error."""
    kind = kind_of(task)
    if not isinstance(kind, HeadKind):
        raise UsageError(
            f"The task {task.name} ({task.kind}) is not learnt by fine-tuning; evaluate a "
            f"language model on it: malmoi evaluate {task.name} --model … --shots 0"
        )
    return kind


def metric_names(task: Task) -> tuple[str, ...]:
    """The task's metrics; the first is the one that selects."""
    return task.metrics or kind_of(task).metrics


METRIC_ALIASES = {"mcc": "matthews", "f1": "f1_macro"}


def by_metric(task: Task, metric: str) -> Task:
    """The task with this metric as its first one, the one that selects."""
    if not metric:
        return task
    name = METRIC_ALIASES.get(metric, metric)
    fits = {*metric_names(task), *kind_of(task).metrics}
    if kind_of(task).text_labels:
        fits |= {"accuracy", "f1_macro", "f1_micro", "matthews"}
    if name not in fits:
        raise UsageError(
            f"The metric {metric!r} is not one of {task.name}'s.{nearest(metric, fits)} Use one "
            f"of {', '.join(sorted(fits))}."
        )
    return replace(task, metrics=(name, *(one for one in metric_names(task) if one != name)))


def task_prompt(task: Task, example: Example) -> TaskPrompt:
    """The example as a prompt for a language model."""
    return kind_of(task).prompt(task, example)


def encode_examples(
    task: Task, examples: Sequence[Example], view: FeatureView
) -> list[TrainingItem]:
    """Encodes examples as training items."""
    return list(head_kind(task).features(examples, view))


def _named_columns(by: Columns) -> dict[str, str]:
    """The columns as strings, to be kept in a model's folder."""
    label = by.label if isinstance(by.label, str) else ",".join(by.label)
    named = {"text": by.text, "pair": by.pair, "label": label, "choices": ",".join(by.choices)}
    found = {name: column for name, column in named.items() if column}
    return found | ({} if by.separator == Columns.separator else {"separator": by.separator})


def custom_task(  # noqa: PLR0913  # one per column
    kind: str,
    *,
    text: str = "text",
    pair: str | None = None,
    label: str | Sequence[str] = "label",
    choices: Sequence[str] = (),
    separator: str = ",",
    metrics: Sequence[str] = (),
) -> Task:
    """A task on named columns of your own files.

    Multilabel takes labels as a list, as a string with a `separator`, or as one 0/1 column each
    (label=["anger", "fear"]). Tagging takes words and tags as lists or space-separated strings;
    choice takes the columns of the choices and the number of the right one; answer takes the
    context in `pair` and the answer text in `label`; pairs takes the right sentence in `text` and
    the wrong one in `pair`. Writing takes a prompt in `text` (and what it is about in `pair`) and
    its answer in `label`, or conversations: a column of lists of {"role": …, "content": …}.
    Similarity takes two texts and their score in `label`; retrieval takes a text, the one that
    belongs to it in `pair` (none: itself) and columns of others in `choices`. Two
    kinds are for language models only: cloze (the last word is in `label`) and text (its
    likelihood).

    Examples:
        >>> malmoi.custom_task("classification", text="review", label="stars").kind
        'classification'
    """
    chosen = kind_named(kind)
    by = Columns(text, pair, label, choices, separator)
    return Task(
        chosen.name,
        chosen.name,
        any_rows,
        chosen.columns(by),
        "your own columns",
        tuple(metrics) or chosen.metrics,
        () if isinstance(label, str) else tuple(label),
        prompt=chosen.template(by),
        columns=_named_columns(by),
    )
