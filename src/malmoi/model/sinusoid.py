"""Sinusoids as positions (Vaswani et al. 2017 §3.5)."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoid_table(
    positions: int, width: int, *, halves: bool = False, device: torch.device | str = "cpu"
) -> Tensor:
    """Vaswani et al. 2017 §3.5: PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(…).

    With `halves` the same columns in another order: the sines first, then the cosines.
    """
    even = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] / 10_000 ** (
        even / width
    )
    return torch.stack((angle.sin(), angle.cos()), dim=1 if halves else -1).flatten(1)[:, :width]


class Sinusoid(nn.Module):
    """A table of sinusoids in the place of learned positions."""

    def __init__(self, context: int, width: int, *, halves: bool = False) -> None:
        super().__init__()
        table = sinusoid_table(context, width, halves=halves)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, cast(Tensor, self.table))
