"""Scores continuations with shared prefixes: each prefix is read once, then its branches.

Few-shot prompts share their examples, and choices share their question: a context of 500 tokens
with four choices of five tokens is 520 tokens to read, not 2,020, and the next question's examples
are already cached.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from malmoi.inference.generation.prefix_cache import BLOCK_TOKENS, PrefixCache
from malmoi.inference.likelihood import RowLogprobs, ScoredRow, score_hidden, score_separately
from malmoi.kernels.kv_slots import (
    BranchCache,
    KVSlots,
    common_prefix_length,
    prefill_rows,
)
from malmoi.model import Network
from malmoi.tokenizer.padding import BatchLimits, forward_limits, length_batches, pad

# of the tokens read without sharing; above this, sharing costs more than it saves
MAX_TOKEN_RATIO = 0.8


@dataclass(frozen=True)
class SharedPrefix:
    """A context, and the rows that continue it."""

    tokens: tuple[int, ...]
    rows: list[int]


@torch.inference_mode()
def token_logprobs(
    network: Network, rows: Sequence[ScoredRow], prefixes: PrefixCache | None = None
) -> list[RowLogprobs]:
    """Returns each row's log-probabilities of scored tokens, and whether all were the most likely.

    `prefixes` caches contexts between calls.
    """
    results: list[RowLogprobs] = [([], True)] * len(rows)
    alone: list[int] = []
    for group in _groups(rows, forward_limits(network.device)):
        c = network.config
        shareable = network.trunk.is_causal and not c.recurrent and not c.memory
        reading = _PrefixBatch(network, rows, group, prefixes) if shareable else None
        if reading is None or not reading.saves_time:
            alone += [i for prefix in group for i in prefix.rows]
            continue
        for i, found in reading.run():
            results[i] = found
    for i, found in zip(alone, score_separately(network, [rows[i] for i in alone]), strict=True):
        results[i] = found
    return results


def _groups(rows: Sequence[ScoredRow], limits: BatchLimits) -> Iterator[list[SharedPrefix]]:
    """Yields sorted contexts, so that similar ones are adjacent, in groups that fit in one pass."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.prefix, []).append(i)
    group: list[SharedPrefix] = []
    longest = 0
    for tokens in sorted(found):
        longest = max(longest, len(tokens))
        if group and (len(group) == limits.rows or (len(group) + 1) * longest > limits.tokens):
            yield group
            group = []
            longest = len(tokens)
        group.append(SharedPrefix(tokens, found[tokens]))
    if group:
        yield group


class _PrefixBatch:
    """Some contexts in the rows of one cache, and their branches."""

    def __init__(
        self,
        network: Network,
        rows: Sequence[ScoredRow],
        shared: Sequence[SharedPrefix],
        prefixes: PrefixCache | None,
    ) -> None:
        self.network = network
        self.rows = rows
        self.shared = shared
        self.prefixes = prefixes
        first = shared[0].tokens
        last = shared[-1].tokens
        # contexts are sorted, so the first and the last share what all of them share
        self.common = first[: common_prefix_length(first, last)] if len(shared) > 1 else first

    @property
    def saves_time(self) -> bool:
        alone = sum(len(self.rows[i].tokens) - 1 for prefix in self.shared for i in prefix.rows)
        branches = sum(len(self.rows[i].branch) for prefix in self.shared for i in prefix.rows)
        known = self.prefixes.cached_length(self.common) if self.prefixes is not None else 0
        rests = sum(len(prefix.tokens) - len(self.common) for prefix in self.shared)
        read = len(self.common) - known + rests
        return bool(self.shared[-1].tokens) and read + branches < MAX_TOKEN_RATIO * alone

    def run(self) -> Iterator[tuple[int, RowLogprobs]]:
        self.slots = KVSlots(
            self.network, len(self.shared), max(len(prefix.tokens) for prefix in self.shared)
        )
        self._read_common()
        self._read_rests()
        pairs = [(row, i) for row, prefix in enumerate(self.shared) for i in prefix.rows]
        # each branch attends to its own prefix's keys and values
        limits = forward_limits(self.slots.device)
        longest = max(len(self.rows[i].tokens) for _, i in pairs)
        limits = replace(limits, rows=min(limits.rows, max(1, limits.tokens // longest)))
        for group in length_batches([len(self.rows[i].branch) for _, i in pairs], limits):
            some = [pairs[k] for k in group]
            yield from zip([i for _, i in some], self._branch(some), strict=True)

    def _read_common(self) -> None:
        """Reads the common prefix into the first row, from the cache if possible, and copies it."""
        common = self.common
        known = self.prefixes.load(common, self.slots, 0) if self.prefixes is not None else 0
        if known < len(common):
            prefill_rows(self.network, self.slots, [0], [list(common[known:])], [known])
        if self.prefixes is not None and len(common) - known >= BLOCK_TOKENS:
            self.prefixes.store(common, self.slots, 0)
        for row in range(1, len(self.shared)):
            self.slots.copy(0, row, len(common))

    def _read_rests(self) -> None:
        start = len(self.common)
        rests = [list(prefix.tokens[start:]) for prefix in self.shared]
        rows = [row for row, rest in enumerate(rests) if rest]
        lengths = [len(rests[row]) for row in rows]
        for group in length_batches(lengths, forward_limits(self.slots.device)):
            some = [rows[k] for k in group]
            parts = [rests[row] for row in some]
            prefill_rows(self.network, self.slots, some, parts, [start] * len(some))

    def _branch(self, some: Sequence[tuple[int, int]]) -> list[RowLogprobs]:
        device = self.slots.device
        rows = [self.rows[i] for _, i in some]
        tokens = pad([row.branch for row in rows], device=device)
        lengths = torch.tensor([row.first - 1 for row in rows], device=device)
        slots = torch.tensor([row for row, _ in some], device=device)
        cache = BranchCache(self.slots, slots, lengths)
        steps = torch.arange(tokens.size(1), device=device).expand_as(tokens)
        sizes = torch.tensor([[len(row.branch)] for row in rows], device=device)
        where = lengths[:, None] + steps.minimum(sizes - 1)
        hidden = self.network.trunk(tokens, keep=steps < sizes, positions=where, cache=cache)
        return score_hidden(self.network, hidden, rows, [0] * len(rows))
