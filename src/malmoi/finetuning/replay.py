"""CUDA graphs for fine-tuning steps, one per shape: small networks are Python-bound."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from malmoi.inference.generation.cuda_graphs import record_graph

# forward, backward, update: takes a batch, returns its loss
ReplayStep = Callable[[Mapping[str, Tensor]], Tensor]
MAX_GRAPHS = 64  # captured shapes; batches of further shapes run eagerly


class StepReplay:
    """Runs a shape's first batch eagerly, captures the second, and replays the graph from then on.

    The step must stay on the GPU: it must not return values to Python, and its optimizer must be
    capturable. Batches may be in pinned memory; the returned loss is a copy.
    """

    def __init__(self, step: ReplayStep, device: torch.device) -> None:
        self.step = step
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor] | None] = {}

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        shape = tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))
        first = shape not in self.recorded
        if first or (self.recorded[shape] is None and len(self.recorded) > MAX_GRAPHS):
            self.recorded.setdefault(shape, None)
            return self._run(batch)
        found = self.recorded[shape] or self._record(batch)
        self.recorded[shape] = found
        graph, inputs, loss = found
        for name, tensor in batch.items():
            inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return loss.clone()  # replaying the next graph may overwrite its memory

    def _run(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Runs eagerly on the capture stream, so that per-stream kernel state is initialized."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(self._sent(batch)).detach()
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _record(
        self, batch: Mapping[str, Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        inputs = self._sent(batch)
        pool = next((found[0].pool() for found in self.recorded.values() if found), None)
        with record_graph(self.stream, pool) as graph:
            loss = self.step(inputs).detach()
        return graph, inputs, loss

    def _sent(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
