"""Using a model: generate, score, fill, embed, predict."""

from malmoi.infer.answer import Answer
from malmoi.infer.fill import Fill
from malmoi.infer.model import Model, load
from malmoi.infer.predict import Prediction, Span
from malmoi.infer.score import Score

__all__ = ["Answer", "Fill", "Model", "Prediction", "Score", "Span", "load"]
