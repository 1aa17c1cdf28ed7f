"""Task kinds: one record per kind holds everything that depends on it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from malmoi.errors import UsageError, require_known, require_that
from malmoi.evaluation import features, prompts, task as tables
from malmoi.evaluation.features import ExamplePrediction, FeatureView, TrainingItem
from malmoi.evaluation.in_context import graders
from malmoi.evaluation.task import KIND_ALIASES, KIND_METRICS, Example, Task, columns, metric_names
from malmoi.inference import predictors
from malmoi.inference.predict import Predictor
from malmoi.messages import msg
from malmoi.metrics import METRICS, metrics_like
from malmoi.metrics.labels import mark_no_entities
from malmoi.system.plugins import load_installed_plugins
from malmoi.text.rows import DataRow, any_rows
from malmoi.tokenizer import Tokenizer
from malmoi.training.losses import Objective, task as losses
from malmoi.training.losses.distil import (
    Distiller,
    Divergence,
    binary_divergence,
    compare_scores,
    squared_distance,
)

# labels that exclude all others
NO_LABEL_NAMES = frozenset({"none", "clean", "no label", "없음", "해당 없음"})
SPARE_TOKENS = 4  # extra tokens of a generated answer, beyond 1.25 × the longest training answer


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task; plain `Kind`s are only evaluated with language models, never fine-tuned."""

    name: str
    read: Callable[[columns, DataRow], Example]  # reads a row of a user's table
    prompt: Callable[[Task, Example], prompts.TaskPrompt]
    grade: graders.Grader  # in-context evaluation
    # columns that a table must have, and why
    needs: Mapping[str, str] = field(default_factory=dict)
    template: Callable[[columns], str] = lambda by: "{text}"  # a custom task's prompt
    # the error of an invalid example; empty if it is valid
    check: Callable[[Task, Example], str] = lambda task, example: ""
    text_labels: bool = False  # a text as a whole has named labels
    exclusive: bool = False  # each text has exactly one label
    classes: Callable[[Any], Iterable[Any]] | None = None  # the class names in a label
    class_names: tuple[str, ...] = ()  # if they are not taken from the data
    by_id: bool = False  # predictions.json maps ids to answers, as SQuAD's scripts expect
    only_read: bool = False  # only the text's likelihood is measured: there is no label


@dataclass(frozen=True, kw_only=True)
class HeadKind(Kind):
    """A kind that is fine-tuned with its own head."""

    output: predictors.TaskHead
    features: Callable[[Sequence[Example], FeatureView], Iterator[TrainingItem]]
    objective: Callable[[Sequence[float] | None], Objective]  # given class weights
    compare: Divergence  # from a teacher's scores
    predict: Callable[[Predictor, Sequence[Example]], list[ExamplePrediction]]
    # converts a label for the metrics, given the model's labels
    gold: Callable[[Any, Sequence[str]], Any] = lambda label, labels: label
    windows: bool = False  # whether long texts are read in windows instead of truncated
    # selects thresholds or a temperature by an outcome, and applies them to a prediction; neither
    # needs the network
    choose: Callable[..., dict[str, Any]] | None = None  # (outcome, labels, per_label=…)
    decide: Callable[[ExamplePrediction, Mapping[str, Any]], ExamplePrediction] = (
        lambda one, chosen: one
    )
    # whether these rows need a threshold, and the one to take if no rows could be held out
    thresholds: Callable[[Sequence[Example]], bool] = lambda rows: False
    unselected: Mapping[str, Any] = field(default_factory=dict)
    # instead of `objective`: given which tokens a sentence encoder pools
    sentence_objective: Callable[[str], Objective] | None = None
    # further metrics of examples and their predictions
    measure: Callable[[Sequence[Example], Sequence[ExamplePrediction]], dict[str, float]] = (
        lambda examples, said: {}
    )
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of `FinetuneConfig`
    # settings of the task that depend on the training rows
    fit: Callable[[Task, Sequence[Example], Tokenizer], Task] = lambda task, rows, words: task
    by_vectors: str = ""  # the kind that a sentence encoder without this head does instead
    in_context: bool = False  # a model that was not fine-tuned for it is evaluated in context

    @property
    def calibrated(self) -> bool:
        """Whether a prediction has probabilities that a temperature can correct."""
        return self.choose is features.choose_temperature

    @property
    def head(self) -> str:
        return self.output.head

    @property
    def writes(self) -> bool:
        """Whether the answer is a text, which only a GPT can write."""
        return self.output is predictors.WRITING

    @property
    def distil(self) -> Distiller:
        return Distiller(self.head, "labels", self.compare)


