"""Long work off the event loop: one executor per model, with a bounded queue."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import HTTPConnection
from starlette.types import Receive

from malmoi.inference.engine import QueueFull
from malmoi.server.config import ServeConfig
from malmoi.server.errors import ApiError
from malmoi.server.executor import ModelExecutor
from malmoi.server.registry import Registry, ServedModel

Returned = TypeVar("Returned")


class ModelExecutors:
    """An executor for each model: what a model keeps between calls needs no lock of its own."""

    def __init__(self, registry: Registry, settings: ServeConfig) -> None:
        self.settings = settings
        self.executors = {
            one.name: ModelExecutor(one.name, one.model.network.trunk.blocks) for one in registry
        }
        self.waiting = dict.fromkeys(registry.names, 0)

    async def run(self, served: ServedModel, client: str, task: Callable[[], Returned]) -> Returned:
        """What the task returns; `Busy` where too many wait, an error where it takes too long."""
        if self.waiting[served.name] >= self.settings.queue:
            raise QueueFull(f"{self.settings.queue} requests are waiting already; try again later.")
        self.waiting[served.name] += 1
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await self.executors[served.name].run(client, task)
        except TimeoutError:
            raise too_late(self.settings.timeout) from None
        finally:
            self.waiting[served.name] -= 1

    def close(self) -> None:
        for desk in self.executors.values():
            desk.close(
                ApiError(503, "The server is stopping and could not finish this.", code="stopping")
            )


def client_of(request: HTTPConnection) -> str:
    """Who asks, for sharing a model fairly: the machine that a request comes from."""
    return request.client.host if request.client is not None else ""


def too_late(seconds: float) -> ApiError:
    return ApiError(
        504, f"The request took longer than {seconds:g} seconds and was given up.", code="timeout"
    )


async def unless_disconnected(receive: Receive, work: Awaitable[Returned]) -> Returned:
    """What the work gives, unless the client goes away first: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ApiError(499, "The client went away, or asked for something else.", code="gone")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_in_thread(task: Callable[[], Returned]) -> Returned:
    """Does something short but not instant, such as cutting a long text into tokens, in a
    thread.
    """
    return await asyncio.to_thread(task)
