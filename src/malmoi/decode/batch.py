"""Rows of unequal length side by side: padding, and batches that waste little of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.machine import per_device
from malmoi.tokenizer import Encoding, TokenRow

ROWS = 32  # sequences in a batch
TOKENS = 16_384  # tokens in a batch, padding included
LIKE = 0.8  # of the longest: a row that is shorter waits for the next batch, where this one is large enough


Ids = Sequence[int] | np.ndarray[Any, Any]


def pad(rows: Sequence[Ids], *, left: bool = False, device: torch.device | str = "cpu") -> Tensor:
    """The rows as one tensor [B, T]; zeros stand where a row is shorter."""
    return torch.from_numpy(padded(rows, max(map(len, rows)), left=left)).to(device)


def padded(rows: Sequence[Ids], width: int, fill: int = 0, *, left: bool = False) -> np.ndarray[Any, Any]:
    """The rows side by side [B, width]; `fill` stands where a row is shorter."""
    found = np.full((len(rows), width), fill, np.int64)
    for place, row in zip(found, rows, strict=True):
        place[width - len(row) if left else 0 :][: len(row)] = row
    return found


def kept(rows: Sequence[Ids], *, left: bool = False, device: torch.device | str = "cpu") -> Tensor | None:
    """Which places of the padded rows hold a token [B, T]; None where all of them do."""
    lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
    width = int(lengths.max())
    if bool((lengths == width).all()):
        return None
    places = torch.arange(width, device=device)[None]
    return places >= width - lengths if left else places < lengths


@dataclass(frozen=True)
class Room:
    """How large a batch may be, and how many tokens keep a device busy: beyond them padding only costs."""

    rows: int = ROWS
    tokens: int = TOKENS
    enough: int = TOKENS


WRITE = Room()  # of a batch whose rows go on to write
READ = {"cpu": Room(enough=512), "cuda": Room(128, 32_768, 16_384)}  # of a pass that reads and writes nothing


def room(device: torch.device) -> Room:
    """For a pass that reads and writes nothing on this device."""
    return per_device(READ, device.type)


def batches(lengths: Sequence[int], most: Room = WRITE) -> Iterator[list[int]]:
    """Indices of the sequences, the longest first, in groups of few enough rows and tokens."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[group[0]] if group else 0
        unlike = len(group) * longest >= most.enough and lengths[i] < LIKE * longest
        if group and (unlike or len(group) == most.rows or (len(group) + 1) * longest > most.tokens):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def inputs(
    rows: Sequence[Encoding | TokenRow], config: ModelConfig, device: torch.device | str
) -> dict[str, Tensor | None]:
    """What the network takes of a batch of encoded texts, padded on the right."""
    tokens = [row.tokens for row in rows]
    segments = pad([row.segments for row in rows], device=device) if config.segments else None
    return {"tokens": pad(tokens, device=device), "keep": kept(tokens, device=device), "segments": segments}
