"""Text embeddings: hidden states averaged over layers and pooled over tokens."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.checkpoint.sentence_pooling import SentencePooling
from malmoi.errors import UsageError, nearest
from malmoi.model import Activations, Network
from malmoi.system.progress import tracked
from malmoi.tokenizer import Encoding
from malmoi.tokenizer.padding import length_batches, model_inputs

Float32Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Pool = Literal["auto", "mean", "cls", "none"]  # auto: as the folder says, else mean


def mean_pool(states: Tensor, place: int) -> Tensor:
    """The mean over a text's tokens [T, D] → [D], [CLS] and [SEP] included."""
    return states.mean(0)


def cls_pool(states: Tensor, place: int) -> Tensor:
    """The token that represents the text: BERT's first, GPT's last."""
    return states[place]


def no_pool(states: Tensor, place: int) -> Tensor:
    """Every token's vector [T, D]."""
    return states


POOLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": mean_pool,
    "cls": cls_pool,
    "none": no_pool,
}


@torch.inference_mode()
def embed_texts(
    network: Network,
    texts: Sequence[Encoding],
    layers: Sequence[int],
    pool: str,
    sentence: SentencePooling | None = None,
) -> list[Float32Array]:
    """Returns one array per text; layer 0 is the embedding, −1 the last; several are averaged.

    The pool "auto" is that of `sentence`, normalised if it says so; without one, the mean.
    """
    if pool not in (*POOLS, "auto"):
        raise UsageError(f"There is no pool {pool!r}.{nearest(pool, [*POOLS, 'auto'])}")
    check_layers(layers, network.config.depth)
    found: list[Float32Array] = [np.empty(0, np.float32)] * len(texts)
    place = -1 if network.config.pool == "last" else 0
    scaled = pool == "auto" and sentence is not None and sentence.normalize
    if pool == "auto":
        tokens = "mean" if sentence is None else sentence.tokens
        pool = "mean" if tokens == "mean" else "cls"
        place = {"first": 0, "last": -1, "mean": place}[tokens]
    batches = length_batches([len(text.tokens) for text in texts])
    for group in tracked(batches, "embed", len(texts)):
        states = _states(network, [texts[i] for i in group], layers)
        for i, row in zip(group, states, strict=True):
            vector = POOLS[pool](row[: len(texts[i].tokens)], place).float()
            vector = F.normalize(vector, dim=-1) if scaled else vector
            found[i] = vector.cpu().numpy()
    return found


def _states(network: Network, texts: Sequence[Encoding], layers: Sequence[int]) -> Tensor:
    """The mean of the layers' hidden states [B, T, D]."""
    activations = Activations()
    network.trunk(
        **model_inputs(texts, network.config, network.device),
        activations=activations,
    )
    return torch.stack([activations.hidden[layer] for layer in layers]).mean(0)


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Raises an error for layers that a model of this depth does not have."""
    if not layers:
        raise UsageError("layers needs at least one number: 0 is the embedding, -1 the last layer.")
    for layer in layers:
        if not -depth - 1 <= layer <= depth:
            raise UsageError(
                f"This model has no layer {layer}: it has {depth}, so layers go from 0 (the "
                f"embedding) to {depth}, or from the end, -1 to {-depth - 1}."
            )
