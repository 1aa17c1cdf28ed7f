"""Keys and values that stand before every text and are seen by all of it: soft tokens, a learnt prefix.

B batch, G key/value heads, n places ahead, E width of a head.
"""

import torch
from torch import Tensor

from malmoi.model.attention import Keeper


class Before:
    """The keys and values of one layer that stand before all others, those of a cache included."""

    def __init__(self, ahead: Tensor, kept: tuple[Keeper, int] | None) -> None:
        self.ahead, self.kept = ahead, kept  # [2, G, n, E]

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            keeper, layer = self.kept
            k, v = keeper.write(layer, k, v)
        first = self.ahead.to(k.dtype)[:, None].expand(-1, len(k), -1, -1, -1)
        return torch.cat((first[0], k), 2), torch.cat((first[1], v), 2)


class Record:
    """Remembers the keys and values of every layer of one row, with the way back to what they were made of."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []  # [2, G, n, E] each

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.layers.append(torch.stack((k[0], v[0])))
        return k, v
