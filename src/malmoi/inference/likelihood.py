"""Log-probabilities of tokens given the ones before. B rows, T tokens, D width, V vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from malmoi.model import Network
from malmoi.model.recurrent import SegmentMemory
from malmoi.system.machine import per_device
from malmoi.system.progress import tracked
from malmoi.tokenizer.padding import BatchLimits, forward_limits, length_batches, pad

# tokens whose logits are held at once: 100 MB for GPT-2 on a CPU, 400 MB on a GPU
MAX_SCORED_TOKENS = {"cpu": 512, "cuda": 2048}

# each scored token's log-probability, and whether all were the most likely
RowLogprobs = tuple[list[float], bool]


@dataclass(frozen=True)
class ScoredRow:
    """A sequence whose tokens from `first` on are scored."""

    tokens: list[int]
    first: int

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens read before the first predicting one."""
        return tuple(self.tokens[: self.first - 1])

    @property
    def branch(self) -> list[int]:
        """The tokens whose outputs predict the scored ones."""
        return self.tokens[self.first - 1 : -1]


def score_separately(
    network: Network, rows: Sequence[ScoredRow], limits: BatchLimits | None = None
) -> list[RowLogprobs]:
    """Scores every row from its start, in batches of similar length."""
    device = network.device
    results: list[RowLogprobs] = [([], True)] * len(rows)
    batches = length_batches([len(row.tokens) for row in rows], limits or forward_limits(device))
    for group in tracked(batches, "score", len(rows)):
        some = [rows[i] for i in group]
        # padded on the right, where no causal query attends
        shown = pad([row.tokens[:-1] for row in some], device=device)
        hidden = read_segments(network, shown)
        found = score_hidden(network, hidden, some, [row.first - 1 for row in some])
        for i, one in zip(group, found, strict=True):
            results[i] = one
    return results


def read_segments(network: Network, tokens: Tensor) -> Tensor:
    """Hidden states [B, T, D]; with a memory, segment by segment, since attention is quadratic."""
    c = network.config
    if not c.memory:
        return cast(Tensor, network.trunk(tokens))
    memory = SegmentMemory(c.memory)
    return torch.cat([network.trunk(part, cache=memory) for part in tokens.split(c.context, 1)], 1)


def score_hidden(
    network: Network, hidden: Tensor, rows: Sequence[ScoredRow], begins: Sequence[int]
) -> list[RowLogprobs]:
    """Log-probabilities from hidden states [B, T, D]; `begins`: each first predicting position."""
    width = hidden.size(1)
    device = hidden.device
    sizes = [len(row.tokens) - row.first for row in rows]
    slots = [
        i * width + begin + t
        for i, (begin, n) in enumerate(zip(begins, sizes, strict=True))
        for t in range(n)
    ]
    targets = torch.tensor([t for row in rows for t in row.tokens[row.first :]], device=device)
    flat = hidden.flatten(0, 1)[torch.tensor(slots, device=device)]
    size = per_device(MAX_SCORED_TOKENS, device.type)
    logprobs, best = [], []
    for part, target in zip(flat.split(size), targets.split(size), strict=True):
        logits = network.read("lm", part).float()
        chosen = logits.gather(1, target[:, None]).squeeze(1)
        logprobs.append(chosen - logits.logsumexp(-1))
        best.append(logits.argmax(-1) == target)
    # one transfer for all rows: a GPU synchronizes on each
    both = (torch.cat(some).cpu().split(sizes) for some in (logprobs, best))
    return [(one.tolist(), bool(right.all())) for one, right in zip(*both, strict=True)]
