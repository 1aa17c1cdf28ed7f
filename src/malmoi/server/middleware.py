"""Request middleware: authentication, size limits, and the number of requests in flight."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hmac import compare_digest
from time import perf_counter
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from malmoi.server.config import ServeConfig, is_local
from malmoi.server.error_replies import ApiError, api_error, log
from malmoi.server.prometheus import Metrics

MAX_CONNECTIONS = 1024  # concurrent requests
# bytes read of a body that is too large, so that its sender can read the response
MAX_DRAINED_BYTES = 64 * 2**20
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# paths that need the key; the page itself holds no data
AUTHENTICATED_PREFIXES = (
    *("/v1", "/v2", "/api", "/rerank", "/embed", "/tokenize", "/detokenize"),
    *("/studio", "/metrics"),
)
TAB_HEADER = "x-studio-run"  # "<tab>:<number>": requests of one run have the same number
TAB_RUN = re.compile(r"([\w-]{1,64}):(\d{1,15})")
access = logging.getLogger("malmoi.access")
access.propagate = False  # request lines go only to handlers attached to this logger


@dataclass
class ServerState:
    """How many requests are in flight, and whether the server accepts more."""

    in_flight: int = 0
    stopping: bool = False


class _Gone(Exception):
    """The client disconnected before its request was complete."""


class RequestGuard:
    """ASGI middleware that admits requests or rejects them."""

    def __init__(
        self, app: ASGIApp, gate: ServerState, settings: ServeConfig, metrics: Metrics
    ) -> None:
        self.app = app
        self.state = gate
        self.settings = settings
        self.metrics = metrics
        self.tabs = Tabs()

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
            # the route's path, so that clients cannot create unbounded labels
            path = str(getattr(scope.get("route"), "path", "other"))
            self.metrics.request(path, seen.status, seconds)
            host = scope["client"][0] if scope.get("client") else "-"
            about = (host, _line(scope), seen.status, seconds, seen.request_id)
            access.info("%s %s %d %.3fs %s", *about)

    async def _admit(self, scope: Scope, receive: Receive, send: "StatusRecorder") -> None:
        try:
            self._check(scope)
            body = await self._body(Headers(scope=scope), receive)
            _check_text(body)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except _Gone:
            return
        else:
            with self.tabs.following(Headers(scope=scope).get(TAB_HEADER, ""), receive) as heard:
                await self._respond(scope, _again(body, heard), send)

    async def _respond(self, scope: Scope, receive: Receive, send: "StatusRecorder") -> None:
        """Answers 500 to an unexpected error here: uvicorn would close the connection."""
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if send.started:
                raise
            log(error)
            await api_error(error).response(Request(scope))(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self.state.stopping:
            raise ApiError(503, "The server is shutting down.", code="stopping")
        if self.state.in_flight > MAX_CONNECTIONS:
            raise ApiError(
                429,
                "{most} requests are being served already; try again later.",
                code="busy",
                most=MAX_CONNECTIONS,
            )
        if self.settings.api_key is not None:
            if scope["path"].startswith(AUTHENTICATED_PREFIXES) and not self._has_key(headers):
                raise ApiError(
                    401,
                    "The API key is missing or wrong: send Authorization: Bearer KEY.",
                    code="no_key",
                )
        elif self.settings.local and not is_local(_host(headers)):
            # another site's page may have pointed its own host name at this machine (DNS rebinding)
            raise ApiError(
                403, "This server answers only to localhost; to use a host name, set --api-key."
            )

    def _has_key(self, headers: Headers) -> bool:
        given = headers.get("authorization", "")
        key = self.settings.api_key or ""
        return compare_digest(given.encode("latin-1", "replace"), f"Bearer {key}".encode())

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body, if it is small enough and arrives in time."""
        announced = headers.get("content-length", "0")
        size = int(announced) if announced.isdigit() and len(announced) < 20 else 0
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                return await self._read(receive, too_large=size > self.settings.max_body)
        except TimeoutError:
            raise ApiError(
                408,
                "The request body took longer than {timeout:g} seconds.",
                code="slow",
                timeout=self.settings.body_timeout,
            ) from None

    async def _read(self, receive: Receive, *, too_large: bool) -> bytes:
        limit = self.settings.max_body
        size = 0
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body", False) and not (too_large and size > MAX_DRAINED_BYTES):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            size += len(part)
            too_large = too_large or size > limit
            body += b"" if too_large else part
        if too_large:
            raise ApiError(
                413,
                "The body is larger than {limit:,} bytes, this server's limit.",
                code="too_large",
                limit=limit,
            )
        return bytes(body)


class StatusRecorder:
    """Forwards messages and records the status; closes the connection while shutting down."""

    def __init__(self, send: Send, gate: ServerState, request_id: str) -> None:
        self.send = send
        self.state = gate
        self.request_id = request_id
        self.status = 499  # nothing was sent: the client disconnected
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.started = True
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            if self.state.stopping or self.status in (408, 413):
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self.send(message)


class Tabs:
    """The studio's requests in flight, by browser tab: a newer one supersedes the older ones.

    The page closes superseded requests too, but a proxy in between may not pass that on.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[asyncio.Event, int]] = {}

    @contextmanager
    def following(self, header: str, receive: Receive) -> Iterator[Receive]:
        """The request's messages; a disconnect as soon as its tab has sent a newer request."""
        found = TAB_RUN.fullmatch(header)
        if found is None:
            yield receive
            return
        superseded = asyncio.Event()
        runs = self.runs.setdefault(found[1], {})
        runs[superseded] = int(found[2])
        newest = max(runs.values())
        for other, number in runs.items():
            if number < newest:
                other.set()
        try:
            yield _until(superseded, receive)
        finally:
            del runs[superseded]
            if not runs:
                del self.runs[found[1]]


def _until(superseded: asyncio.Event, receive: Receive) -> Receive:
    async def next_message() -> Message:
        message = asyncio.ensure_future(receive())
        given_up = asyncio.ensure_future(superseded.wait())
        try:
            await asyncio.wait({message, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return await message if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            given_up.cancel()

    return next_message


def _check_text(body: bytes) -> None:
    """Refuses lone surrogates, which JSON can express (\\ud800) but UTF-8 cannot."""
    if not SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400,
            "The body contains a lone surrogate such as \\ud800, which is not a character.",
            code="invalid_text",
        ) from None
    except (ValueError, RecursionError):
        return  # the JSON parser reports it


def _again(body: bytes, receive: Receive) -> Receive:
    """Replays a body that was already read, then passes on further messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return first.pop() if first else await receive()

    return next_message


def _host(headers: Headers) -> str:
    """The host the client addressed, without the port."""
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _request_id(scope: Scope) -> str:
    """The client's own request id where it is printable, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else f"req_{uuid4().hex}"


def _line(scope: Scope) -> str:
    """The method and the path as sent, with anything that could break a log line escaped."""
    path = scope.get("raw_path", b"")[:200].decode("ascii", "backslashreplace")
    return f"{scope['method']} {path}".encode("unicode_escape").decode()
