"""What each layer would say (the logit lens), in words that people can read."""

from pydantic import BaseModel

from malmoi.inference import Model
from malmoi.server.inspect_model import lens
from malmoi.server.studio.tokens import readable_token


class LayerToken(BaseModel):
    text: str
    probability: float


class LayerGuesses(BaseModel):
    tokens: list[str]
    layers: list[list[list[LayerToken]]]  # [L + 1][T][top]: the embedding first


def layer_guesses(model: Model, text: str, top: int) -> LayerGuesses:
    found = lens(model, text, top)
    words = model.tokenizer
    guesses = [
        [
            [
                LayerToken(text=readable_token(words, one.token), probability=one.probability)
                for one in place
            ]
            for place in layer
        ]
        for layer in found.guesses
    ]
    return LayerGuesses(
        tokens=[readable_token(words, token) for token in found.tokens], layers=guesses
    )
