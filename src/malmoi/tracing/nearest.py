"""Sentences of the training text whose hidden states are like those of a text."""

from typing import TYPE_CHECKING

import numpy as np

from malmoi.messages import StatusLog
from malmoi.tracing.index import TextIndex
from malmoi.tracing.trace import NearPassage

if TYPE_CHECKING:
    from malmoi.inference import Model
    from malmoi.inference.embed import Float32Array

logger = StatusLog(__name__)

SENTENCES = 2000  # drawn evenly and read once by the model


class NearestSentences:
    """Evenly drawn sentences and the means of their last hidden states."""

    def __init__(self, model: "Model", index: TextIndex) -> None:
        self.model = model
        drawn = [
            part.passage(index.tokenizer, int(place), 1)
            for part in index.parts
            for place in np.linspace(0, len(part.places) - 1, SENTENCES // len(index.parts))
        ]
        self.passages = list({one.text: one for one in drawn if one.text.strip()}.values())
        logger.info("Reading {count:,} sentences of training text …", count=len(self.passages))
        vectors = model.embed([one.text for one in self.passages], truncate=True)
        # hidden states share a direction, without which the others are seen
        self.centre = vectors.mean(0)
        self.directions = _unit(vectors - self.centre)

    def near(self, text: str, top: int) -> tuple[NearPassage, ...]:
        """The most similar ones."""
        wanted = _unit(self.model.embed(text, truncate=True) - self.centre)
        similar = self.directions @ wanted
        chosen = [(self.passages[i], similar[i]) for i in np.argsort(-similar)[:top]]
        return tuple(NearPassage(one.text, one.document, float(share)) for one, share in chosen)


def _unit(vectors: "Float32Array") -> "Float32Array":
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    found: Float32Array = vectors / np.maximum(lengths, 1e-12)
    return found
