"""One of the processes for HTTP that `--workers` starts: `python -m malmoi.server.worker`.

It reads, checks and encodes the requests that generate text, and writes their events; the tokens
come from the process that has the models, which also answers all other requests.
"""

import asyncio
import pickle
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from torch import nn

from malmoi.config import ModelConfig
from malmoi.errors import MalmoiError
from malmoi.inference import Model
from malmoi.inference.engine import Engine, GenerationJob, Owner, TextChunk, TokenStream
from malmoi.server.api import chat, completions
from malmoi.server.app import Server, create_app, lifespan
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import shutting_down, unless_disconnected
from malmoi.server.link import Link
from malmoi.server.middleware import Metrics, log_requests
from malmoi.server.model_registry import ModelRegistry, ServedModel

# what of an ASGI scope can be sent
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


class Outline(nn.Module):
    """In place of a network: what a request is checked against."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config


def without_weights(model: Model) -> Model:
    """A model that reads prompts and settings, and can be sent to another process."""
    outline: Any = Outline(model.config)
    return Model(replace(model.checkpoint, network=outline, source_config={}))


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is told at first."""

    models: Sequence[tuple[str, Model, Path, bool]]  # name, outline, folder, whether it generates
    aliases: Sequence[str]
    settings: ServeConfig
    access_log: bool


class RemoteStream(TokenStream):
    """A stream whose engine is in another process."""

    link: Link
    number: int
    accepted: asyncio.Future[None]

    def cancel(self) -> None:
        self.link.send("cancel", self.number)

    def settle(self, error: Exception | None) -> None:
        """Says whether the engine has taken the job."""
        if error is not None and not self.accepted.done():
            self.accepted.set_exception(error)
        elif not self.accepted.done():
            self.accepted.set_result(None)


class RemoteEngine(Engine):
    """An engine in another process: checks jobs here, and sends them there."""

    def __init__(self, name: str, model: Model, queue: int, upstream: "Upstream") -> None:
        self.name = name
        self.model = model
        self.queue = queue
        self.capacity = min(model.config.context, model.config.max_length)
        self.upstream = upstream

    def submit(
        self,
        job: GenerationJob,
        on_chunk: Callable[[TextChunk], None] | None = None,
        *,
        owner: Owner = (),
    ) -> TokenStream:
        self._check(job)
        stream = RemoteStream(job, self.model, self.capacity, owner, on_chunk)
        stream.link = self.upstream.link
        stream.number = self.upstream.add(stream)
        stream.accepted = asyncio.get_running_loop().create_future()
        stream.link.send("submit", stream.number, self.name, job, owner)
        return stream

    def close(self, *, drain: bool = True) -> None:
        """Ends what waits for it."""
        self.upstream.link.mailbox.loop.call_soon_threadsafe(self.upstream.fail)


class Upstream:
    """The process with the models: what was sent to it, and what it says."""

    def __init__(self, link_socket: socket.socket) -> None:
        self.socket = link_socket
        self.numbers = count()
        self.streams: dict[int, RemoteStream] = {}
        self.calls: dict[int, asyncio.Queue[Message | ApiError | str]] = {}
        self.server: WorkerServer

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.link = Link(*await asyncio.open_connection(sock=self.socket))
        self.link.send("ready")
        listening = asyncio.create_task(self._listen())
        async with lifespan(app):
            yield
        listening.cancel()

    def add(self, stream: RemoteStream) -> int:
        number = next(self.numbers)
        self.streams[number] = stream
        return number

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application that the other process runs."""
        number, body = next(self.numbers), (await receive()).get("body", b"")
        self.calls[number] = asyncio.Queue()
        sent = {name: scope[name] for name in SCOPE if name in scope}
        self.link.send("call", number, sent, body)
        try:
            await unless_disconnected(receive, self._answer(number, scope, send))
        except ApiError as error:
            if error.code != "gone":
                raise
        finally:
            del self.calls[number]
            self.link.send("gone", number)

    async def _answer(self, number: int, scope: Scope, send: Send) -> None:
        while not isinstance(said := await self.calls[number].get(), str):
            if isinstance(said, ApiError):
                raise said
            await send(said)
        scope["route"] = SimpleNamespace(path=said)

    async def _listen(self) -> None:
        await self.link.listen(self)
        self.server.lost = True
        self.server.stop(now=True)

    def fail(self) -> None:
        """Ends everything that waits for the other process."""
        for stream in self.streams.values():
            stream.settle(shutting_down())
            stream.put(TextChunk("", finish="cancelled"))
        self.streams.clear()
        for waiting in self.calls.values():
            waiting.put_nowait(shutting_down())

    # ------------------------------------------------------------------ what it says

    def on_accepted(self, number: int, error: MalmoiError | None) -> None:
        if number in self.streams:
            self.streams[number].settle(error)
        if error is not None:
            del self.streams[number]

    def on_chunk(
        self, number: int, admitted: float, error: MalmoiError | None, *parts: Any
    ) -> None:
        chunk = TextChunk(*parts)
        stream = self.streams[number] if chunk.finish is None else self.streams.pop(number)
        stream.admitted, stream.error = admitted, error
        stream.put(chunk)

    def on_said(self, number: int, message: Message | str) -> None:
        """A part of a call's answer; at last its route."""
        if number in self.calls:
            self.calls[number].put_nowait(message)

    def on_drain(self) -> None:
        self.server.stop()

    def on_halt(self) -> None:
        self.server.stop(now=True)


class WorkerServer(Server):
    """A server that the process with the models stops, and that tells it what it measured."""

    lost = False  # the process with the models is gone

    def __init__(self, app: FastAPI, settings: ServeConfig, upstream: Upstream) -> None:
        super().__init__(app, settings)
        self.upstream = upstream
        upstream.server = self

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Nothing: a signal to the whole group reaches the other process, which says what to do."""

    async def on_tick(self, counter: int) -> bool:
        metrics: Metrics = self.app.state.metrics
        if metrics.requests:
            self.upstream.link.send("metrics", metrics.taken())
        return await super().on_tick(counter)


def main() -> None:
    linked, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    start: WorkerStart = pickle.load(sys.stdin.buffer)  # noqa: S301  # from its parent
    if start.access_log:
        log_requests()
    upstream = Upstream(linked)
    queue = start.settings.queue
    registry = ModelRegistry(
        [
            ServedModel(n, model, RemoteEngine(n, model, queue, upstream) if writes else None, path)
            for n, model, path, writes in start.models
        ],
        start.aliases,
    )
    app = create_app(registry, start.settings, (completions, chat))
    app.router.lifespan_context = upstream.lifespan
    app.router.default = app.state.forward = upstream.call
    server = WorkerServer(app, start.settings, upstream)
    server.run(sockets=[listening])
    sys.exit(server.lost)
