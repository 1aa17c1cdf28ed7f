"""Work that takes long, done beside the event loop so that it never waits: one thread a model, and a bound."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from malmoi.infer.engine import Busy
from malmoi.serve.errors import ApiError
from malmoi.serve.registry import Registry, Served
from malmoi.serve.settings import ServeConfig

T = TypeVar("T")


class Workshop:
    """A desk for each model, with one worker: what a model keeps between calls needs no lock of its own."""

    def __init__(self, registry: Registry, settings: ServeConfig) -> None:
        self.settings = settings
        self.desks = {name: ThreadPoolExecutor(1, f"malmoi-{name}") for name in registry.names}
        self.waiting = dict.fromkeys(registry.names, 0)

    async def do(self, served: Served, task: Callable[[], T]) -> T:
        """What the task returns; `Busy` where too many wait, an error where it takes too long."""
        if self.waiting[served.name] >= self.settings.queue:
            raise Busy(f"{self.settings.queue} requests are waiting already; try again later.")
        self.waiting[served.name] += 1
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await asyncio.get_running_loop().run_in_executor(self.desks[served.name], task)
        except TimeoutError:
            raise too_late(self.settings.timeout) from None
        finally:
            self.waiting[served.name] -= 1

    def close(self) -> None:
        for desk in self.desks.values():
            desk.shutdown(wait=False, cancel_futures=True)


def too_late(seconds: float) -> ApiError:
    return ApiError(504, f"The request took longer than {seconds:g} seconds and was given up.", code="timeout")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What the work gives, unless the client goes away first: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ApiError(499, "The client went away.", code="gone")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def aside(task: Callable[[], T]) -> T:
    """Does something short but not instant, such as cutting a long text into tokens, in a thread."""
    return await asyncio.to_thread(task)