# ------------------------------------------------------------------ checks


def _check_label(task: Task, example: Example) -> str:
    if not task.labels or example.label in (None, task.no_label, *task.labels):
        return ""
    names = ", ".join(task.labels)
    return msg("the label {label!r} is not one of {labels}", label=example.label, labels=names)


def _check_label_set(task: Task, example: Example) -> str:
    held = example.label or ()
    wrong = (_check_label(task, replace(example, label=name)) for name in held)
    if unknown := next(filter(None, wrong), ""):
        return unknown
    none = [name for name in held if name.lower() in NO_LABEL_NAMES][:1]
    more = [name for name in held if name not in none][:1]
    if not none or not more:
        return ""
    return msg("the labels {none!r} and {more!r} contradict each other", none=none[0], more=more[0])


def _check_tags(task: Task, example: Example) -> str:
    words = len(example.words)
    tags = words if example.label is None else len(example.label)
    if words != tags:
        return msg("there are {words} words and {tags} tags", words=words, tags=tags)
    if "" not in example.words:
        return ""
    return msg("word {index} is empty: a tag without its word", index=example.words.index("") + 1)


def _check_choice(task: Task, example: Example) -> str:
    label, many = example.label, len(example.choices)
    if label is None or 0 <= label < many:
        return ""
    return msg("the answer is choice {n}, but there are only {many} (from 0)", n=label, many=many)


def _check_answers(task: Task, example: Example) -> str:
    for text, start in example.label or ():
        if (example.pair or "")[start : start + len(text)] != text:
            return msg(
                "the answer {text!r:.60} is not found at character {at}", text=text, at=start
            )
    return ""


# ------------------------------------------------------------------ prompts of custom tasks


def _text_and_pair(by: columns) -> str:
    return "{text}\n{pair}" if by.pair else "{text}"


def _and_label(by: columns) -> str:
    """Asks for the label by the name of its column."""
    name = by.label if isinstance(by.label, str) else "labels"
    return f"{_text_and_pair(by)}\n{name.replace('{', '{{').replace('}', '}}')}:"


# ------------------------------------------------------------------ other parts of some kinds


def _no_prompt(*_: Any) -> Any:
    raise UsageError("retrieval compares vectors and has no prompt: leave --shots out.")


