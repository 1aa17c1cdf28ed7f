"""The application of the API, its routes, middleware and error handlers; the HTTP server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from malmoi import __version__
from malmoi.errors import MalmoiError
from malmoi.messages import logger, plural
from malmoi.server import error_replies
from malmoi.server.api import chat, completions, embeddings, predictions, service
from malmoi.server.config import ServeConfig
from malmoi.server.executor import ModelExecutor, receive_chunks
from malmoi.server.link import Mailbox
from malmoi.server.middleware import Metrics, RequestGuard, ServerState
from malmoi.server.model_registry import ModelRegistry

API = (service, completions, chat, embeddings, predictions)
# seconds in which connected clients still get a response
LINGER_SECONDS = 0.3
# seconds; longer than clients and proxies, so that none sends into a closing connection
KEEP_ALIVE = 75
FORCED_EXIT_SECONDS = 5  # seconds after which work that cannot be cancelled is abandoned
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": error_replies.ErrorReply, "description": meaning}
    for status, meaning in {
        "400": "The request is invalid; the message says where.",
        "401": "The API key is missing or wrong.",
        "404": "There is no such model or address.",
        "413": "The body is too large.",
        "429": "Too many requests; try again after Retry-After seconds.",
        "500": "The request failed.",
        "503": "The server is shutting down.",
        "504": "The request timed out.",
        "default": "Another error.",
    }.items()
}


def create_app(
    registry: ModelRegistry,
    settings: ServeConfig,
    parts: Sequence[ModuleType] = API,
    *,
    guarded: bool = True,
) -> FastAPI:
    """An app that serves these models; its lifespan closes them.

    `parts`: less than all in a worker, which forwards the rest to an app that need not be guarded.
    """
    app = FastAPI(
        title="Malmoi",
        version=__version__,
        summary="BERT and GPT over HTTP: OpenAI's API, and endpoints for encoders.",
        docs_url=None,  # FastAPI's pages load scripts from other hosts; ours is in service.py
        redoc_url=None,
        openapi_url="/openapi.json" if parts is API else None,
        responses=REFUSALS,
        lifespan=lifespan,
    )
    app.state.registry, app.state.settings = registry, settings
    app.state.metrics, app.state.gate = Metrics(), ServerState()
    app.state.forward = None
    app.state.work = {
        one.name: ModelExecutor(one.name, one.model.network.trunk.blocks, settings)
        for one in registry
        if parts is API
    }
    error_replies.install(app)
    for part in parts:
        app.include_router(part.router)
    if not guarded:
        return app
    app.add_middleware(
        RequestGuard, state=app.state.gate, settings=settings, metrics=app.state.metrics
    )
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=5)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends a dozen custom headers
            expose_headers=["X-Request-Id"],
        )
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.arrived = Mailbox(receive_chunks)
    yield
    cancel_all(app)


def cancel_all(app: FastAPI) -> None:
    """Cancels all work and stops every engine."""
    for executor in app.state.work.values():
        executor.close()
    app.state.registry.close()


class Server(uvicorn.Server):
    """uvicorn, but the first signal drains requests and a second one cancels them."""

    def __init__(self, app: FastAPI, settings: ServeConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="debug" if settings.log_level == "debug" else "warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=FORCED_EXIT_SECONDS,
                timeout_keep_alive=KEEP_ALIVE,
                lifespan="on",
            )
        )
        self.app = app
        self.state: ServerState = app.state.gate
        self.settings = settings
        self.deadline = float("inf")
        self.silent: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self.stop(now=self.state.stopping)

    @property
    def unfinished(self) -> int:
        """How many requests a stop waits for."""
        return self.state.in_flight

    def stop(self, *, now: bool = False) -> None:
        """Stops accepting and exits once all requests are done; `now` cancels them."""
        if self.unfinished and not now:
            logger.info(
                "Finishing {requests} first, for at most {seconds:g} s; Ctrl-C again stops at "
                "once.",
                requests=plural(self.unfinished, "request"),
                seconds=self.settings.timeout,
            )
        self.state.stopping = True
        self.deadline = min(self.deadline, monotonic() + (0 if now else self.settings.timeout))

    async def on_tick(self, counter: int) -> bool:
        self._hang_up()
        if self.state.stopping and not self.state.in_flight:
            self.should_exit = True
        elif monotonic() > self.deadline:
            await asyncio.to_thread(cancel_all, self.app)
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(LINGER_SECONDS)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """Closes connections that send nothing, or too slowly: uvicorn would wait for ever."""
        for connection in list(self.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                self.silent.pop(connection, None)
            elif (
                monotonic() - self.silent.setdefault(connection, monotonic())
                > self.settings.body_timeout
            ):
                connection.transport.close()


def listen(settings: ServeConfig) -> socket.socket:
    """Opens the socket to serve on."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise MalmoiError(
            "The server cannot listen on {host}:{port}: {strerror}. Choose another --port (0 "
            "takes any that is free) or --host.",
            host=settings.host,
            port=settings.port,
            strerror=error.strerror or error,
        ) from None


def address(where: socket.socket) -> str:
    """The URL that reaches a socket."""
    host, port = where.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
