"""`malmoi serve --workers`: processes for HTTP beside the one that has the models.

Reading a request, checking it and writing its events takes longer than a fast GPU takes for its
tokens, and a process runs one thread of Python at a time. So workers, which share the server's
socket, do that for requests that generate text; all others they hand on as they are.
"""

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from torch import nn

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError, ensure
from malmoi.inference import Model
from malmoi.inference.engine import Engine, GenerationJob, Owner, TextChunk, TokenStream
from malmoi.server.api import chat, completions
from malmoi.server.app import Server, create_app
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import ApiError, ClientGone, log
from malmoi.server.executor import shutting_down, unless_disconnected
from malmoi.server.link import Link
from malmoi.server.middleware import Metrics, access, log_requests, replay
from malmoi.server.model_registry import ModelRegistry, ServedModel
from malmoi.system.machine import this_machine

MOST_WORKERS = 4  # unless asked for more
START = "from malmoi.server.workers import main; main()"
# what of an ASGI scope can be sent
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


def default_workers(registry: ModelRegistry) -> int:
    """As many as pay off: none where the models compute on the processor."""
    on_gpu = any(one.engine and one.model.network.device.type == "cuda" for one in registry)
    workers = min(MOST_WORKERS, this_machine().cores // 4)
    return workers if on_gpu and sys.platform != "win32" else 0


# ------------------------------------------------------------------ in the server


@dataclass
class Worker:
    """A process for HTTP, and what it asked for."""

    server: "MultiServer"
    number: int
    ready: bool = False  # to read what is sent to it, after seconds of starting
    streams: dict[int, TokenStream] = field(default_factory=dict)
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        files = (theirs.fileno(), self.server.where.fileno())
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, *map(str, files)),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=files,
            start_new_session=True,  # so that a terminal's ^C does not reach it
        )
        theirs.close()
        self.link = Link(*await asyncio.open_connection(sock=ours))
        assert self.process.stdin is not None
        self.process.stdin.write(self.server.outline)
        self.process.stdin.close()

    async def run(self) -> None:
        """Does what it asks for until it ends."""
        await self.link.listen(self)
        for stream in list(self.streams.values()):  # the engine's thread takes some out
            stream.cancel()
        for call in self.calls.values():
            call.cancel()
        code = await self.process.wait()
        ensure(
            self.server.state.stopping,
            "A process for HTTP ended with code {code}, and the server with it: start it again, "
            "or without such processes (--workers 0).",
            code=code,
        )

    def on_ready(self) -> None:
        self.ready = True

    def on_submit(self, number: int, name: str, job: GenerationJob, owner: Owner) -> None:
        engine = self.server.registry.get(name).writer
        host, *request = owner
        whose = (host, (self.number, *request))
        try:
            with engine.changed:  # no chunk may come before its stream is known
                self.streams[number] = engine.submit(
                    job, partial(self._chunk, number), owner=whose, text=not job.ends_by_tokens
                )
        except MalmoiError as error:
            self.link.send("chunk", number, 0.0, error, "", (), (), "error")
        else:
            self.link.send("chunk", number, 0.0, None, "")

    def _chunk(self, number: int, chunk: TextChunk) -> None:
        """In the engine's thread."""
        stream = self.streams[number] if chunk.finish is None else self.streams.pop(number)
        parts = (chunk.text, chunk.tokens, chunk.logprobs, chunk.finish)
        self.link.send("chunk", number, stream.admitted, stream.error, *parts)

    def on_cancel(self, number: int) -> None:
        if number in self.streams:
            self.streams[number].cancel()

    def on_call(self, number: int, scope: Scope, body: bytes) -> None:
        call = self.calls[number] = asyncio.create_task(self._call(number, scope, body))
        call.add_done_callback(lambda _: self.calls.pop(number))

    async def _call(self, number: int, scope: Scope, body: bytes) -> None:
        async def send(message: Message) -> None:
            self.link.send("answer", number, message)

        try:
            await self.server.app(scope, replay(body, asyncio.Future), send)
        except Exception as error:  # which was answered
            log(error)
        self.link.send("answer", number, str(getattr(scope.get("route"), "path", "other")))

    def on_gone(self, number: int) -> None:
        if number in self.calls:
            self.calls[number].cancel()

    def on_metrics(self, metrics: Metrics) -> None:
        self.server.app.state.metrics.add(metrics)


class MultiServer(Server):
    """A server whose workers have its socket."""

    def __init__(
        self, app: FastAPI, settings: ServeConfig, where: socket.socket, workers: int
    ) -> None:
        super().__init__(app, settings)
        self.registry: ModelRegistry = app.state.registry
        self.where = where
        self.outline = pickle.dumps((outlined(self.registry), settings, bool(access.handlers)))
        self.count = workers
        self.workers: list[Worker] = []
        self.running: list[asyncio.Task[None]] = []

    @property
    def unfinished(self) -> int:
        return sum(len(worker.streams) + len(worker.calls) for worker in self.workers)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        for task in self.running:  # the others were cancelled
            if not task.cancelled():
                task.result()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for number in range(self.count):
            worker = Worker(self, number)
            await worker.start()
            self.workers.append(worker)
        if self.state.stopping:  # by a signal meanwhile
            self.stop()
        self.running = [asyncio.create_task(worker.run()) for worker in self.workers]

    def stop(self, *, now: bool = False) -> None:
        super().stop(now=now)
        for worker in self.workers:
            if worker.ready:
                worker.link.send("stop")
            elif worker.process.returncode is None:  # it has no requests yet
                worker.process.kill()

    async def on_tick(self, counter: int) -> bool:
        """Whether all workers have ended, or one by itself."""
        ended = [task for task in self.running if task.done()]
        return len(ended) == len(self.running) or any(task.exception() for task in ended)


