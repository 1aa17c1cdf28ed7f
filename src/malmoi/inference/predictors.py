"""Which reader belongs to which head: how `Model.predict` finds out what the model was
fine-tuned for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from malmoi.inference.answer import answer_questions
from malmoi.inference.predict import Predictor, answer_choices, classify_texts, tag_texts

PREDICTORS: dict[str, Callable[..., list[Any]]] = {
    "classify": classify_texts,
    "tag": tag_texts,
    "span": answer_questions,
    "choice": answer_choices,
}


def predictor_name(reading: Predictor) -> str | None:
    """What the model was fine-tuned to do: by its head, or by the words that it says for each
    label.
    """
    heads = (name for name in PREDICTORS if name in reading.network.heads)
    return "classify" if reading.words is not None else next(heads, None)


def predictions(reading: Predictor, texts: Sequence[Any]) -> list[Any]:
    """Says of each text what the model was fine-tuned to say."""
    return PREDICTORS[predictor_name(reading) or "classify"](reading, texts)
