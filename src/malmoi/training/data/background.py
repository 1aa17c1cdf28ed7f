"""Work ahead in a thread."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Prepared = TypeVar("Prepared")
END: Any = object()


@contextmanager
def prefetched(source: Iterable[Prepared], ahead: int = 2) -> Iterator[Iterator[Prepared]]:
    """Iterates `source` in a thread, at most `ahead` items ahead; its errors are raised here."""
    items = iter(source)
    with ThreadPoolExecutor(1, "malmoi-data") as thread:
        coming = deque(thread.submit(next, items, END) for _ in range(ahead))

        def arriving() -> Iterator[Prepared]:
            while (item := coming.popleft().result()) is not END:
                coming.append(thread.submit(next, items, END))
                yield item

        try:
            yield arriving()
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
