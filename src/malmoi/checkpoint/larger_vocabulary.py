"""A model with more tokens: the rows of new ones start as the mean of their old pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from malmoi.checkpoint.read_folder import Checkpoint
from malmoi.errors import require_that
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer


@torch.no_grad()
def grow_vocabulary(
    checkpoint: Checkpoint, tokenizer: Tokenizer, pieces: Mapping[int, Sequence[int]]
) -> Checkpoint:
    """The model with this tokenizer: a new token starts as the mean of its old pieces.

    That holds for the input and the output matrix and an output bias; a token without old pieces
    starts as the mean of all (Hewitt 2021).
    """
    old = checkpoint.network
    special = old.features is not None or "generator" in old.heads or old.config.encoder_depth
    require_that(not special, "Tokens can be added only to a plain encoder or decoder.")
    config = replace(old.config, vocab=max(old.config.vocab, tokenizer.vocab_size))
    network = Network(config, old.classes, pooler=old.pooler is not None).to(old.device, old.dtype)
    before = old.state_dict()
    for name, weight in network.state_dict().items():
        tensor = before[name]
        if tensor.shape == weight.shape and len(tensor) != old.config.vocab:
            weight.copy_(tensor)
        else:
            _fill_rows(weight, tensor, pieces)
    network.tie()
    return replace(checkpoint, network=network.eval(), tokenizer=tokenizer, generation={})


def _fill_rows(weight: Tensor, old: Tensor, pieces: Mapping[int, Sequence[int]]) -> None:
    """Copies the old rows, and sets each new one to the mean of its pieces."""
    weight[: len(old)] = old
    mean = old.float().mean(0)
    weight[len(old) :] = mean.to(weight)
    for token, parts in pieces.items():
        weight[token] = (old[list(parts)].float().mean(0) if parts else mean).to(weight)
