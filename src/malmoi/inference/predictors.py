"""The heads of fine-tuned models, and how `Model.predict` selects one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from malmoi.checkpoint import Checkpoint
from malmoi.errors import ensure
from malmoi.inference.embed import compare_pairs
from malmoi.inference.predict import Predictor, answer_choices, classify_texts, label_texts
from malmoi.inference.spans import answer_questions, tag_texts
from malmoi.inference.writing import write_answers


@dataclass(frozen=True)
class TaskHead:
    """A head added by fine-tuning, and the function that turns its scores into predictions."""

    head: str
    predict: Callable[..., list[Any]]
    problem_type: str = ""  # Hugging Face's name, where one head serves several problems
    beside: tuple[str, ...] = ()  # heads that transformers' GPT has in addition


ONE_LABEL = TaskHead("classify", classify_texts, "single_label_classification")
LABEL_SET = TaskHead("classify", label_texts, "multi_label_classification")
NUMBER = TaskHead("classify", classify_texts, "regression")
TAGS = TaskHead("tag", tag_texts)
ANSWER = TaskHead("span", answer_questions)
CHOICE = TaskHead("choice", answer_choices, beside=("lm",))
WRITING = TaskHead("lm", write_answers)
SENTENCE = TaskHead("", compare_pairs)  # no head: the encoder's own vectors
TASK_HEADS = (ONE_LABEL, LABEL_SET, NUMBER, TAGS, ANSWER, CHOICE)
TEXT_HEADS = (ONE_LABEL, LABEL_SET, NUMBER)  # heads that predict for a whole text or pair


def task_heads(reading: Predictor) -> list[TaskHead]:
    """The task heads of a fine-tuned model; a verbalizer counts as a classifier."""
    if reading.answer_tokens:
        return [WRITING]
    if reading.words is not None:
        return [ONE_LABEL]
    problem = reading.problem_type
    if not problem and len(reading.labels) == 1:
        problem = NUMBER.problem_type  # transformers' default if config.json does not set it
    known = [one.problem_type for one in TEXT_HEADS]
    ensure(
        not problem or problem in known,
        "This model's config.json says problem_type {problem!r}; Malmoi knows {known}.",
        problem=problem,
        known=", ".join(known),
    )
    wanted = ("", problem or ONE_LABEL.problem_type)
    heads = [one for one in TASK_HEADS if one.head in reading.network.heads]
    found = [one for one in heads if one.problem_type in wanted]
    return found + ([SENTENCE] if reading.sentence is not None else [])


def entailment_class(checkpoint: Checkpoint) -> int | None:
    """The class "entailment" of a model fine-tuned for natural language inference, if it is one."""
    if checkpoint.tokenizer is None or ONE_LABEL not in task_heads(Predictor.of(checkpoint)):
        return None
    places = [i for i, name in enumerate(checkpoint.labels) if name.lower().startswith("entail")]
    return places[0] if places else None
