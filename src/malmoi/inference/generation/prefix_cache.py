"""Prefix cache: keys and values of prompts that were read before, in blocks of tokens.

A block's keys and values depend on everything before it, so it is found by its tokens and the
number of the block before; the least recently used are evicted when the budget is full, the later
blocks of a prompt before the earlier ones.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from malmoi.kernels.kv_slots import KVSlots
from malmoi.model import Network

BLOCK_TOKENS = 16
PREFIX_CACHE_BYTES = 256 * 2**20  # bytes: 3,600 tokens of GPT-2 small in fp32
BlockKey = tuple[int, tuple[int, ...]]  # the number of the block before (0: none), and its tokens


class PrefixBlock(NamedTuple):
    """A block's number, and its keys and values [2, depth, G, BLOCK, E]."""

    number: int
    held: Tensor


class PrefixCache:
    """The prefixes of one network; thread-safe because lookups copy their results."""

    def __init__(self, network: Network, budget: int = PREFIX_CACHE_BYTES) -> None:
        # inference tensors never change and have no version counter
        self.weights = [weight for weight in network.parameters() if not weight.is_inference()]
        self.budget = budget
        self.enabled = not network.config.recurrent  # a state has no places to cut it at
        self.lock = threading.RLock()
        self.numbers = count(1)
        self._forget()

    def load(self, tokens: Sequence[int], slots: KVSlots, row: int) -> int:
        """Copies the longest cached prefix of these tokens into a row; returns its length."""
        with self.lock:
            path = self._path(tokens)
            self._touch(path)
            blocks = [self.blocks[key].held for key in path]
        if not blocks or slots.rings:
            return 0
        held = torch.cat(blocks, dim=3)
        (whole,) = slots.held.values()
        whole[:, :, row, :, : held.size(3)] = held
        return held.size(3)

    def cached_length(self, tokens: Sequence[int]) -> int:
        """The length of the prefix that `load` would copy."""
        with self.lock:
            return BLOCK_TOKENS * len(self._path(tokens))

    def store(self, tokens: Sequence[int], slots: KVSlots, row: int) -> None:
        """Stores the complete blocks of these tokens from a row of the cache."""
        if not self.enabled or slots.rings:
            return
        (whole,) = slots.held.values()
        with self.lock:
            path = self._path(tokens)
            before = self.blocks[path[-1]].number if path else 0
            for start, block in list(_blocks(tokens))[len(path) :]:
                held = whole[:, :, row, :, start : start + BLOCK_TOKENS].clone()
                path.append((before, block))
                before = next(self.numbers)
                self.blocks[path[-1]] = PrefixBlock(before, held)
                self.used += held.nbytes
            self._touch(path)
            while self.used > self.budget:
                _, oldest = self.blocks.popitem(last=False)
                self.used -= oldest.held.nbytes

    def _path(self, tokens: Sequence[int]) -> list[BlockKey]:
        if self.version != _version(self.weights):
            self._forget()
        path: list[BlockKey] = []
        number = 0
        for _, block in _blocks(tokens):
            found = self.blocks.get((number, block))
            if found is None:
                break
            path.append((number, block))
            number = found.number
        return path

    def _touch(self, path: list[BlockKey]) -> None:
        """From last to first: what a block depends on stays newer, so it is evicted later."""
        for key in reversed(path):
            self.blocks.move_to_end(key)

    def _forget(self) -> None:
        self.blocks: OrderedDict[BlockKey, PrefixBlock] = OrderedDict()
        self.used = 0
        self.version = _version(self.weights)


def _blocks(tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for start, end in pairwise(range(0, len(tokens) + 1, BLOCK_TOKENS)):
        yield start, tuple(tokens[start:end])


def _version(weights: Sequence[Tensor]) -> int:
    """Counts in-place changes of the weights: training invalidates the cache."""
    return sum(weight._version for weight in weights)
