"""Texts as vectors: hidden states of chosen layers, averaged over them and over the tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malmoi.decode.batch import batches, inputs
from malmoi.errors import UsageError, nearest
from malmoi.model import Network, Trail
from malmoi.tokenizer import Encoding

Array = np.ndarray[Any, np.dtype[np.float32]]


def mean(states: Tensor, first: bool) -> Tensor:
    """The mean over the tokens of one text [T, D] → [D]; the marks around it ([CLS], [SEP]) count too."""
    return states.mean(0)


def cls(states: Tensor, first: bool) -> Tensor:
    """The token that speaks for the text: BERT's first, GPT's last."""
    return states[0 if first else -1]


def none(states: Tensor, first: bool) -> Tensor:
    """Every token's vector [T, D]."""
    return states


POOLS: dict[str, Callable[[Tensor, bool], Tensor]] = {"mean": mean, "cls": cls, "none": none}


@torch.inference_mode()
def vectors(network: Network, texts: Sequence[Encoding], layers: Sequence[int], pool: str) -> list[Array]:
    """One array for each text; layer 0 is the embedding, −1 the last layer; several layers are averaged."""
    if pool not in POOLS:
        raise UsageError(f"There is no pool {pool!r}.{nearest(pool, POOLS)}")
    check_layers(layers, network.config.depth)
    found: list[Array] = [np.empty(0, np.float32)] * len(texts)
    first = network.config.pool == "first"
    for group in batches([len(text.tokens) for text in texts]):
        states = _states(network, [texts[i] for i in group], layers)
        for i, row in zip(group, states, strict=True):
            found[i] = POOLS[pool](row[: len(texts[i].tokens)], first).float().cpu().numpy()
    return found


def _states(network: Network, texts: Sequence[Encoding], layers: Sequence[int]) -> Tensor:
    """The mean of the layers' hidden states [B, T, D]."""
    trail = Trail()
    network.trunk(**inputs(texts, network.config, network.trunk.embed.token.weight.device), trail=trail)
    return torch.stack([trail.hidden[layer] for layer in layers]).mean(0)


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Refuses layers that a model of this depth does not have."""
    if not layers:
        raise UsageError("layers needs at least one number: 0 is the embedding, -1 the last layer.")
    for layer in layers:
        if not -depth - 1 <= layer <= depth:
            raise UsageError(
                f"This model has no layer {layer}: it has {depth}, so layers run from 0 (the embedding) to {depth}, "
                f"or from the end, -1 to {-depth - 1}."
            )
