"""The HTTP server and its graceful shutdown."""

import asyncio
import socket
from time import monotonic
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI

from malmoi.errors import MalmoiError
from malmoi.server.config import ServeConfig
from malmoi.server.executor import ModelExecutors
from malmoi.server.middleware import ServerState
from malmoi.server.model_registry import ModelRegistry

# seconds in which connected clients still get a response
LINGER_SECONDS = 0.3
# seconds; longer than clients and proxies, so that none sends into a closing connection
KEEP_ALIVE = 75
FORCED_EXIT_SECONDS = 5  # seconds after which work that cannot be cancelled is abandoned


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
        self.state: ServerState = app.state.gate
        self.registry: ModelRegistry = app.state.registry
        self.work: ModelExecutors = app.state.work
        self.settings = settings
        self.deadline = float("inf")
        self.silent: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self.stop(now=self.state.stopping)

    def stop(self, *, now: bool = False) -> None:
        """Stops accepting and exits once all requests are done; `now` cancels them."""
        self.state.stopping = True
        self.deadline = min(self.deadline, monotonic() + (0 if now else self.settings.timeout))

    async def on_tick(self, counter: int) -> bool:
        self._hang_up()
        if self.state.stopping and not self.state.in_flight:
            self.should_exit = True
        elif monotonic() > self.deadline:
            self.work.close()
            await asyncio.to_thread(self.registry.close, drain=False)
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
            else:
                since = self.silent.setdefault(connection, monotonic())
                if monotonic() - since > self.settings.body_timeout:
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
