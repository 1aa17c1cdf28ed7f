"""A background thread that fills a bounded queue and forwards its exceptions."""

from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

Prepared = TypeVar("Prepared")
_POLL = 0.1  # seconds between checks of the stop flag while blocked


class Background(Generic[Prepared]):
    """Iterates `source` in a thread, at most `ahead` items ahead; close it, or use `with`."""

    def __init__(self, source: Iterable[Prepared], ahead: int = 2):
        self._queue: Queue[tuple[str, object]] = Queue(maxsize=ahead)
        self._stop = Event()
        self._ended = False
        self._thread = Thread(
            target=self._work, args=(iter(source),), name="malmoi-data", daemon=True
        )
        self._thread.start()

    def _work(self, items: Iterator[Prepared]) -> None:
        try:
            for item in items:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as error:  # any exception must reach the consumer
            self._put("error", error)

    def _put(self, kind: str, value: object) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put((kind, value), timeout=_POLL)
                return True
            except Full:
                continue
        return False

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        if self._ended or self._stop.is_set():
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "item":
            return value  # type: ignore[return-value]
        self._ended = True
        if isinstance(value, BaseException):
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stops the thread and waits for it; items already prepared are dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except Empty:
                self._thread.join(_POLL)

    def __enter__(self) -> "Background[Prepared]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
