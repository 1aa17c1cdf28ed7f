"""Measures the cost of a step on this machine: passes of growing size, and optimizer updates."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from malmoi.training.device import Execution

PROBE_SECONDS = 0.3  # a pass this long gives a reliable timing
MAX_PROBE_SECONDS = 2.0  # a pass longer than this is not repeated
COMPILED_PAYS = 0.95  # compile only if a step takes at most this share of the eager time


@dataclass(frozen=True)
class StepTimer:
    """Times a trainer's passes and updates; the trainer restores the state they change."""

    execution: Execution
    run_pass: Callable[[int], None]  # forward and backward pass over this many sequences
    update: Callable[[], None]  # clipping and optimizer step with the current gradients

    def measure(self, micro: int, *, compiled: bool) -> tuple[float, float]:
        """Returns the seconds of one update and of one sequence."""
        took, size = self._pass_seconds(micro, compiled=compiled)
        self._timed(self.update)  # the first update allocates the moments
        return min(self._timed(self.update), self._timed(self.update)), took / size

    def _pass_seconds(self, micro: int, *, compiled: bool) -> tuple[float, int]:
        """Doubles a pass until it is long enough to time; returns its seconds and sequences."""
        size = micro if compiled else 1  # a compiled pass has a fixed size
        with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            self._timed_pass(size)  # warm-up: allocations and compilation
            took = self._timed_pass(size)
            while took < PROBE_SECONDS and 2 * size <= micro:
                size *= 2
                took = self._timed_pass(size)
            if took < MAX_PROBE_SECONDS:  # best of two, since other programs may be running
                took = min(took, self._timed_pass(size))
        return took, size

    def _timed_pass(self, size: int) -> float:
        return self._timed(lambda: self.run_pass(size))

    def _timed(self, work: Callable[[], None]) -> float:
        self.execution.synchronize()
        began = time.perf_counter()
        work()
        self.execution.synchronize()
        return time.perf_counter() - began