# ------------------------------------------------------------------ in a worker


class Outline(nn.Module):
    """In place of a network: what a request is checked against."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config


class RemoteStream(TokenStream):
    """A job of an engine in another process."""

    cancel_remote: Callable[[], None]

    def cancel(self) -> None:
        self.cancel_remote()


class RemoteEngine(Engine):
    """An engine in another process: jobs are made and checked here, and generated there."""

    server: "WorkerServer"

    def __init__(self, name: str, model: Model, engine: Engine) -> None:
        self.name = name
        self.model = model
        self.queue = engine.queue
        self.capacity = engine.capacity

    def submit(
        self,
        job: GenerationJob,
        on_chunk: Callable[[TextChunk], None] | None = None,
        *,
        owner: Owner = (),
        text: bool = True,
    ) -> TokenStream:
        self._check(job)
        stream = RemoteStream(job, self.model, self.capacity, owner, on_chunk)
        number = next(self.server.numbers)
        stream.cancel_remote = partial(self.server.link.send, "cancel", number)
        self.server.streams[number] = stream
        self.server.link.send("submit", number, self.name, job, owner)
        return stream

    def close(self, *, drain: bool = True) -> None:
        """Ends what waits for it."""
        self.server.link.mailbox.loop.call_soon_threadsafe(self.server.fail)


def outlined(registry: ModelRegistry) -> ModelRegistry:
    """What a worker gets of the models: all but their weights."""
    found = []
    for one in registry:
        outline: Any = Outline(one.model.config)
        model = Model(replace(one.model.checkpoint, network=outline))
        engine = one.engine and RemoteEngine(one.name, model, one.engine)
        found.append(ServedModel(one.name, model, engine, one.path))
    return ModelRegistry(found, [*registry.names][len(found) :])


class WorkerServer(Server):
    """The server of a worker, and what it waits for from the process with the models."""

    def __init__(self, app: FastAPI, settings: ServeConfig, other: socket.socket) -> None:
        super().__init__(app, settings)
        self.other = other
        self.lost = False  # the other process
        self.numbers = count()
        self.streams: dict[int, RemoteStream] = {}
        self.calls: dict[int, asyncio.Queue[Message | ApiError | str]] = {}
        app.router.default = app.state.forward = self.call

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.link = Link(*await asyncio.open_connection(sock=self.other))
        self.listening = asyncio.create_task(self._listen())
        self.link.send("ready")
        await super().startup(sockets)

    async def _listen(self) -> None:
        await self.link.listen(self)
        self.lost = True
        self.stop(now=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Nothing: the other process gets the signals, and says what to do."""

    async def on_tick(self, counter: int) -> bool:
        self._send_metrics()
        return await super().on_tick(counter)

    def _send_metrics(self) -> None:
        metrics: Metrics = self.app.state.metrics
        if metrics.requests:
            self.link.send("metrics", metrics.taken())

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application: the other process's."""
        self._send_metrics()  # before it is asked for them
        number, body = next(self.numbers), (await receive())["body"]
        self.calls[number] = asyncio.Queue()
        self.link.send("call", number, {name: scope[name] for name in SCOPE}, body)
        try:
            with suppress(ClientGone):
                await unless_disconnected(receive, self._answer(number, scope, send))
        finally:
            del self.calls[number]
            self.link.send("gone", number)

    async def _answer(self, number: int, scope: Scope, send: Send) -> None:
        while not isinstance(part := await self.calls[number].get(), str):
            if isinstance(part, ApiError):
                raise part
            await send(part)
        scope["route"] = SimpleNamespace(path=part)

    def fail(self) -> None:
        """Ends all that waits for the other process."""
        for stream in self.streams.values():
            stream.put(TextChunk("", finish="cancelled"))
        for waiting in self.calls.values():
            waiting.put_nowait(shutting_down())

    def on_chunk(
        self, number: int, admitted: float, error: MalmoiError | None, *parts: Any
    ) -> None:
        chunk = TextChunk(*parts)
        stream = self.streams[number] if chunk.finish is None else self.streams.pop(number)
        stream.admitted, stream.error = admitted, error
        if stream.job.ends_by_tokens:  # the other process has more to do
            chunk = replace(chunk, text=stream.writer.push_all(chunk.tokens, None)[0])
        stream.put(chunk)

    def on_answer(self, number: int, part: Message | str) -> None:
        """A part of what was called for; at last its route."""
        if number in self.calls:
            self.calls[number].put_nowait(part)

    def on_stop(self) -> None:
        self.stop(now=self.state.stopping)


def main() -> None:
    other, where = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    try:
        registry, settings, logs = pickle.load(sys.stdin.buffer)  # noqa: S301  # of its parent
    except (EOFError, pickle.UnpicklingError):  # which ended before it had said all
        sys.exit(1)
    if logs:
        log_requests()
    server = WorkerServer(create_app(registry, settings, (completions, chat)), settings, other)
    for one in registry:
        if one.engine is not None:
            one.engine.server = server
    server.run(sockets=[where])
    os._exit(server.lost)  # taking torch apart takes half a second
