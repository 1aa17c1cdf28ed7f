"""What a step costs on this machine, by trying: passes of more and more sequences, and updates."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from malmoi.training.device import Execution

PROBE_SECONDS = 0.3  # a pass that takes this long says how fast the machine is
MAX_PROBE_SECONDS = 2.0  # one that takes longer is not repeated
COMPILED_PAYS = 0.95  # of an eager step's time, or less


@dataclass(frozen=True)
class StepTimer:
    """Times a trainer's passes and updates; what they change is the trainer's to restore."""

    execution: Execution
    run_pass: Callable[[int], None]  # forward and backward of this many sequences
    update: Callable[[], None]  # clip and optimizer, by the gradients as they are

    def measure(self, micro: int, *, compiled: bool) -> tuple[float, float]:
        """Seconds of an update, and of one sequence."""
        took, size = self._pass_seconds(micro, compiled=compiled)
        self._timed(self.update)  # moments are allocated with the first
        return min(self._timed(self.update), self._timed(self.update)), took / size

    def _pass_seconds(self, micro: int, *, compiled: bool) -> tuple[float, int]:
        """Seconds and sequences of a pass, enlarged until it takes long enough to time."""
        size = micro if compiled else 1  # a compiled pass is of one size only
        with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            self._timed_pass(size)  # first allocations, compilation
            took = self._timed_pass(size)
            while took < PROBE_SECONDS and 2 * size <= micro:
                size *= 2
                took = self._timed_pass(size)
            if took < MAX_PROBE_SECONDS:  # the better of two, if other programs are at work
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
