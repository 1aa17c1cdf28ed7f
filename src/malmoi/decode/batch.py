"""Rows of unequal length side by side: padding, and batches that waste little of it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.tokenizer import Encoding

ROWS = 32  # sequences in a batch
TOKENS = 16_384  # tokens in a batch, padding included
READ = {"cpu": (ROWS, TOKENS), "cuda": (128, 32_768)}  # both, of a pass that only reads: fewer leave a GPU idle


def pad(rows: Sequence[Sequence[int]], *, left: bool = False, device: torch.device | str = "cpu") -> Tensor:
    """The rows as one tensor [B, T]; zeros stand where a row is shorter."""
    width = max(map(len, rows))
    gaps = [[0] * (width - len(row)) for row in rows]
    return torch.tensor([[*g, *r] if left else [*r, *g] for r, g in zip(rows, gaps, strict=True)], device=device)


def kept(rows: Sequence[Sequence[int]], *, left: bool = False, device: torch.device | str = "cpu") -> Tensor | None:
    """Which places of the padded rows hold a token [B, T]; None where all of them do."""
    lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
    width = int(lengths.max())
    if bool((lengths == width).all()):
        return None
    places = torch.arange(width, device=device)[None]
    return places >= width - lengths if left else places < lengths


def batches(lengths: Sequence[int], rows: int = ROWS, tokens: int = TOKENS) -> Iterator[list[int]]:
    """Indices of the sequences, the longest first, in groups of few enough rows and tokens."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and (len(group) == rows or (len(group) + 1) * lengths[group[0]] > tokens):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def batches_on(device: torch.device, lengths: Sequence[int]) -> Iterator[list[int]]:
    """The same for a pass that only reads, as large as suits the device."""
    return batches(lengths, *room(device))


def room(device: torch.device) -> tuple[int, int]:
    """The most rows and tokens of a pass that only reads."""
    return READ.get(device.type, READ["cpu"])


def inputs(rows: Sequence[Encoding], config: ModelConfig, device: torch.device | str) -> dict[str, Tensor | None]:
    """What the network takes of a batch of encoded texts, padded on the right."""
    tokens = [row.tokens for row in rows]
    segments = pad([row.segments for row in rows], device=device) if config.segments else None
    return {"tokens": pad(tokens, device=device), "keep": kept(tokens, device=device), "segments": segments}
