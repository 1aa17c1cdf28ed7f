"""Padding, and batching of sequences of similar length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malmoi.system.machine import per_device

MAX_ROWS = 32  # sequences in a batch
MAX_TOKENS = 16_384  # tokens in a batch, padding included
# of the longest row: shorter rows wait for the next batch if this one is large enough
MIN_LENGTH_RATIO = 0.8


Ids = Sequence[int] | np.ndarray[Any, Any]


def pad(rows: Sequence[Ids], *, device: torch.device | str = "cpu") -> Tensor:
    """The rows as one tensor [B, T], padded with zeros on the right."""
    return torch.from_numpy(pad_to_width(rows, max(map(len, rows)))).to(device)


def pad_to_width(rows: Sequence[Ids], width: int, fill: int = 0) -> np.ndarray[Any, Any]:
    """The rows as an array [B, width], padded with `fill` on the right."""
    found = np.full((len(rows), width), fill, np.int64)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row
    return found


def keep_mask(rows: Sequence[Ids], *, device: torch.device | str = "cpu") -> Tensor | None:
    """Which positions of the padded rows hold a token [B, T]; None if all do."""
    lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
    width = int(lengths.max())
    if bool((lengths == width).all()):
        return None
    return torch.arange(width, device=device)[None] < lengths


@dataclass(frozen=True)
class BatchLimits:
    """How large a batch may be, and how many tokens keep a device busy."""

    rows: int = MAX_ROWS
    tokens: int = MAX_TOKENS
    busy_tokens: int = MAX_TOKENS


# for a forward pass without generation
FORWARD_LIMITS = {"cpu": BatchLimits(busy_tokens=512), "cuda": BatchLimits(128, 32_768, 16_384)}


def forward_limits(device: torch.device) -> BatchLimits:
    return per_device(FORWARD_LIMITS, device.type)


def length_batches(lengths: Sequence[int], most: BatchLimits | None = None) -> Iterator[list[int]]:
    """Groups indices of the sequences, longest first, into batches within these limits.

    Without any, they are those of a batch that generates.
    """
    most = most or BatchLimits()
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[group[0]] if group else 0
        unlike = (
            len(group) * longest >= most.busy_tokens and lengths[i] < MIN_LENGTH_RATIO * longest
        )
        if group and (
            unlike or len(group) == most.rows or (len(group) + 1) * longest > most.tokens
        ):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
