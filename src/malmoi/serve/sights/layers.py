"""What each layer would say (the logit lens), in words that people can read."""

from pydantic import BaseModel

from malmoi.infer import Model
from malmoi.serve.inside import lens
from malmoi.serve.sights.spell import readable


class Guess(BaseModel):
    text: str
    probability: float


class Layers(BaseModel):
    tokens: list[str]
    layers: list[list[list[Guess]]]  # [L + 1][T][top]: the embedding first


def layers(model: Model, text: str, top: int) -> Layers:
    found, words = lens(model, text, top), model.tokenizer
    guesses = [
        [[Guess(text=readable(words, one.token), probability=one.probability) for one in place] for place in layer]
        for layer in found.guesses
    ]
    return Layers(tokens=[readable(words, token) for token in found.tokens], layers=guesses)