def _fit_writing(task: Task, examples: Sequence[Example], tokenizer: Tokenizer) -> Task:
    """Limits a written answer to a little more than the longest that is learnt from."""
    texts = [text for e in examples for text in e.label or ()]
    longest = max(map(len, tokenizer.ids(texts)))
    return replace(task, max_answer_tokens=longest + longest // 4 + SPARE_TOKENS)


# ------------------------------------------------------------------ the kinds


def _answer_texts(label: Any) -> list[str]:
    return [text for text, _ in label]


grade_texts = graders.written_grader()
grade_answers = graders.written_grader(
    lambda text, task, example: "" if text == prompts.NO_ANSWER else text, _answer_texts
)

CLASSIFICATION = HeadKind(
    name="classification",
    read=tables.label_row,
    check=_check_label,
    template=_and_label,
    prompt=prompts.classification_prompt,
    grade=graders.grade_labels,
    text_labels=True,
    output=predictors.ONE_LABEL,
    features=features.classification_items,
    objective=losses.classification_loss,
    compare=compare_scores(losses.class_scores),
    predict=features.predict_labels,
    classes=lambda label: (label,),
    exclusive=True,
    choose=features.choose_temperature,
    decide=features.with_temperature,
)
MULTILABEL = HeadKind(
    name="multilabel",
    read=tables.label_set_row,
    check=_check_label_set,
    template=_and_label,
    prompt=prompts.multilabel_prompt,
    grade=graders.written_grader(
        lambda text, task, example: prompts.parse_labels(text, task), tuple
    ),
    text_labels=True,
    output=predictors.LABEL_SET,
    features=features.multilabel_items,
    objective=losses.multilabel_loss,
    compare=compare_scores(losses.class_scores, binary_divergence),
    predict=features.predict_label_sets,
    classes=lambda label: label,
    # in the model's order, unknown labels last
    gold=lambda label, labels: tuple(dict.fromkeys([n for n in labels if n in label] + [*label])),
    choose=features.choose_label_thresholds,
    decide=features.decide_labels,
    thresholds=lambda rows: True,
)
REGRESSION = HeadKind(
    name="regression",
    read=tables.number_row,
    template=_text_and_pair,
    prompt=prompts.regression_prompt,
    grade=graders.grade_numbers,
    output=predictors.NUMBER,
    features=features.regression_items,
    objective=losses.regression_loss,
    compare=compare_scores(losses.class_scores, squared_distance),
    predict=features.predict_numbers,
    classes=lambda label: (label,),
    class_names=("score",),
    by_vectors="similarity",
)
SIMILARITY = replace(
    REGRESSION,
    name="similarity",
    read=tables.similarity_row,
    output=predictors.SENTENCE,
    features=features.similarity_items,
    sentence_objective=losses.cosine_loss,
    defaults={"lr": 5e-5, "batch": 64},  # other rows of the batch are the negatives
    predict=features.predict_cosines,
    classes=None,
    class_names=(),
    by_vectors="",
)
RETRIEVAL = replace(
    SIMILARITY,
    name="retrieval",
    read=tables.retrieval_row,
    features=features.retrieval_items,
    sentence_objective=losses.ranking_loss,
    predict=features.predict_ranks,
    grade=_no_prompt,
    gold=lambda label, labels: 1,
)
TAGGING = HeadKind(
    name="tagging",
    read=tables.tag_row,
    check=_check_tags,
    prompt=prompts.tagging_prompt,
    grade=graders.written_grader(
        lambda text, task, example: list(prompts.parse_tags(text, example.words))
    ),
    output=predictors.TAGS,
    features=features.tagging_items,
    objective=losses.tagging_loss,
    compare=compare_scores(losses.tag_scores),
    predict=features.predict_tags,
    classes=lambda label: label,
    windows=True,
)
MULTIPLE_CHOICE = HeadKind(
    name="choice",
    read=tables.choice_row,
    needs={
        "choices": msg(
            "A choice needs the columns of its choices: --choices first,second (choices=[…])."
        )
    },
    check=_check_choice,
    template=_text_and_pair,
    prompt=prompts.choice_prompt,
    grade=graders.grade_choices,
    output=predictors.CHOICE,
    features=features.choice_items,
    objective=losses.choice_loss,
    compare=compare_scores(losses.choice_scores),
    predict=features.predict_choices,
    choose=features.choose_temperature,
    decide=features.with_temperature,
)
QUESTION_ANSWERING = HeadKind(
    name="answer",
    read=tables.span_row,
    check=_check_answers,
    template=lambda by: prompts.SQUAD_PROMPT,
    prompt=prompts.answer_prompt,
    grade=grade_answers,
    output=predictors.ANSWER,
    features=features.answer_items,
    objective=losses.span_loss,
    compare=compare_scores(losses.span_scores),
    predict=features.predict_answers,
    gold=lambda label, labels: _answer_texts(label),
    windows=True,
    by_id=True,
    choose=features.choose_no_answer,
    decide=features.decide_answer,
    thresholds=lambda rows: not all(row.label for row in rows),
    unselected={"threshold": 0.0},  # no answer if it is more likely than the best span
)
CLOZE = Kind(
    name="cloze", read=tables.label_row, prompt=prompts.cloze_prompt, grade=graders.grade_cloze
)
WRITING = HeadKind(
    name="writing",
    read=tables.written_row,
    template=_text_and_pair,
    prompt=prompts.write_prompt,
    grade=grade_texts,
    output=predictors.WRITING,
    features=features.writing_items,
    objective=losses.answer_loss,
    compare=compare_scores(losses.answer_scores),
    predict=features.predict_writing,
    gold=lambda label, labels: list(label),
    measure=features.measure_writing,
    defaults={"lm": 0.0, "lr": 3e-4, "warmup": 0.05},
    fit=_fit_writing,
    windows=True,
    in_context=True,
)
READING = Kind(
    name="text",
    read=tables.text_row,
    prompt=lambda task, example: prompts.TaskPrompt(example.text, (), None),
    grade=graders.grade_likelihood,
    only_read=True,
)
ACCEPTABILITY = replace(READING, name="acceptability", grade=graders.grade_acceptability)
MINIMAL_PAIRS = replace(
    READING,
    name="pairs",
    read=tables.pair_row,
    needs={"pair": msg("Minimal pairs need a second column: --pair COLUMN, the wrong sentence.")},
    grade=graders.grade_pairs,
)
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        CLASSIFICATION, MULTILABEL, REGRESSION, SIMILARITY, RETRIEVAL, TAGGING, MULTIPLE_CHOICE,
        QUESTION_ANSWERING, CLOZE, WRITING, READING, ACCEPTABILITY, MINIMAL_PAIRS,
    )
}  # fmt: skip


