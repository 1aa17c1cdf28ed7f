"""Evaluation: a fine-tuned model by its predictions, any other in context (`few_shot.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from malmoi.errors import UsageError
from malmoi.evaluation.few_shot import EvaluationFiles, evaluate_few_shot
from malmoi.evaluation.tasks import Example, Task, load_examples, named_task, require_labels
from malmoi.evaluation.tasks.features import KIND_HEADS, head_for
from malmoi.inference import Model, load
from malmoi.inference.answer import answer_questions
from malmoi.inference.predict import Predictor, class_scores, score_choices, tag_words
from malmoi.metrics import best_threshold, score_predictions

ALWAYS_ANSWER = float("inf")  # the threshold of a model that never says that there is no answer


@dataclass(frozen=True)
class Outcome:
    """The measures, and each example's own: what was right, what was said, how sure it was."""

    metrics: dict[str, float]
    labels: list[Any] = field(repr=False)
    predictions: list[Any] = field(repr=False)
    # probability, score, or how much likelier "no answer" is than the best
    scores: list[float] = field(repr=False)
    threshold: float | None = None  # above which there is no answer, where that was looked for


def evaluate(
    model: str | Path | Model,
    task: str | Task,
    data: EvaluationFiles | None = None,
    *,
    device: str | None = None,
    skip_bad: bool = False,
    **asking: Any,
) -> Any:
    """The measures of a model on some of a task's files: {"accuracy": 0.91, …, "examples": 872}.

    A fine-tuned model is judged by its head. With `shots` (0, 1, K, "max") a GPT or a BERT is asked
    as it is, after so many examples, and every measure has a standard error; several numbers
    ("0,1,4") give a list. Other settings are the fields of `Asking`: train, seed, limit, score,
    template; and out (a folder for the curve), harness ("lm-eval").
    """
    found = model if isinstance(model, Model) else load(model, device=device)
    if isinstance(task, str) and task.endswith((".yaml", ".yml")):
        return evaluate_few_shot(found, Path(task), data, **asking)
    chosen = named_task(task) if isinstance(task, str) else task
    if asking or chosen.kind not in KIND_HEADS:
        return evaluate_few_shot(found, chosen, data, skip_bad=skip_bad, **asking)
    if data is None:
        raise UsageError(
            f"The task {chosen.name} needs a file of its rows: name it with --data (data=…)."
        )
    examples = load_examples(chosen, data, skip_bad=skip_bad).rows
    done = predict_and_score(chosen, examples, Predictor.of(found.checkpoint))
    return {**done.metrics, "examples": len(examples)}


def predict_and_score(task: Task, examples: Sequence[Example], reading: Predictor) -> Outcome:
    """Predicts by the way that users predict by, and judges."""
    check_task_fits(task, reading)
    require_labels(task, examples)
    gold = [_gold(task, example) for example in examples]
    said, sure = KIND_PREDICTORS[task.kind](reading, examples)
    return Outcome(score_predictions(task.metric_names, gold, said), gold, said, sure)


def check_task_fits(task: Task, reading: Predictor) -> None:
    """A model answers only what it was fine-tuned for."""
    head = head_for(task)
    if head not in reading.network.heads and reading.words is None:
        raise UsageError(
            f"This model has no {head} head, which the task {task.name} ({task.kind}) needs; "
            f"fine-tune it first: malmoi finetune {task.name} --model … Or ask a GPT or a BERT as "
            "it is: --shots 0."
        )
    if task.kind == "classification" and task.labels and set(task.labels) != set(reading.labels):
        ours = ", ".join(task.labels)
        theirs = ", ".join(reading.labels) or "none"
        raise UsageError(
            f"The task {task.name} has the labels {ours}; this model was fine-tuned to say "
            f"{theirs}."
        )


def _gold(task: Task, example: Example) -> Any:
    return [text for text, _ in example.label] if task.kind == "answer" else example.label


def _texts(examples: Sequence[Example]) -> list[Any]:
    return [e.text if e.pair is None else (e.text, e.pair) for e in examples]


def _classes(reading: Predictor, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    sure, best = class_scores(reading, _texts(examples)).softmax(-1).max(-1)
    return [reading.labels[i] for i in best.tolist()], sure.tolist()


def _numbers(reading: Predictor, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    values = class_scores(reading, _texts(examples))[:, 0].tolist()
    return values, values


def _tags(reading: Predictor, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    found = tag_words(reading, [e.words for e in examples])
    return found, [
        float(list(tags) == list(e.label)) for tags, e in zip(found, examples, strict=True)
    ]


def _choices(reading: Predictor, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    questions = [(e.text, e.pair or "", e.choices) for e in examples]
    chances = [scores.softmax(-1) for scores in score_choices(reading, questions)]
    return [int(some.argmax()) for some in chances], [float(some.max()) for some in chances]


def _answers(reading: Predictor, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    found = answer_questions(reading, [(e.text, e.pair or "") for e in examples], top=1)
    return [one.text for one in found], [one.null for one in found]


KIND_PREDICTORS: dict[
    str, Callable[[Predictor, Sequence[Example]], tuple[list[Any], list[float]]]
] = {
    "classification": _classes,
    "regression": _numbers,
    "tagging": _tags,
    "choice": _choices,
    "answer": _answers,
}


def with_threshold(task: Task, examples: Sequence[Example], reading: Predictor) -> Outcome:
    """An outcome whose threshold for "no answer" is the one of the best F1 (BERT §4.3)."""
    best = predict_and_score(task, examples, replace(reading, threshold=ALWAYS_ANSWER))
    found = best_threshold(best.labels, best.predictions, best.scores)
    said = [
        "" if null > found.threshold else text
        for text, null in zip(best.predictions, best.scores, strict=True)
    ]
    without = {f"{name}_without_threshold": value for name, value in best.metrics.items()}
    metrics = {**score_predictions(task.metric_names, best.labels, said), **without}
    return Outcome(metrics, best.labels, said, best.scores, found.threshold)
