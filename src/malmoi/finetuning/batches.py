"""Training batches of similar length, to limit padding. B examples, R rows, T tokens."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from malmoi.config import ModelConfig
from malmoi.evaluation.features import TrainingItem
from malmoi.tokenizer.padding import Ids, pad_to_width
from malmoi.training.losses import IGNORE_LABEL

BATCHES_PER_POOL = 50  # batches whose items are sorted by length together
# short rows are padded to a multiple of 8, others to one of 32: few distinct shapes
SHORT_TOKENS = 128
FINE_MULTIPLE = 8
COARSE_MULTIPLE = 32


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


def labels_per_batch(items: Sequence[TrainingItem], batch: int) -> dict[str, float]:
    """The mean number of labels per batch, used to normalize losses."""
    labels = sum(_count(item.label) for item in items)
    words = sum(len(row.tokens) - 1 for item in items for row in item.rows)
    return {
        name: max(1.0, batch * count / len(items))
        for name, count in (("labels", labels), ("lm_labels", words))
    }


def _count(label: Any) -> int:
    return sum(one != IGNORE_LABEL for one in label) if isinstance(label, list | tuple) else 1


def collate(
    items: Sequence[TrainingItem], config: ModelConfig, *, lm: bool = False
) -> dict[str, Tensor]:
    """Tensors of one batch: tokens, segments, keep, labels; `places` for multi-row examples."""
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
    return tensors


def _padded(rows: Sequence[Ids], fill: int, most: int) -> Tensor:
    longest = max(map(len, rows))
    step = FINE_MULTIPLE if longest <= SHORT_TOKENS else COARSE_MULTIPLE
    width = max(longest, min(most, -(-longest // step) * step))
    return torch.from_numpy(pad_to_width(rows, width, fill))


def _places(items: Sequence[TrainingItem]) -> Tensor:
    """The rows of each example [B, K]; −1 where it has fewer than the others."""
    most = max(len(item.rows) for item in items)
    at = 0
    places = []
    for item in items:
        places.append([*range(at, at + len(item.rows)), *[-1] * (most - len(item.rows))])
        at += len(item.rows)
    return torch.tensor(places)


def _labels(items: Sequence[TrainingItem], most: int) -> Tensor:
    labels: list[Any] = [item.label for item in items]
    return (
        _padded(labels, IGNORE_LABEL, most) if isinstance(labels[0], list) else torch.tensor(labels)
    )


def epoch_batches(
    items: Sequence[TrainingItem],
    batch: int,
    seed: int,
    config: ModelConfig,
    *,
    lm: bool,
    start: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yields an epoch's batches, from batch `start` on."""
    for group in plan_batches([item.length for item in items], batch, seed)[start:]:
        yield collate([items[i] for i in group], config, lm=lm)
