"""Prefix cache: keys and values of prompts that were read before, in blocks of tokens.

A block's keys and values depend on everything before it, so it is found by its tokens and the
number of the block before; the least recently used are evicted when the budget is full, the later
blocks of a prompt before the earlier ones.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from malmoi.inference.generation.sampling import sent
from malmoi.kernels.kv_slots import KVSlots, lazy_zeros
from malmoi.model import Network

BLOCK_TOKENS = 16
PREFIX_CACHE_BYTES = 256 * 2**20  # bytes: 3,600 tokens of GPT-2 small in fp32
BlockKey = tuple[int, tuple[int, ...]]  # the number of the block before (0: none), and its tokens


class PrefixBlock(NamedTuple):
    """A block's number, and where its keys and values are held."""

    number: int
    place: int


class PrefixCache:
    """The prefixes of one network; thread-safe because lookups copy their results."""

    def __init__(self, network: Network, budget: int = PREFIX_CACHE_BYTES) -> None:
        # inference tensors never change and have no version counter
        self.weights = [weight for weight in network.parameters() if not weight.is_inference()]
        c = network.config
        # a block's keys and values; a recurrent state has no places to cut it at
        self.shape = (2, c.depth, c.key_heads, BLOCK_TOKENS, c.cache_width)
        self.block_bytes = prod(self.shape) * network.dtype.itemsize
        self.most = 0 if c.recurrent else budget // self.block_bytes
        self.held: Tensor | None = None  # of all blocks; on a CPU it takes memory as it is written
        self.lock = threading.RLock()
        self.numbers = count(1)
        self._forget()

    @property
    def used(self) -> int:
        """Bytes of the blocks."""
        return len(self.blocks) * self.block_bytes

    def load(self, tokens: Sequence[int], slots: KVSlots, row: int) -> int:
        """Copies the longest cached prefix of these tokens into a row; returns its length."""
        with self.lock:
            path = self._path(tokens)
            if not path or slots.rings or self.held is None:
                return 0
            self._touch(path)
            found = self.held[self._places(path)].movedim(0, 3).flatten(3, 4)
            (whole,) = slots.held.values()
            whole[:, :, row, :, : found.size(3)] = found
            return found.size(3)

    def cached_length(self, tokens: Sequence[int]) -> int:
        """The length of the prefix that `load` would copy."""
        with self.lock:
            return BLOCK_TOKENS * len(self._path(tokens))

    def store(self, prompts: Mapping[int, Sequence[int]], slots: KVSlots) -> None:
        """Stores the complete blocks of prompts, whose keys are their rows of the cache."""
        if not self.most or slots.rings:
            return
        with self.lock:
            new: dict[int, tuple[int, int]] = {}  # by place: a row, and which of its blocks
            for row, tokens in prompts.items():
                for number, place in self._made_room(tokens):
                    new[place] = (row, number)
            if not new:
                return
            (whole,) = slots.held.values()
            if self.held is None:
                self.held = lazy_zeros((self.most, *self.shape), whole.dtype, whole.device)
            where = torch.tensor([(place, *which) for place, which in new.items()])
            places, rows, numbers = sent(where, whole.device).unbind(1)
            cut = whole.size(4) // BLOCK_TOKENS
            blocks = whole[:, :, :, :, : cut * BLOCK_TOKENS].unflatten(4, (cut, BLOCK_TOKENS))
            self.held[places] = blocks[:, :, rows, :, numbers]

    def _made_room(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The blocks of these tokens that were not held: which of them, and a place for it."""
        path = self._path(tokens)
        self._touch(path)
        before = self.blocks[path[-1]].number if path else 0
        for number, block in [*enumerate(_blocks(tokens))][len(path) : self.most]:
            path.append((before, block))
            before, place = next(self.numbers), self._free_place()
            self.blocks[path[-1]] = PrefixBlock(before, place)
            yield number, place
        self._touch(path)

    def _free_place(self) -> int:
        """A place that no block has, or that of the least recently used one."""
        if len(self.blocks) < self.most:
            return len(self.blocks)
        return self.blocks.popitem(last=False)[1].place

    def _places(self, path: Sequence[BlockKey]) -> Tensor:
        assert self.held is not None
        return sent(torch.tensor([self.blocks[key].place for key in path]), self.held.device)

    def _path(self, tokens: Sequence[int]) -> list[BlockKey]:
        if self.version != _version(self.weights):
            self._forget()
        path: list[BlockKey] = []
        number = 0
        for block in _blocks(tokens):
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
        self.version = _version(self.weights)


def _blocks(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    edges = pairwise(range(0, len(tokens) + 1, BLOCK_TOKENS))
    return (tuple(tokens[start:end]) for start, end in edges)


def _version(weights: Sequence[Tensor]) -> int:
    """Counts in-place changes of the weights: training invalidates the cache."""
    return sum(weight._version for weight in weights)
