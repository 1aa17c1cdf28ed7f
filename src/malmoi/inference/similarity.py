"""Sentence vectors and their cosines. N texts, D width."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError
from malmoi.inference.predict import Prediction, Predictor, TextOrPair
from malmoi.model.heads import pool_tokens
from malmoi.system.progress import tracked
from malmoi.tokenizer.padding import forward_limits, length_batches, model_inputs


@torch.inference_mode()
def sentence_vectors(reading: Predictor, texts: Sequence[str]) -> Tensor:
    """Vectors of length 1 [N, D]; every distinct text is read once."""
    distinct = list(dict.fromkeys(texts))
    pooling = reading.sentence or SentencePooling()
    longest = min(reading.max_tokens, pooling.max_tokens or reading.max_tokens)
    rows = reading.encode.rows(reading.tokenizer, tuple(distinct), longest)
    network = reading.network
    found = torch.empty(len(rows), network.width)
    batches = length_batches([len(row.tokens) for row in rows], forward_limits(network.device))
    for group in tracked(batches, "embed", len(rows)):
        given = model_inputs([rows[i] for i in group], network.config, network.device)
        hidden = network.hidden(**given)  # type: ignore[arg-type]
        vectors = pool_tokens(pooling.tokens, hidden, given["keep"])
        found[torch.tensor(group)] = F.normalize(vectors.float(), dim=-1).cpu()
    places = {text: i for i, text in enumerate(distinct)}
    return found[torch.tensor([places[text] for text in texts], dtype=torch.long)]


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
