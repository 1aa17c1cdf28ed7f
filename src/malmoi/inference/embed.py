"""Text embeddings: hidden states averaged over layers and pooled over tokens; their cosines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError, require_known, require_that
from malmoi.inference.batches import in_order, model_batches
from malmoi.inference.predict import Prediction, Predictor, TextOrPair, encode_rows
from malmoi.messages import logger
from malmoi.model import Activations, Network
from malmoi.tokenizer import Encoding, TokenRow

Float32Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Pool = Literal["auto", "mean", "cls", "none"]  # auto: the folder's setting, else mean

# of a text's hidden states [T, D]
POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda states: states.mean(0),  # [CLS] and [SEP] included
    "first": lambda states: states[0],
    "last": lambda states: states[-1],
    "none": lambda states: states,
}


@torch.inference_mode()
def embed_texts(
    network: Network,
    texts: Sequence[Encoding | TokenRow],
    layers: Sequence[int],
    pool: str,
    sentence: SentencePooling | None = None,
) -> list[Float32Array]:
    """One array per text, the mean of `layers`; "auto" pools as `sentence` says, or by mean."""
    require_known(pool, get_args(Pool), "There is no pool {name!r}.{hint}")
    check_layers(layers, network.config.depth)
    own = sentence if sentence is not None and pool == "auto" else SentencePooling(normalize=False)
    ends = "last" if network.config.pool == "last" else "first"  # GPT's last token, BERT's [CLS]
    pooled = POOLED[{"auto": own.tokens, "cls": ends}.get(pool, pool)]

    def vectors(group: list[int], given: dict[str, Tensor | None]) -> Iterator[Float32Array]:
        activations = Activations()
        last = network.trunk(**given, activations=None if list(layers) == [-1] else activations)
        chosen = [activations.hidden[layer] for layer in layers] if activations.hidden else [last]
        for i, row in zip(group, torch.stack(chosen).mean(0), strict=True):
            vector = pooled(row[: len(texts[i].tokens)]).float()
            yield (F.normalize(vector, dim=-1) if own.normalize else vector).cpu().numpy()

    batches = model_batches(network, texts, "embed")
    return in_order((group, vectors(group, given)) for group, given in batches)


def note_truncated(texts: Sequence[str], encodings: Sequence[Encoding], longest: int) -> None:
    """Notes how many texts were truncated to `longest` tokens, if any."""
    cut = sum(
        len(one.tokens) == longest and max(end for _, end in one.offsets) < len(text.rstrip())
        for text, one in zip(texts, encodings, strict=True)
    )
    if cut:
        logger.warning(
            "{cut:,} of {texts:,} texts are longer than the {longest:,} tokens that are read.",
            cut=cut,
            texts=len(texts),
            longest=longest,
        )


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Raises an error for layers that a model of this depth does not have."""
    require_that(layers, "layers needs at least one number: 0 is the embedding, -1 the last layer.")
    for layer in layers:
        require_that(
            -depth - 1 <= layer <= depth,
            "This model has no layer {layer}: they are 0 (the embedding) to {depth}, or from the "
            "end -1 to -{all}.",
            layer=layer,
            depth=depth,
            all=depth + 1,
        )


def sentence_vectors(reading: Predictor, texts: Sequence[str]) -> Tensor:
    """Vectors of length 1 [N, D]; every distinct text is read once."""
    places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    pooling = replace(reading.sentence or SentencePooling(), normalize=True)
    longest = min(reading.max_tokens, pooling.max_tokens or reading.max_tokens)
    rows = reading.encode(encode_rows, reading.tokenizer, tuple(places), longest)
    found = embed_texts(reading.network, rows, (-1,), "auto", pooling)
    vectors = np.array([found[places[text]] for text in texts], np.float32)
    return torch.from_numpy(vectors.reshape(len(texts), reading.network.width))


def pairs_needed() -> UsageError:
    """The error of a sentence encoder that was given single texts."""
    return UsageError(
        "A sentence encoder compares two texts: give pairs, labels (--labels A,B) or fine-tune it."
    )


def pair_cosines(reading: Predictor, pairs: Sequence[TextOrPair]) -> list[float]:
    """The cosine of each pair of texts."""
    if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
        raise pairs_needed()
    vectors = sentence_vectors(reading, [text for pair in pairs for text in pair])
    return (vectors[::2] * vectors[1::2]).sum(-1).tolist()


def compare_pairs(reading: Predictor, pairs: Sequence[TextOrPair]) -> list[Prediction]:
    """The cosine of each pair of texts, as a prediction."""
    return [Prediction("cosine", {"cosine": value}) for value in pair_cosines(reading, pairs)]
