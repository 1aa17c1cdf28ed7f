"""Using a model: generate, score, fill, embed, predict."""

from typing import TYPE_CHECKING

from malmoi.system.lazy import lazy_names

if TYPE_CHECKING:
    from malmoi.inference.model import Model, load
    from malmoi.inference.predict import MultiLabelPrediction, Prediction
    from malmoi.inference.pseudo_likelihood import Fill
    from malmoi.inference.score import Score
    from malmoi.inference.spans import Answer, Span
    from malmoi.inference.writing import Reply
else:
    __getattr__ = lazy_names(
        __name__,
        pseudo_likelihood="Fill",
        model="Model load",
        predict="MultiLabelPrediction Prediction",
        score="Score",
        spans="Answer Span",
        writing="Reply",
    )

__all__ = [
    "Answer", "Fill", "Model", "MultiLabelPrediction", "Prediction", "Reply", "Score", "Span",
    "load",
]  # fmt: skip
