"""Prefix cache: keys and values of prompts that were read before.

A trie over blocks of tokens. A block's keys and values depend on everything before it, so a node is
found only by its whole path; the least recently used leaves are evicted when the budget is full.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from malmoi.kernels.kv_slots import KVSlots
from malmoi.model import Network

BLOCK_TOKENS = 16  # tokens per node
PREFIX_CACHE_BYTES = 256 * 2**20  # bytes: 3,600 tokens of GPT-2 small in fp32


@dataclass(eq=False)
class PrefixNode:
    """A block's keys and values [2, depth, G, BLOCK, E], after the path to it."""

    block: tuple[int, ...]
    parent: "PrefixNode | None" = None
    held: Tensor | None = None
    children: dict[tuple[int, ...], "PrefixNode"] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return 0 if self.held is None else self.held.nbytes


class PrefixCache:
    """The prefix trie of one network; thread-safe because lookups copy their results."""

    def __init__(self, network: Network, budget: int = PREFIX_CACHE_BYTES) -> None:
        # inference tensors never change and have no version counter
        self.weights = [weight for weight in network.parameters() if not weight.is_inference()]
        self.budget = budget
        self.enabled = not network.config.recurrent  # a state has no places to cut it at
        self.lock = threading.RLock()
        self._forget()

    def load(self, tokens: Sequence[int], slots: KVSlots, row: int) -> int:
        """Copies the longest cached prefix of these tokens into a row; returns its length."""
        with self.lock:
            path = self._path(tokens)
            self._touch(path)
        if not path or slots.rings:
            return 0
        held = torch.cat([node.held for node in path if node.held is not None], dim=3)
        for target, found in zip((*slots.keys, *slots.values), held.flatten(0, 1), strict=True):
            target[row, :, : found.size(1)] = found
        return held.size(3)

    def cached_length(self, tokens: Sequence[int]) -> int:
        """The length of the prefix that `load` would copy."""
        with self.lock:
            return BLOCK_TOKENS * len(self._path(tokens))

    def store(self, tokens: Sequence[int], slots: KVSlots, row: int) -> None:
        """Stores the complete blocks of these tokens from a row of the cache."""
        if not self.enabled or slots.rings:
            return
        with self.lock:
            path = self._path(tokens)
            for start, block in list(_blocks(tokens))[len(path) :]:
                path.append(self._grow(path[-1] if path else self.root, block, slots, row, start))
            self._touch(path)
            self._evict()

    def _grow(
        self, parent: PrefixNode, block: tuple[int, ...], slots: KVSlots, row: int, start: int
    ) -> PrefixNode:
        at = slice(start, start + BLOCK_TOKENS)
        layers = [layer[row, :, at] for layer in (*slots.keys, *slots.values)]
        held = torch.stack(layers).unflatten(0, (2, -1))
        parent.children[block] = node = PrefixNode(block, parent, held)
        self.used += node.size
        return node

    def _path(self, tokens: Sequence[int]) -> list[PrefixNode]:
        if self.version != _version(self.weights):
            self._forget()
        path = []
        node = self.root
        for _, block in _blocks(tokens):
            found = node.children.get(block)
            if found is None:
                break
            path.append(node := found)
        return path

    def _touch(self, path: list[PrefixNode]) -> None:
        """From leaf to root: parents stay newer than children, so leaves are evicted first."""
        for node in reversed(path):
            self.order[node] = None
            self.order.move_to_end(node)

    def _evict(self) -> None:
        while self.used > self.budget:
            node, _ = self.order.popitem(last=False)
            self.used -= node.size
            if node.parent is not None:
                del node.parent.children[node.block]

    def _forget(self) -> None:
        self.root = PrefixNode(())
        self.used = 0
        self.order: OrderedDict[PrefixNode, None] = OrderedDict()
        self.version = _version(self.weights)


def _blocks(tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for start, end in pairwise(range(0, len(tokens) + 1, BLOCK_TOKENS)):
        yield start, tuple(tokens[start:end])


def _version(weights: Sequence[Tensor]) -> int:
    """Counts in-place changes of the weights: training invalidates the cache."""
    return sum(weight._version for weight in weights)
