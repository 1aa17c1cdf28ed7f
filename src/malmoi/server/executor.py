"""Model work off the event loop: one executor per model, with a bounded queue.

Each request runs in its own thread, but only one thread computes at a time. Between two layers a
request stops if its client has disconnected, and yields to the next client once its time slice is
used up.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar

from fastapi import Request
from starlette.types import Receive
from torch import nn

from malmoi.inference.engine import QueueFull
from malmoi.messages import msg
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import ApiError
from malmoi.server.model_registry import ModelRegistry, ServedModel

T = TypeVar("T")
MAX_BEGUN = 16  # started and unfinished requests: each holds the activations of a batch

_thread = threading.local()


class WorkCancelled(BaseException):
    """The work was cancelled. A BaseException, like asyncio's, so that handlers do not catch it."""


def checkpoint() -> None:
    """Called between two parts of long work, where it may be cancelled or paused for others."""
    work: Work[Any] | None = getattr(_thread, "work", None)
    if work is not None:
        work.executor.checkpoint(work)


class Work(Generic[T]):
    """One request's work on a model, created by the event loop, which awaits its result."""

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
        """Runs in a thread of the executor."""
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

        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(once)


class ModelExecutor:
    """Round-robin over clients, and over the requests of a client."""

    def __init__(self, name: str, blocks: nn.ModuleList, time_slice: float = 0.0) -> None:
        self.time_slice = time_slice
        self.threads = ThreadPoolExecutor(MAX_BEGUN, f"malmoi-{name}")
        self.lock = threading.Lock()
        self.waiting: dict[str, deque[Work[Any]]] = {}  # by client, in the order of their turns
        self.running: Work[Any] | None = None
        self.begun: set[Work[Any]] = set()
        self.closed: Exception | None = None
        for block in blocks:  # every forward pass yields here
            block.register_forward_pre_hook(lambda *_: checkpoint())

    async def run(self, client: str, task: Callable[[], T]) -> T:
        """The task's result; cancelling the caller cancels the task."""
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
        """Drops work that has not started; work that has stops before its next layer."""
        work.cancelled = True
        with self.lock:
            if not work.begun and work in self.waiting.get(work.client, ()):
                self._dequeue(work)

    def checkpoint(self, work: Work[Any]) -> None:
        if not work.cancelled and monotonic() - work.turn_began >= self.time_slice:
            self._give_way(work)
        if work.cancelled:
            raise WorkCancelled

    def close(self, error: Exception) -> None:
        """Cancels everything; waiting callers get the error."""
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
        """The next task; its client goes to the end of the queue."""
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


class ModelExecutors:
    """One executor per model, so state that a model keeps between calls needs no lock."""

    def __init__(self, registry: ModelRegistry, settings: ServeConfig) -> None:
        self.settings = settings
        self.executors = {
            one.name: ModelExecutor(one.name, one.model.network.trunk.blocks, settings.time_slice)
            for one in registry
        }
        self.waiting = dict.fromkeys((one.name for one in registry), 0)

    async def run(self, served: ServedModel, client: str, task: Callable[[], T]) -> T:
        """The task's result; raises `QueueFull` when too many wait, ApiError 504 on a timeout."""
        if self.waiting[served.name] >= self.settings.queue:
            raise QueueFull(
                "{queue} requests are waiting already; try again later.", queue=self.settings.queue
            )
        self.waiting[served.name] += 1
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await self.executors[served.name].run(client, task)
        except TimeoutError:
            raise timed_out(self.settings.timeout) from None
        finally:
            self.waiting[served.name] -= 1

    def close(self) -> None:
        for executor in self.executors.values():
            executor.close(shutting_down())


# ------------------------------------------------------------------ for the routes


async def run_on_model(request: Request, served: ServedModel, task: Callable[[], T]) -> T:
    """Runs a task on a model, fairly between clients, until the client disconnects."""
    work = request.app.state.work.run(served, client_of(request), task)
    return await unless_disconnected(request.receive, work)


def client_of(request: Request) -> str:
    """The client's host, between which a model's time is shared fairly."""
    return request.client.host if request.client is not None else ""


def timed_out(seconds: float) -> ApiError:
    sentence = msg(
        "The request took longer than {seconds:g} seconds and was cancelled.", seconds=seconds
    )
    return ApiError(504, sentence, code="timeout")


def shutting_down() -> ApiError:
    return ApiError(503, "The server shut down before this finished.", code="stopping")


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits the work, and cancels it if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ApiError(499, "The client disconnected or sent a newer request.", code="gone")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
