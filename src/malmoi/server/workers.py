"""`malmoi serve --workers`: processes for HTTP beside this one, which keeps the models.

Reading a request, checking it and writing its events takes longer than generating its tokens on a
fast GPU, and Python runs one thread at a time. So processes that share the socket do that.
"""

import asyncio
import pickle
import socket
import sys
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Scope

from malmoi.errors import MalmoiError, ensure
from malmoi.inference.engine import GenerationJob, Owner, TextChunk, TokenStream
from malmoi.messages import StatusLog
from malmoi.server.app import Server
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import log
from malmoi.server.link import Link
from malmoi.server.middleware import Metrics, access, replay
from malmoi.server.model_registry import ModelRegistry
from malmoi.server.worker import WorkerStart, without_weights
from malmoi.system.machine import this_machine

START = "from malmoi.server.worker import main; main()"
logger = StatusLog(__name__)


def default_workers(registry: ModelRegistry) -> int:
    """As many as pay off: none where the models compute on the processor."""
    on_gpu = any(one.engine and one.model.network.device.type == "cuda" for one in registry)
    return min(4, this_machine().cores // 4) if on_gpu and sys.platform != "win32" else 0


class Worker:
    """A process for HTTP, and what it asked for."""

    def __init__(self, server: "MultiServer", number: int) -> None:
        self.server = server
        self.number = number
        self.link: Link | None = None
        self.ready = False
        self.streams: dict[int, TokenStream] = {}
        self.calls: dict[int, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    async def run(self) -> int:
        """Its exit code, once it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            given = (theirs.fileno(), self.server.where.fileno())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", START, *map(str, given)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=given,
                start_new_session=True,  # so that a terminal's ^C does not reach it
            )
        self.link = Link(*await asyncio.open_connection(sock=ours))
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(self.server.worker_start()))
        process.stdin.close()
        if self.server.state.stopping:
            self.on_ready()
        await self.link.listen(self)
        for stream in self.streams.values():
            stream.cancel()
        for gone, _ in self.calls.values():
            gone.set()
        return await process.wait()

    def send(self, name: str, *values: Any) -> None:
        if self.link is not None:
            self.link.send(name, *values)

    async def _call(self, number: int, scope: Scope, body: bytes, gone: asyncio.Event) -> None:
        async def disconnected() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.send("said", number, message)

        try:
            await self.server.app(scope, replay(body, disconnected), send)
        except Exception as error:  # answered, but not logged
            log(error)
        self.send("said", number, str(getattr(scope.get("route"), "path", "other")))
        del self.calls[number]

    def _chunk(self, number: int, chunk: TextChunk) -> None:
        """In the engine's thread."""
        stream = self.streams[number] if chunk.finish is None else self.streams.pop(number)
        parts = (chunk.text, chunk.tokens, chunk.logprobs, chunk.finish)
        self.send("chunk", number, stream.admitted, stream.error, *parts)

    # ------------------------------------------------------------------ what it says

    def on_ready(self) -> None:
        self.ready = True
        if self.server.state.stopping:
            self.send("halt")

    def on_submit(self, number: int, name: str, job: GenerationJob, owner: Owner) -> None:
        engine = self.server.registry.get(name).writer
        host, *request = owner
        try:
            with engine.changed:  # no chunk may come before its stream is known
                self.streams[number] = engine.submit(
                    job, partial(self._chunk, number), owner=(host, (self.number, *request))
                )
        except MalmoiError as error:
            self.send("accepted", number, error)
        else:
            self.send("accepted", number, None)

    def on_cancel(self, number: int) -> None:
        if (stream := self.streams.get(number)) is not None:
            stream.cancel()

    def on_call(self, number: int, scope: Scope, body: bytes) -> None:
        gone = asyncio.Event()
        self.calls[number] = gone, asyncio.create_task(self._call(number, scope, body, gone))

    def on_gone(self, number: int) -> None:
        if number in self.calls:
            self.calls[number][0].set()

    def on_metrics(self, metrics: Metrics) -> None:
        self.server.app.state.metrics.add(metrics)


class MultiServer(Server):
    """A server without a socket of its own: its workers have it."""

    def __init__(
        self, app: FastAPI, settings: ServeConfig, where: socket.socket, count: int
    ) -> None:
        super().__init__(app, settings)
        self.registry: ModelRegistry = app.state.registry
        self.where = where
        self.workers = [Worker(self, number) for number in range(count)]

    def worker_start(self) -> WorkerStart:
        models = [
            (one.name, without_weights(one.model), one.path, one.engine is not None)
            for one in self.registry
        ]
        aliases = list(self.registry.names)[len(models) :]
        return WorkerStart(models, aliases, self.settings, bool(access.handlers))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.running = [asyncio.create_task(self._keep(worker)) for worker in self.workers]

    async def _keep(self, worker: Worker) -> None:
        while not self.state.stopping:
            code = await worker.run()
            sentence = "A process for HTTP could not start: it ended with {code}."
            ensure(worker.ready, sentence, code=code)
            if not self.state.stopping:
                logger.warning("A process for HTTP ended with {code}; another starts.", code=code)

    def stop(self, *, now: bool = False) -> None:
        super().stop(now=now)
        for worker in self.workers:
            worker.send("halt" if now else "drain")

    async def on_tick(self, counter: int) -> bool:
        ended = [task for task in self.running if task.done()]
        for task in ended:
            task.result()
        return len(ended) == len(self.running)
