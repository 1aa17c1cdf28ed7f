"""CUDA graphs: a step is hundreds of short kernels, slower to launch than to run.

A CUDA graph launches all of them at once. It replays the same addresses and shapes, so a step must
read and write fixed tensors, and there is one graph per number of rows and cache width.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 3  # the first calls choose kernels and allocate workspaces, which must not be recorded
CACHE_WIDTHS = (128, 256, 512, 1024)
MAX_GRAPHS = 64  # captured shapes of training; batches of further shapes run eagerly
Tensors = dict[str, Any]  # inputs and labels of one pass
Losses = dict[str, Tensor]  # of a step: the loss, and that of each term if there are several


class GraphPool:
    """Runs a step of some shape: captured and replayed on a GPU, called directly elsewhere.

    A shape is some whole numbers. `state` holds the tensors that the step changes; they are
    restored after the warm-up. What it returns is overwritten by the next run, since graphs share
    their memory. `plain_runs` of each shape come before it is captured: what occurs once is not
    worth a graph.
    """

    def __init__(
        self, step: Callable[..., Tensor], state: tuple[Tensor, ...], plain_runs: int = 0
    ) -> None:
        self.step = step
        self.state = state
        self.plain_runs = plain_runs
        self.device = state[0].device
        self.runs: Counter[tuple[int, ...]] = Counter()
        self.recorded: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def run(self, *shape: int) -> Tensor:
        self.runs[shape] += 1
        if self.device.type != "cuda" or self.runs[shape] <= self.plain_runs:
            return self.step(*shape)
        with torch.cuda.device(self.device):
            if shape not in self.recorded:
                self.recorded[shape] = self._record(shape)
            graph, found = self.recorded[shape]
            graph.replay()
        return found

    def _record(self, shape: tuple[int, ...]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        before = [tensor.clone() for tensor in self.state]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.step(*shape)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for tensor, value in zip(self.state, before, strict=True):
            tensor.copy_(value)
        with record_graph(stream, self.pool) as graph:
            found = self.step(*shape)
        return graph, found


@contextmanager
def record_graph(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures the kernels launched inside as a graph with memory from `pool`.

    Other threads may allocate meanwhile. Garbage collection is off: destroying an older graph
    during capture would invalidate it.
    """
    graph = torch.cuda.CUDAGraph()
    collected = gc.isenabled()
    torch.cuda.synchronize(stream.device)
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
    finally:
        if collected:
            gc.enable()


def sent_to(device: torch.device, batch: Tensors) -> Tensors:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


class StepReplay:
    """CUDA graphs of steps, one per shape, since small networks are bound by Python.

    Runs a shape's first batch eagerly, captures the second, and replays the graph from then on.
    The step must stay on the GPU, and its optimizer be capturable. Returned losses are copies.
    """

    def __init__(self, step: Callable[[list[Tensors]], Losses], device: torch.device) -> None:
        self.step = step
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensors], Losses] | None] = {}

    def __call__(self, micros: list[Tensors]) -> Losses:
        shape = tuple(
            (name, tensor.shape) for micro in micros for name, tensor in sorted(micro.items())
        )
        first = shape not in self.recorded
        if first or (self.recorded[shape] is None and len(self.recorded) > MAX_GRAPHS):
            self.recorded.setdefault(shape, None)
            return self._run(micros)
        recorded = self.recorded[shape] or self._record(micros)
        self.recorded[shape] = recorded
        graph, inputs, losses = recorded
        for here, micro in zip(inputs, micros, strict=True):
            for name, tensor in micro.items():
                here[name].copy_(tensor, non_blocking=True)
        graph.replay()
        # replaying the next graph may overwrite its memory
        return {name: loss.clone() for name, loss in losses.items()}

    def _run(self, micros: list[Tensors]) -> Losses:
        """Runs eagerly on the capture stream, so that per-stream kernel state is initialized."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            losses = self.step(self._sent(micros))
        torch.cuda.current_stream().wait_stream(self.stream)
        return losses

    def _record(self, micros: list[Tensors]) -> tuple[torch.cuda.CUDAGraph, list[Tensors], Losses]:
        inputs = self._sent(micros)
        torch.cuda.empty_cache()  # a graph has memory of its own
        pool = next((found[0].pool() for found in self.recorded.values() if found), None)
        with record_graph(self.stream, pool) as graph:
            losses = self.step(inputs)
        return graph, inputs, losses

    def _sent(self, micros: list[Tensors]) -> list[Tensors]:
        return [sent_to(self.device, micro) for micro in micros]


def bucket_rows(rows: int, limit: int) -> int:
    """Rounds up to a power of two: few graphs, and at most half of the rows idle."""
    return min(1 << (rows - 1).bit_length(), limit)


def bucket_width(width: int, limit: int) -> int:
    """Rounds up to one of a few widths; beyond the last of them, to a multiple of it."""
    step = next((w for w in CACHE_WIDTHS if w >= width), CACHE_WIDTHS[-1])
    return min(-(-width // step) * step, limit)
