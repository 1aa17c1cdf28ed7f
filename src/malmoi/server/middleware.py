"""Request middleware: authentication, size limits, and the number of requests in flight."""

import asyncio
import json
import logging
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import accumulate
from operator import add
from time import perf_counter, time
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from malmoi.inference.engine import EngineStats
from malmoi.report.page import render
from malmoi.server.config import ServeConfig, is_local
from malmoi.server.error_replies import ApiError, api_error, log, refuse_unless
from malmoi.server.model_registry import ModelRegistry

BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300),
)
TIMES = {
    "vllm:time_to_first_token_seconds": "Seconds from a request to its first token",
    "vllm:inter_token_latency_seconds": "Seconds from one token to the next",
    "vllm:request_queue_time_seconds": "Seconds that a continuation waited for a slot",
    "vllm:e2e_request_latency_seconds": "Seconds from a request to the end of a continuation",
}
FIRST_TOKEN, BETWEEN_TOKENS, QUEUE_TIME, WHOLE_TIME = TIMES
OLDER_NAMES = {BETWEEN_TOKENS: "vllm:time_per_output_token_seconds"}  # of vLLM before 0.11
ENGINE: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Continuations being generated", lambda s: s.running),
    "vllm:num_requests_waiting": ("Continuations waiting for a slot", lambda s: s.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache in use", lambda s: s.cache_usage),
    "malmoi_slots": ("Continuations that can be generated at the same time", lambda s: s.slots),
    "vllm:generation_tokens_total": ("Tokens generated", lambda s: s.tokens),
    "vllm:prompt_tokens_total": ("Prompt tokens", lambda s: s.prompt_tokens),
    "vllm:prefix_cache_queries_total": ("Prompt tokens looked up", lambda s: s.prompt_tokens),
    "vllm:prefix_cache_hits_total": ("Prompt tokens not read again", lambda s: s.prefix_tokens),
}


@dataclass
class Histogram:
    """How many values lie below each bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, value)] += times
        self.total += value * times

    def join(self, other: "Histogram") -> None:
        self.counts = [*map(add, self.counts, other.counts)]
        self.total += other.total

    @property
    def buckets(self) -> Iterator[tuple[object, int]]:
        """Each bound, and how many values are not above it."""
        return zip((*BOUNDS, "+Inf"), accumulate(self.counts), strict=True)


class Metrics:
    """The server's counters; updated by the event loop alone."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)  # by path
        self.times: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)  # of `TIMES`
        self.finished: Counter[tuple[str, str]] = Counter()  # by model and reason
        self.start = time()

    def taken(self) -> "Metrics":
        """These counters, which begin anew here."""
        taken = copy(self)
        vars(self).update(vars(Metrics()))
        return taken

    def add(self, other: "Metrics") -> None:
        """Adds what another process counted."""
        self.requests.update(other.requests)
        self.finished.update(other.finished)
        for path, found in other.seconds.items():
            self.seconds[path].join(found)
        for what, found in other.times.items():
            self.times[what].join(found)

    def text(self, registry: ModelRegistry) -> str:
        """All metrics in Prometheus' text format 0.0.4."""
        stats = {one.name: one.engine.stats() for one in registry if one.engine is not None}
        aborted = Counter({(model, "abort"): one.cancelled for model, one in stats.items()})
        return render(
            "server/metrics.jinja",
            metrics=self,
            finished=self.finished + aborted,
            stats=stats,
            times=TIMES,
            older_names=OLDER_NAMES,
            engine=ENGINE,
            label=_label,
        )


def _label(name: str, value: str) -> str:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{quoted}"'


MAX_CONNECTIONS = 1024  # concurrent requests
# bytes read of a body that is too large, so that its sender can read the response
MAX_DRAINED_BYTES = 64 * 2**20
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# paths that need the key; the page itself holds no data
AUTHENTICATED_PREFIXES = (*("/v1", "/v2", "/rerank", "/studio", "/metrics"),)
access = logging.getLogger("malmoi.access")
access.propagate = False  # request lines go only to handlers attached to this logger


def log_requests() -> None:
    """Logs time, client, path, status, duration and request id of each request; never a body."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access.addHandler(handler)
    access.setLevel(logging.INFO)


@dataclass
class ServerState:
    """How many requests are in flight, and whether the server accepts more."""

    in_flight: int = 0
    stopping: bool = False


@dataclass
class RequestGuard:
    """ASGI middleware that admits requests or rejects them."""

    app: ASGIApp
    state: ServerState
    settings: ServeConfig
    metrics: Metrics

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
            self.metrics.requests[path, seen.status] += 1
            self.metrics.seconds[path].add(seconds)
            host = scope["client"][0] if scope.get("client") else "-"
            about = (host, _line(scope), seen.status, seconds, seen.request_id)
            access.info("%s %s %d %.3fs %s", *about)

    async def _admit(self, scope: Scope, receive: Receive, send: "StatusRecorder") -> None:
        try:
            self._check(scope)
            body = await self._body(Headers(scope=scope), receive)
            _check_text(body or b"")
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            if body is not None:
                await self._respond(scope, replay(body, receive), send)

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
        refuse_unless(not self.state.stopping, 503, "The server is shutting down.", code="stopping")
        refuse_unless(
            self.state.in_flight <= MAX_CONNECTIONS,
            429,
            "{most} requests are being served already; try again later.",
            code="busy",
            most=MAX_CONNECTIONS,
        )
        if self.settings.api_key is not None:
            given = headers.get("authorization", "").encode("latin-1", "replace")
            known = compare_digest(given, f"Bearer {self.settings.api_key}".encode())
            refuse_unless(
                known or not scope["path"].startswith(AUTHENTICATED_PREFIXES),
                401,
                "The API key is missing or wrong: send Authorization: Bearer KEY.",
                code="no_key",
            )
        elif self.settings.local:
            # another site's page may have pointed its own host name at this machine (DNS rebinding)
            refuse_unless(
                is_local(_host(headers)),
                403,
                "This server answers only to localhost; to use a host name, set --api-key.",
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body, if it is small and arrives in time; None from a client that left."""
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

    async def _read(self, receive: Receive, *, too_large: bool) -> bytes | None:
        limit = self.settings.max_body
        size = 0
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body", False) and not (too_large and size > MAX_DRAINED_BYTES):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            too_large = too_large or size > limit
            body += b"" if too_large else part
        refuse_unless(
            not too_large,
            413,
            "The body is larger than {limit:,} bytes, this server's limit.",
            code="too_large",
            limit=limit,
        )
        return bytes(body)


@dataclass
class StatusRecorder:
    """Forwards messages and records the status; closes the connection while shutting down."""

    send: Send
    state: ServerState
    request_id: str
    status: int = 499  # nothing was sent: the client disconnected
    started: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.started = True
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            if self.state.stopping or self.status in (408, 413):
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self.send(message)


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


def replay(body: bytes, receive: Receive) -> Receive:
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
