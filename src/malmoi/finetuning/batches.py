"""Training batches of similar length, to limit padding. B examples, R rows, T tokens."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.evaluation.features import AnswerItem, TrainingItem
from malmoi.tokenizer.padding import Ids, pad_to_width
from malmoi.training.losses import IGNORE_LABEL

BATCHES_PER_POOL = 50  # batches whose items are sorted by length together
# short rows are padded to a multiple of 8, others to one of 32: few distinct shapes
SHORT_TOKENS = 128
FINE_MULTIPLE = 8
COARSE_MULTIPLE = 32
SLOT_MULTIPLE = 64  # an answer's labels are padded to a multiple of this
# GPT-1's auxiliary loss is the mean over texts of the mean over their tokens (the authors' code):
# each next token weighs 1 / the tokens of its text
LM_WEIGHTS = "lm_weights"
MAX_SHARED_TOKENS = 512  # wider rows hold one conversation each: their mask would be large


def plan_batches(lengths: Sequence[int], batch: int, seed: int) -> list[list[int]]:
    """One epoch's batches as indices: shuffled, sorted by length within pools, shuffled again."""
    order = list(range(len(lengths)))
    chance = random.Random(seed)
    chance.shuffle(order)
    batches = []
    for start in range(0, len(order), BATCHES_PER_POOL * batch):
        pool = sorted(order[start : start + BATCHES_PER_POOL * batch], key=lambda i: lengths[i])
        batches += [pool[i : i + batch] for i in range(0, len(pool), batch)]
    chance.shuffle(batches)
    return batches


def collate(
    items: Sequence[TrainingItem], config: ModelConfig, *, lm: bool = False
) -> dict[str, Tensor]:
    """Tensors of one batch: tokens, segments, keep, labels; `places` for multi-row examples."""
    if isinstance(items[0], AnswerItem):
        return pack_answers(items, config.context, lm=lm)
    rows = [row for item in items for row in item.rows]
    tensors = {"tokens": _padded([row.tokens for row in rows], 0, config.context)}
    width = tensors["tokens"].size(1)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    keep = torch.arange(width)[None] < lengths[:, None]
    if not bool(keep.all()):
        tensors["keep"] = keep
    if config.segments:
        tensors["segments"] = _padded([row.segments for row in rows], 0, config.context)
    if len(rows) > len(items):
        tensors["places"] = _places(items)
    tensors["labels"] = _labels(items, config.context)
    if lm:  # GPT-1 eq. 5: auxiliary language-model loss
        tensors["lm_labels"] = (
            tensors["tokens"].roll(-1, 1).masked_fill(~keep.roll(-1, 1), IGNORE_LABEL)
        )
        tensors["lm_labels"][:, -1] = IGNORE_LABEL
        real = tensors["lm_labels"] != IGNORE_LABEL
        tensors[LM_WEIGHTS] = real / real.sum(1, keepdim=True).clamp(min=1)
    return tensors


def pack_answers(
    items: Sequence[TrainingItem], context: int, *, lm: bool = False
) -> dict[str, Tensor]:
    """Conversations [R, T]; short ones share a row without seeing each other.

    `labels` are only the answers' tokens, and `slots` the positions that predict them.
    """
    longest = max(item.length for item in items)
    width = _width(longest, context)
    sharing = width <= MAX_SHARED_TOKENS
    rows = _shared_rows(items, width) if sharing else [[item] for item in items]
    shape = (len(rows), width)
    tokens, positions = (np.zeros(shape, np.int64) for _ in range(2))
    # padding after the last conversation counts as another one
    documents = np.full(shape, len(items))
    labels = np.full(shape, IGNORE_LABEL)
    every = np.full(shape, IGNORE_LABEL)
    shares = np.zeros(shape, np.float32)
    for row, some in enumerate(rows):
        at = 0
        for number, item in enumerate(some):
            here = slice(at, at + item.length)
            found = item.rows[0].tokens
            tokens[row, here] = found
            positions[row, here] = np.arange(item.length)
            documents[row, here] = number
            labels[row, here] = item.label
            every[row, at : at + item.length - 1] = found[1:]
            shares[row, at : at + item.length - 1] = 1 / max(1, item.length - 1)
            at += item.length
    tensors = {"tokens": torch.from_numpy(tokens), **_slots(labels.reshape(-1))}
    if len(rows) < len(items):  # else a causal row needs no mask: padding comes after it
        tensors |= {
            "positions": torch.from_numpy(positions),
            "documents": torch.from_numpy(documents),
        }
    texts = {"lm_labels": torch.from_numpy(every), LM_WEIGHTS: torch.from_numpy(shares)}
    return tensors | (texts if lm else {})


def _shared_rows(items: Sequence[TrainingItem], width: int) -> list[list[TrainingItem]]:
    """First-fit decreasing bin packing: at most 11/9 of the optimal number of rows."""
    rows: list[list[TrainingItem]] = []
    free: list[int] = []
    for item in sorted(items, key=lambda item: -item.length):
        row = next((i for i, room in enumerate(free) if room >= item.length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(width)
        rows[row].append(item)
        free[row] -= item.length
    return rows


def _slots(labels: NDArray[Any]) -> dict[str, Tensor]:
    """Positions and values of labels, padded to few distinct lengths."""
    found = np.flatnonzero(labels != IGNORE_LABEL)
    size = -(-len(found) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    slots = np.zeros(size, np.int64)
    wanted = np.full(size, IGNORE_LABEL)
    slots[: len(found)] = found
    wanted[: len(found)] = labels[found]
    return {"slots": torch.from_numpy(slots), "labels": torch.from_numpy(wanted)}


def _padded(rows: Sequence[Ids], fill: int, cap: int) -> Tensor:
    return torch.from_numpy(pad_to_width(rows, _width(max(map(len, rows)), cap), fill))


def _width(longest: int, cap: int) -> int:
    step = FINE_MULTIPLE if longest <= SHORT_TOKENS else COARSE_MULTIPLE
    return max(longest, min(cap, -(-longest // step) * step))


def _places(items: Sequence[TrainingItem]) -> Tensor:
    """The rows of each example [B, K]; −1 where it has fewer than the others."""
    rows = max(len(item.rows) for item in items)
    at = 0
    places = []
    for item in items:
        places.append([*range(at, at + len(item.rows)), *[-1] * (rows - len(item.rows))])
        at += len(item.rows)
    return torch.tensor(places)


def _labels(items: Sequence[TrainingItem], cap: int) -> Tensor:
    labels: list[Any] = [item.label for item in items]
    return (
        _padded(labels, IGNORE_LABEL, cap) if isinstance(labels[0], list) else torch.tensor(labels)
    )


def epoch_batches(
    items: Sequence[TrainingItem],
    sizes: tuple[int, int],
    seed: int,
    config: ModelConfig,
    *,
    lm: bool,
    start: int = 0,
) -> Iterator[list[dict[str, Tensor]]]:
    """Yields an epoch's batches from `start` on, each in passes; sizes are of both, in items."""
    batch, micro = sizes
    for group in plan_batches([item.length for item in items], batch, seed)[start:]:
        parts = (group[i : i + micro] for i in range(0, len(group), micro))
        yield [collate([items[i] for i in part], config, lm=lm) for part in parts]
