"""A translation with its attention to the source."""

from pydantic import BaseModel, Field

from malmoi.inference import Model
from malmoi.server.api.requests import ApiRequest, TextField
from malmoi.studio.endpoint import model_view
from malmoi.studio.tokens import readable_token


class TranslationRequest(ApiRequest):
    """A text to translate, and the decoder layer whose attention is drawn."""

    text: TextField
    layer: int = Field(-1, ge=-1000, le=1000)


class TranslationView(BaseModel):
    """Source and target tokens, and the attention between them [target, source]."""

    translation: str
    source: list[str]
    target: list[str]
    weights: list[list[float]]  # the mean of a layer's heads


@model_view("/translation")
def translation_view(model: Model, body: TranslationRequest) -> TranslationView:
    """A translation by beam search, and its attention to the source."""
    translation = model.translate(body.text)
    seen = model.cross_attention(body.text, translation, layer=body.layer)
    words = model.tokenizer
    return TranslationView(
        translation=translation,
        source=[readable_token(words, token) for token in seen.source],
        target=[readable_token(words, token) for token in seen.target],
        weights=seen.weights.round(4).tolist(),
    )
