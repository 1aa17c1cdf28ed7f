"""Generates text from feature vectors."""

import numpy as np
import torch

from malmoi.errors import UsageError
from malmoi.model import KVCache, Network

ROWS_TOGETHER = 256


@torch.inference_mode()
def describe_features(
    network: Network, features: np.ndarray, end: int, limit: int
) -> list[list[int]]:
    """Generates a text for each row of features [N, P, F], greedily."""
    c = network.config
    room = c.context - c.feature_count
    if limit < 1 or limit > room:
        raise UsageError(
            "max_new_tokens={limit}: after the features there is room for {room}.",
            limit=limit,
            room=room,
        )
    given = torch.tensor(np.array(features, np.float32), device=network.device)
    size = c.feature_count + limit
    found: list[list[int]] = []
    for some in given.split(ROWS_TOGETHER):
        cache = KVCache(c, len(some), size, dtype=network.dtype, device=network.device)
        tokens = torch.full((len(some), 1), end, device=network.device)
        ended = torch.zeros(len(some), dtype=torch.bool, device=network.device)
        while tokens.size(1) <= limit and not bool(ended.all()):
            shown = some if tokens.size(1) == 1 else None
            hidden = network.trunk(tokens[:, -1:], features=shown, cache=cache)
            tokens = torch.cat((tokens, network.read("lm", hidden[:, -1:]).argmax(-1)), 1)
            ended |= tokens[:, -1] == end
        found += tokens[:, 1:].tolist()
    return [text[: text.index(end)] if end in text else text for text in found]
