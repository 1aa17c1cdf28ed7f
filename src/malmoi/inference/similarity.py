"""Sentence vectors and their cosines. N texts, D width."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError
from malmoi.inference.embed import embed_texts
from malmoi.inference.predict import Prediction, Predictor, TextOrPair


def sentence_vectors(reading: Predictor, texts: Sequence[str]) -> Tensor:
    """Vectors of length 1 [N, D]; every distinct text is read once."""
    places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    pooling = replace(reading.sentence or SentencePooling(), normalize=True)
    longest = min(reading.max_tokens, pooling.max_tokens or reading.max_tokens)
    rows = reading.encode.rows(reading.tokenizer, tuple(places), longest)
    found = embed_texts(reading.network, rows, (-1,), "auto", pooling)
    vectors = np.array([found[places[text]] for text in texts], np.float32)
    return torch.from_numpy(vectors.reshape(len(texts), reading.network.width))


def pair_cosines(reading: Predictor, pairs: Sequence[TextOrPair]) -> list[float]:
    """The cosine of each pair of texts."""
    if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
        raise UsageError("A sentence encoder compares two texts: give pairs, (first, second).")
    vectors = sentence_vectors(reading, [text for pair in pairs for text in pair])
    cosines: list[float] = (vectors[::2] * vectors[1::2]).sum(-1).tolist()
    return cosines


def compare_pairs(reading: Predictor, pairs: Sequence[TextOrPair]) -> list[Prediction]:
    """The cosine of each pair of texts, as a prediction."""
    return [Prediction("cosine", {"cosine": value}) for value in pair_cosines(reading, pairs)]
