"""Texts about features, written by a model that was trained on both."""

from collections.abc import Sequence

import numpy as np
import torch

from malmoi.errors import UsageError
from malmoi.model import KVCache, Network

ROWS_TOGETHER = 256


@torch.inference_mode()
def describe_features(
    network: Network, features: np.ndarray, end: int, limit: int
) -> list[list[int]]:
    """The likeliest token each time, for features [N, P, F]."""
    c = network.config
    room = c.context - c.feature_count
    if limit < 1 or limit > room:
        raise UsageError(f"max_new_tokens={limit}: after the features there is room for {room}.")
    starts = range(0, len(features), ROWS_TOGETHER)
    parts = (_write(network, features[at : at + ROWS_TOGETHER], end, limit) for at in starts)
    return [text for part in parts for text in part]


def _write(network: Network, features: np.ndarray, end: int, limit: int) -> list[list[int]]:
    device = network.device
    rows = len(features)
    size = network.config.feature_count + limit
    cache = KVCache(network.config, rows, size, dtype=network.dtype, device=device)
    seen: torch.Tensor | None = torch.tensor(np.array(features, np.float32), device=device)
    newest = torch.full((rows, 1), end, device=device)
    columns: list[torch.Tensor] = []
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    for _ in range(limit):
        hidden = network.trunk(newest, features=seen, cache=cache)
        seen = None
        newest = network.read("lm", hidden[:, -1:]).argmax(-1)
        ended |= newest[:, 0] == end
        if bool(ended.all()):
            break
        columns.append(newest[:, 0])
    written: Sequence[list[int]] = torch.stack(columns, 1).tolist() if columns else [[]] * rows
    return [text[: text.index(end)] if end in text else text for text in written]
