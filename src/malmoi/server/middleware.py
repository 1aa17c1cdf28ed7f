"""Request middleware: authentication, size limits, and the number of requests in flight."""

import asyncio
import json
import logging
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from hmac import compare_digest
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from malmoi.server import tabs
from malmoi.server.config import ServeConfig, is_local
from malmoi.server.errors import ApiError
from malmoi.server.metrics import Metrics

MAX_CONNECTIONS = 1024  # requests inside at once
BODY_TIMEOUT_SECONDS = 30.0  # seconds that a body may take to come
# bytes read of a body that is too large, so that its sender comes to read the answer
MAX_DRAINED_BYTES = 64 * 2**20
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# what needs the key; the page itself holds nothing of a model
AUTHENTICATED_PREFIXES = ("/v1", "/studio", "/metrics")


@dataclass
class ServerState:
    """How many requests are in flight, and whether the server accepts more."""

    in_flight: int = 0
    stopping: bool = False


access = logging.getLogger("malmoi.access")
access.propagate = False  # a line for each request is only for a handler of its own


class _Gone(Exception):
    """The client went away before it had said what it wants."""


class RequestGuard:
    """ASGI middleware that admits requests or rejects them."""

    def __init__(
        self, app: ASGIApp, gate: ServerState, settings: ServeConfig, metrics: Metrics
    ) -> None:
        self.app = app
        self.state = gate
        self.settings = settings
        self.metrics = metrics
        self.tabs = tabs.Tabs()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = StatusRecorder(send, self.state, _request_id(scope))
        start = perf_counter()
        self.state.in_flight += 1
        try:
            await self._admit(scope, receive, seen)
        finally:
            self.state.in_flight -= 1
            seconds = perf_counter() - start
            self.metrics.request(_address(scope), seen.status, seconds)
            access.info(
                "%s %s %d %.3fs %s",
                _host_of(scope),
                _line(scope),
                seen.status,
                seconds,
                seen.request_id,
            )

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            body = await self._body(Headers(scope=scope), receive)
            _check_text(body)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except _Gone:
            return
        else:
            with self.tabs.following(Headers(scope=scope).get(tabs.HEADER, ""), receive) as heard:
                await self.app(scope, _again(body, heard), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self.state.stopping:
            raise ApiError(
                503, "The server is stopping and takes no more requests.", code="stopping"
            )
        if self.state.in_flight > MAX_CONNECTIONS:
            raise ApiError(
                429,
                f"{MAX_CONNECTIONS} requests are being served already; try again later.",
                code="busy",
            )
        if self.settings.api_key is not None:
            if scope["path"].startswith(AUTHENTICATED_PREFIXES) and not self._has_key(headers):
                raise ApiError(
                    401,
                    "The API key is missing or wrong: send Authorization: Bearer KEY.",
                    code="no_key",
                )
        elif self.settings.local and not is_local(_host(headers)):
            # a page of another site may have made its own name mean this machine (DNS rebinding)
            raise ApiError(
                403,
                "This server answers only to localhost; give it an --api-key to be reached by a "
                "name.",
            )

    def _has_key(self, headers: Headers) -> bool:
        given = headers.get("authorization", "")
        key = self.settings.api_key or ""
        return compare_digest(given.encode("latin-1", "replace"), f"Bearer {key}".encode())

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """All of the body, if it is small and soon enough."""
        announced = headers.get("content-length", "0")
        left = self.settings.max_body - (
            int(announced) if announced.isdigit() and len(announced) < 20 else 0
        )
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                return await self._read(receive, too_large=left < 0)
        except TimeoutError:
            message = (
                f"The body of the request took longer than {BODY_TIMEOUT_SECONDS:g} seconds "
                f"to come."
            )
            raise ApiError(408, message, code="slow") from None

    async def _read(self, receive: Receive, too_large: bool) -> bytes:
        most = self.settings.max_body
        size = 0
        body = bytearray()
        async for part in _parts(receive):
            size += len(part)
            too_large = too_large or size > most
            if too_large and size > MAX_DRAINED_BYTES:
                break
            body += b"" if too_large else part
        if too_large:
            message = (
                f"The body is larger than {most:,} bytes, which is all that this server takes."
            )
            raise ApiError(413, message, code="too_large")
        return bytes(body)


class StatusRecorder:
    """Passes messages on and remembers the status; an answer at closing time is the last of its
    connection.
    """

    def __init__(self, send: Send, gate: ServerState, request_id: str) -> None:
        self.send = send
        self.state = gate
        self.request_id = request_id
        self.status = 499  # nothing was sent: the client closed

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", []),
                (b"x-request-id", self.request_id.encode()),
            ]
            if self.state.stopping or self.status in (408, 413):
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        await self.send(message)


async def _parts(receive: Receive) -> Any:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _check_text(body: bytes) -> None:
    """Refuses half of a character, which JSON can say (\\ud800) and nothing after it can write."""
    if not SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The body has half of a character, a lone surrogate such as \\ud800."
        raise ApiError(400, message, code="invalid_text") from None
    except (ValueError, RecursionError):
        return  # whoever reads it says what is wrong


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read already, and then whatever comes."""
    first: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": body, "more_body": False}
    ]

    async def next_message() -> Message:
        return first.pop() if first else await receive()

    return next_message


def _host(headers: Headers) -> str:
    """The name by which the server was addressed, without its port."""
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _request_id(scope: Scope) -> str:
    """The client's own name for a request, where it has one that can be written down; else a new
    one.
    """
    given = Headers(scope=scope).get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else f"req_{uuid4().hex}"


def _host_of(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else "-"


def _line(scope: Scope) -> str:
    """The method and the address as they were sent, without what could break a line or its
    reader's terminal.
    """
    path = scope.get("raw_path", b"")[:200].decode("ascii", "backslashreplace")
    return f"{scope['method']} {path}".encode("unicode_escape").decode()


def _address(scope: Scope) -> str:
    """The address as the API has it, so that nobody can make up a thousand."""
    return str(getattr(scope.get("route"), "path", "other"))
