"""Requests that compute on one model take turns, and what nobody waits for any more stops.

A request's work runs in a thread of its own, but only one of them computes at a time. Between two
layers it stops if its client has gone, and hands its turn to the next client if it has had its
share.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")
QUANTUM_SECONDS = 0.05  # of computing, after which others have their turn
MAX_BEGUN = 16  # requests begun and not finished: each holds the activations of a batch

_thread = threading.local()


class WorkCancelled(BaseException):
    """Nobody waits for this work. No `Exception`, like asyncio's own, so that nothing on the way
    up handles it.
    """


def checkpoint() -> None:
    """To be called between two parts of long work: the place where it may be stopped, or paused
    for others.
    """
    work: Work[Any] | None = getattr(_thread, "work", None)
    if work is not None:
        work.executor.checkpoint(work)


class Work(Generic[T]):
    """What one request has a model compute. Made in the event loop, which awaits its result."""

    def __init__(self, executor: "ModelExecutor", client: str, task: Callable[[], T]) -> None:
        self.executor = executor
        self.client = client
        self.task = task
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = self.loop.create_future()
        self.turn = threading.Event()
        self.turn_began = 0.0
        self.begun = False
        self.cancelled = False

    def compute(self) -> None:
        """In a thread of the executor."""
        _thread.work = self
        try:
            self._settle(self.result.set_result, self.task())
        except WorkCancelled:
            pass
        except BaseException as error:
            self._settle(self.result.set_exception, error)
        finally:
            _thread.work = None

    def fail(self, error: Exception) -> None:
        self._settle(self.result.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        def once() -> None:
            if not self.result.done():
                settle(value)

        with suppress(RuntimeError):  # a loop that is closed has nobody left to tell
            self.loop.call_soon_threadsafe(once)


class ModelExecutor:
    """Turns go round the clients, and within a client round its requests."""

    def __init__(self, name: str, blocks: nn.ModuleList) -> None:
        self.threads = ThreadPoolExecutor(MAX_BEGUN, f"malmoi-{name}")
        self.lock = threading.Lock()
        self.waiting: dict[str, deque[Work[Any]]] = {}  # by client, in the order of their turns
        self.running: Work[Any] | None = None
        self.begun: set[Work[Any]] = set()
        self.closed: Exception | None = None
        for block in blocks:  # whatever computes goes through these, and need not know of turns
            block.register_forward_pre_hook(lambda *_: checkpoint())

    async def run(self, client: str, task: Callable[[], T]) -> T:
        """What the task returns. Whoever stops waiting for it stops it."""
        work = Work(self, client, task)
        with self.lock:
            if self.closed is not None:
                raise self.closed
            self._enqueue(work)
            self._start_next()
        try:
            return await work.result
        finally:
            self.cancel(work)

    def cancel(self, work: Work[Any]) -> None:
        """Drops what has not begun; what has begun ends before its next layer."""
        work.cancelled = True
        with self.lock:
            if not work.begun and work in self.waiting.get(work.client, ()):
                self._dequeue(work)

    def checkpoint(self, work: Work[Any]) -> None:
        if not work.cancelled and monotonic() - work.turn_began >= QUANTUM_SECONDS:
            self._give_way(work)
        if work.cancelled:
            raise WorkCancelled

    def close(self, error: Exception) -> None:
        """Stops everything; whoever waits hears why."""
        with self.lock:
            self.closed = error
            queued = [work for works in self.waiting.values() for work in works]
            for work in {*queued, *self.begun}:
                work.cancelled = True
                work.fail(error)
            for work in queued:
                if not work.begun:
                    self._dequeue(work)
        self.threads.shutdown(wait=False)

    def _give_way(self, work: Work[Any]) -> None:
        with self.lock:
            self._enqueue(work)
            self.running = None
            self._start_next()
        work.turn.wait()
        work.turn.clear()

    # ------------------------------------------------------------------ with the lock held

    def _enqueue(self, work: Work[Any]) -> None:
        self.waiting.setdefault(work.client, deque()).append(work)

    def _dequeue(self, work: Work[Any]) -> None:
        """Its client goes behind the others."""
        works = self.waiting.pop(work.client)
        works.remove(work)
        if works:
            self.waiting[work.client] = works

    def _start_next(self) -> None:
        work = self._next() if self.running is None else None
        if work is None:
            return
        self._dequeue(work)
        self.running = work
        work.turn_began = monotonic()
        if work.begun:
            work.turn.set()
            return
        work.begun = True
        self.begun.add(work)
        self.threads.submit(self._compute, work)

    def _next(self) -> Work[Any] | None:
        room = len(self.begun) < MAX_BEGUN
        return next(
            (one for some in self.waiting.values() for one in some if one.begun or room), None
        )

    # ------------------------------------------------------------------ in a thread

    def _compute(self, work: Work[Any]) -> None:
        work.compute()
        with self.lock:
            self.begun.discard(work)
            self.running = None
            self._start_next()
