"""Metrics in Prometheus' text format; those of generation have the names of vLLM's dashboards."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import time

from malmoi.inference.engine import EngineStats
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
    "vllm:prefix_cache_queries_total": (
        "Prompt tokens looked up in the cache",
        lambda s: s.prompt_tokens,
    ),
    "vllm:prefix_cache_hits_total": (
        "Prompt tokens reused from the cache",
        lambda s: s.prefix_tokens,
    ),
}


@dataclass
class Histogram:
    """How many values lie below each bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, value)] += times
        self.total += value * times

    def lines(self, name: str, label: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {below}'
        yield f"{name}_sum{{{label}}} {self.total:.6f}"
        yield f"{name}_count{{{label}}} {below}"


class Metrics:
    """The server's counters; updated by the event loop alone."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)  # by path
        self.times: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self.finished: Counter[tuple[str, str]] = Counter()  # by model and reason
        self.start = time()

    def request(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.seconds[path].add(seconds)

    def observe(self, what: str, model: str, seconds: float, times: int = 1) -> None:
        """Adds to one of the histograms `TIMES`."""
        self.times[what, model].add(seconds, times)

    def text(self, registry: ModelRegistry) -> str:
        """All metrics in Prometheus' text format 0.0.4."""
        stats = {one.name: one.engine.stats() for one in registry if one.engine is not None}
        parts = (*self._server(), *self._times(), *self._finished(stats), *_engines(stats))
        return "\n".join(parts) + "\n"

    def _server(self) -> Iterator[str]:
        yield from _head(
            "malmoi_start_time_seconds", "gauge", "When the server started, in Unix time"
        )
        yield f"malmoi_start_time_seconds {self.start:.3f}"
        yield from _head("malmoi_requests_total", "counter", "Requests by address and status")
        for (path, status), count in sorted(self.requests.items()):
            yield f'malmoi_requests_total{{{_label("path", path)},status="{status}"}} {count}'
        name = "malmoi_request_seconds"
        yield from _head(name, "histogram", "Seconds from a request to the end of its answer")
        for path, histogram in sorted(self.seconds.items()):
            yield from histogram.lines(name, _label("path", path))

    def _times(self) -> Iterator[str]:
        for what, about in TIMES.items():
            for shown in filter(None, (what, OLDER_NAMES.get(what))):
                yield from _head(shown, "histogram", about)
                for (name, model), histogram in sorted(self.times.items()):
                    if name == what:
                        yield from histogram.lines(shown, _label("model_name", model))

    def _finished(self, stats: dict[str, EngineStats]) -> Iterator[str]:
        name = "vllm:request_success_total"
        yield from _head(name, "counter", "Continuations by why they ended")
        aborted = Counter({(model, "abort"): one.cancelled for model, one in stats.items()})
        for (model, reason), count in sorted((self.finished + aborted).items()):
            yield f'{name}{{{_label("model_name", model)},finished_reason="{reason}"}} {count}'


def _engines(stats: dict[str, EngineStats]) -> Iterator[str]:
    for name, (about, value) in ENGINE.items():
        yield from _head(name, "counter" if name.endswith("_total") else "gauge", about)
        for model, found in stats.items():
            yield f"{name}{{{_label('model_name', model)}}} {value(found):g}"


def _head(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {name} {about}.", f"# TYPE {name} {kind}"


def _label(name: str, value: str) -> str:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{quoted}"'
