"""Training steps as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from malmoi.kernels.cuda_graphs import record_graph
from malmoi.training.feed import Tensors

Losses = dict[str, Tensor]  # of a step: the loss, and that of each term if there are several
MAX_GRAPHS = 64  # captured shapes; batches of further shapes run eagerly


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
