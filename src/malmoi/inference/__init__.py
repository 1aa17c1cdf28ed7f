"""Using a model: generate, score, fill, embed, predict."""

from malmoi.inference.answer import Answer
from malmoi.inference.fill import Fill
from malmoi.inference.model import Model, load
from malmoi.inference.predict import MultiLabelPrediction, Prediction
from malmoi.inference.score import Score
from malmoi.inference.tagging import Span
from malmoi.inference.writing import Reply

__all__ = [
    "Answer",
    "Fill",
    "Model",
    "MultiLabelPrediction",
    "Prediction",
    "Reply",
    "Score",
    "Span",
    "load",
]
