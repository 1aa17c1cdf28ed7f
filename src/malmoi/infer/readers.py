"""Which reader belongs to which head: how `Model.predict` finds out what the model was fine-tuned for."""

from collections.abc import Callable, Sequence
from typing import Any

from malmoi.infer.answer import answer
from malmoi.infer.predict import Reading, choose, classify, tag

READERS: dict[str, Callable[..., list[Any]]] = {"classify": classify, "tag": tag, "span": answer, "choice": choose}


def reader_of(reading: Reading) -> str | None:
    """What the model was fine-tuned to do: by its head, or by the words that it says for each label."""
    heads = (name for name in READERS if name in reading.network.heads)
    return "classify" if reading.words is not None else next(heads, None)


def predictions(reading: Reading, texts: Sequence[Any]) -> list[Any]:
    """Says of each text what the model was fine-tuned to say."""
    return READERS[reader_of(reading) or "classify"](reading, texts)
