"""A translation with its attention to the source."""

from pydantic import BaseModel

from malmoi.inference import Model
from malmoi.studio.tokens import readable_token


class TranslationView(BaseModel):
    """Source and target tokens, and the attention between them [target, source]."""

    translation: str
    source: list[str]
    target: list[str]
    weights: list[list[float]]  # the mean of a layer's heads


def translation_view(model: Model, text: str, layer: int) -> TranslationView:
    """Translates by beam search; `layer` counts from 0, -1 is the last."""
    translation = model.translate(text)
    seen = model.cross_attention(text, translation, layer=layer)
    words = model.tokenizer
    return TranslationView(
        translation=translation,
        source=[readable_token(words, token) for token in seen.source],
        target=[readable_token(words, token) for token in seen.target],
        weights=seen.weights.round(4).tolist(),
    )
