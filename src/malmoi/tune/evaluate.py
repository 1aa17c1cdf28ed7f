"""What a model is worth: a fine-tuned one by its predictions, any other by what it says in context (`ask.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from malmoi.errors import UsageError
from malmoi.infer import Model, load
from malmoi.infer.answer import answer
from malmoi.infer.predict import Reading, choice_scores, class_scores, tag_words
from malmoi.metrics import best_threshold, judge
from malmoi.tasks import Example, Task, need_labels
from malmoi.tasks import load as load_examples
from malmoi.tasks import task as named_task
from malmoi.tasks.features import HEADS, head_for
from malmoi.tune.ask import Files, in_context

ALWAYS = float("inf")  # the threshold of a model that never says that there is no answer


@dataclass(frozen=True)
class Outcome:
    """The measures, and each example's own: what was right, what was said, how sure it was."""

    metrics: dict[str, float]
    gold: list[Any] = field(repr=False)
    said: list[Any] = field(repr=False)
    sure: list[float] = field(repr=False)  # probability, score, or how much likelier "no answer" is than the best
    threshold: float | None = None  # above which there is no answer, where that was looked for


def evaluate(
    model: str | Path | Model,
    task: str | Task,
    data: Files | None = None,
    *,
    device: str | None = None,
    skip_bad: bool = False,
    **asking: Any,
) -> Any:
    """The measures of a model on some of a task's files: {"accuracy": 0.91, …, "examples": 872}.

    A fine-tuned model is judged by its head. With `shots` (0, 1, K, "max") a GPT or a BERT is asked as it is, after so
    many examples, and every measure has a standard error; several numbers ("0,1,4") give a list. Other settings are
    the fields of `Asking`: train, seed, limit, score, template; and out (a folder for the curve), harness ("lm-eval").
    """
    found = model if isinstance(model, Model) else load(model, device=device)
    if isinstance(task, str) and task.endswith((".yaml", ".yml")):
        return in_context(found, Path(task), data, **asking)
    chosen = named_task(task) if isinstance(task, str) else task
    if asking or chosen.kind not in HEADS:
        return in_context(found, chosen, data, skip_bad=skip_bad, **asking)
    if data is None:
        raise UsageError(f"The task {chosen.name} needs a file of its rows: name it with --data (data=…).")
    examples = load_examples(chosen, data, skip_bad=skip_bad).rows
    done = outcome(chosen, examples, Reading.of(found.checkpoint))
    return {**done.metrics, "examples": len(examples)}


def outcome(task: Task, examples: Sequence[Example], reading: Reading) -> Outcome:
    """Predicts by the way that users predict by, and judges."""
    check_fit(task, reading)
    need_labels(task, examples)
    gold = [_gold(task, example) for example in examples]
    said, sure = PREDICT[task.kind](reading, examples)
    return Outcome(judge(task.judged, gold, said), gold, said, sure)


def check_fit(task: Task, reading: Reading) -> None:
    """A model answers only what it was fine-tuned for."""
    head = head_for(task)
    if head not in reading.network.heads and reading.words is None:
        raise UsageError(
            f"This model has no {head} head, which the task {task.name} ({task.kind}) needs; "
            f"fine-tune it first: malmoi finetune {task.name} --model … Or ask a GPT or a BERT as it is: --shots 0."
        )
    if task.kind == "classification" and task.labels and set(task.labels) != set(reading.labels):
        ours, theirs = ", ".join(task.labels), ", ".join(reading.labels) or "none"
        raise UsageError(f"The task {task.name} has the labels {ours}; this model was fine-tuned to say {theirs}.")


def _gold(task: Task, example: Example) -> Any:
    return [text for text, _ in example.label] if task.kind == "answer" else example.label


def _texts(examples: Sequence[Example]) -> list[Any]:
    return [e.text if e.pair is None else (e.text, e.pair) for e in examples]


def _classes(reading: Reading, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    sure, best = class_scores(reading, _texts(examples)).softmax(-1).max(-1)
    return [reading.labels[i] for i in best.tolist()], sure.tolist()


def _numbers(reading: Reading, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    values = class_scores(reading, _texts(examples))[:, 0].tolist()
    return values, values


def _tags(reading: Reading, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    found = tag_words(reading, [e.words for e in examples])
    return found, [float(list(tags) == list(e.label)) for tags, e in zip(found, examples, strict=True)]


def _choices(reading: Reading, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    questions = [(e.text, e.pair or "", e.choices) for e in examples]
    chances = [scores.softmax(-1) for scores in choice_scores(reading, questions)]
    return [int(some.argmax()) for some in chances], [float(some.max()) for some in chances]


def _answers(reading: Reading, examples: Sequence[Example]) -> tuple[list[Any], list[float]]:
    found = answer(reading, [(e.text, e.pair or "") for e in examples], top=1)
    return [one.text for one in found], [one.null for one in found]


PREDICT: dict[str, Callable[[Reading, Sequence[Example]], tuple[list[Any], list[float]]]] = {
    "classification": _classes,
    "regression": _numbers,
    "tagging": _tags,
    "choice": _choices,
    "answer": _answers,
}


def with_threshold(task: Task, examples: Sequence[Example], reading: Reading) -> Outcome:
    """An outcome whose threshold for "no answer" is the one of the best F1 (BERT §4.3)."""
    best = outcome(task, examples, replace(reading, threshold=ALWAYS))
    found = best_threshold(best.gold, best.said, best.sure)
    said = ["" if null > found.threshold else text for text, null in zip(best.said, best.sure, strict=True)]
    without = {f"{name}_without_threshold": value for name, value in best.metrics.items()}
    metrics = {**judge(task.judged, best.gold, said), **without}
    return Outcome(metrics, best.gold, said, best.sure, found.threshold)
