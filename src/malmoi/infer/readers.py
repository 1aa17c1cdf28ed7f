"""Which reader belongs to which head: how `Model.predict` finds out what the model was fine-tuned for."""

from collections.abc import Callable, Sequence
from typing import Any

from malmoi.infer.answer import answer
from malmoi.infer.predict import Reading, choose, classify, tag

READERS: dict[str, Callable[..., list[Any]]] = {"classify": classify, "tag": tag, "span": answer, "choice": choose}


def predictions(reading: Reading, texts: Sequence[Any]) -> list[Any]:
    """Reads the head that the model was fine-tuned with."""
    head = next(name for name in READERS if name in reading.network.heads)
    return READERS[head](reading, texts)
