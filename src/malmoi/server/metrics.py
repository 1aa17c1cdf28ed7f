"""Metrics in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import time

from malmoi.server.registry import Registry

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAUGES = {"running", "waiting", "slots"}
HELP = {
    "running": "Continuations being generated",
    "waiting": "Continuations waiting for a slot",
    "slots": "Continuations that can be generated at the same time",
    "tokens": "Tokens written",
    "prompt_tokens": "Prompt tokens processed",
    "prefix_tokens": "Prompt tokens reused from the cache",
    "finished": "Continuations completed",
    "cancelled": "Continuations cancelled",
    "failed": "Continuations that failed",
}


@dataclass
class Histogram:
    """How many values lie below each bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {below}"


class Metrics:
    """The server's counters; updated by the event loop alone."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds = Histogram()
        self.first_token = Histogram()
        self.start = time()

    def request(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.seconds.add(seconds)

    def text(self, registry: Registry) -> str:
        """All metrics in Prometheus' text format 0.0.4."""
        return "\n".join((*self._server(), *_engines(registry))) + "\n"

    def _server(self) -> Iterator[str]:
        yield from _head(
            "malmoi_start_time_seconds", "gauge", "When the server started, in Unix time"
        )
        yield f"malmoi_start_time_seconds {self.start:.3f}"
        yield from _head("malmoi_requests_total", "counter", "Requests by address and status")
        for (path, status), count in sorted(self.requests.items()):
            yield f'malmoi_requests_total{{path="{_quoted(path)}",status="{status}"}} {count}'
        yield from _head(
            "malmoi_request_seconds", "histogram", "Seconds from a request to the end of its answer"
        )
        yield from self.seconds.lines("malmoi_request_seconds")
        yield from _head(
            "malmoi_first_token_seconds", "histogram", "Seconds from a request to its first token"
        )
        yield from self.first_token.lines("malmoi_first_token_seconds")


def _engines(registry: Registry) -> Iterator[str]:
    stats = {one.name: asdict(one.engine.stats()) for one in registry if one.engine is not None}
    for what, about in HELP.items():
        name = f"malmoi_{what}" if what in GAUGES else f"malmoi_{what}_total"
        yield from _head(name, "gauge" if what in GAUGES else "counter", about)
        for model, values in stats.items():
            yield f'{name}{{model="{_quoted(model)}"}} {values[what]}'


def _head(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {name} {about}.", f"# TYPE {name} {kind}"


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
