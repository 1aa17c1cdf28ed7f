"""Groups of what has the same key, and batches of some size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in their order."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def sized_batches(items: Iterable[V], size: Callable[[V], int], limit: int) -> Iterator[list[V]]:
    """The items in order, together until their sizes reach the limit."""
    batch: list[V] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= limit:
            yield batch
            batch = []
            total = 0
    if batch:
        yield batch