def kind_named(name: str) -> Kind:
    name = KIND_ALIASES.get(name, name)
    require_known(name, KINDS, "There is no kind of task {name!r}.{hint}")
    return KINDS[name]


def kind_of(task: Task) -> Kind:
    return kind_named(task.kind)


def head_kind(task: Task) -> HeadKind:
    """The kind of a task that can be fine-tuned; other kinds raise an error."""
    kind = kind_of(task)
    if not isinstance(kind, HeadKind):
        raise UsageError(
            "The task {task} ({kind}) is not learnt by fine-tuning; evaluate a language model "
            "on it: malmoi evaluate {task} --model … --shots 0",
            task=task.name,
            kind=task.kind,
        )
    return kind


METRIC_ALIASES = {"mcc": "matthews", "f1": "f1_macro"}


def by_metric(task: Task, metric: str) -> Task:
    """The task with this metric as its first one, the one that selects."""
    if not metric:
        return task
    name = METRIC_ALIASES.get(metric, metric)
    if name not in METRICS:
        load_installed_plugins()
    own = {*metric_names(task), *KIND_METRICS[task.kind]}
    fits = own | (metrics_like(own) - METRIC_ALIASES.keys())
    require_that(
        name in fits,
        "The metric {name!r} is not one of {task}'s. Use one of {fits}.",
        name=metric,
        task=task.name,
        fits=", ".join(sorted(fits)),
    )
    return replace(task, metrics=(name, *(one for one in metric_names(task) if one != name)))


WORD_METRICS = ("tag_accuracy", "tag_f1_macro")  # of parts of speech


def by_tags(task: Task, labels: Collection[str]) -> Task:
    """A task of tags that mark no entities with the metrics of words, unless others were named."""
    usual = task.kind == TAGGING.name and metric_names(task) == KIND_METRICS[TAGGING.name]
    plain = usual and labels and mark_no_entities(labels)
    return replace(task, metrics=WORD_METRICS) if plain else task


def task_prompt(task: Task, example: Example) -> prompts.TaskPrompt:
    """The example as a prompt for a language model."""
    return kind_of(task).prompt(task, example)


def encode_examples(
    task: Task, examples: Sequence[Example], view: FeatureView
) -> list[TrainingItem]:
    """Encodes examples as training items."""
    return list(head_kind(task).features(examples, view))


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
    by = columns(text, pair, label, choices, separator, read=chosen.read)
    if chosen is not MULTILABEL:
        _ = by.one_label  # refuses several
    for column, why in chosen.needs.items():
        require_that(getattr(by, column), why)
    return Task(
        chosen.name,
        chosen.name,
        partial(any_rows, named=[text, *filter(None, [pair]), *by.every_label, *choices]),
        by,
        "your own columns",
        tuple(metrics) or KIND_METRICS[chosen.name],
        () if isinstance(label, str) else tuple(label),
        prompt=chosen.template(by),
    )
