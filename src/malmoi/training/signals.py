"""Ctrl-C and SIGTERM: finish the step, save, then exit with 130 or 143."""

import signal
from types import FrameType
from typing import Any, Self

from malmoi.messages import msg

EARLY_STOP = 1  # asked for by a callback, not by a signal


class Stopped(BaseException):
    """Raised after a run was asked to stop and has saved; `code` is the exit status."""

    def __init__(self, number: int) -> None:
        super().__init__(msg("stopped by {signals}", signals=signal.Signals(number).name))
        self.code = 128 + number


class StopSignals:
    """Records a stop signal instead of ending the process; a second Ctrl-C ends it."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._remember)
            except ValueError:  # not the main thread, which owns the signals
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises `Stopped` if a signal came."""
        if self.number:
            raise Stopped(self.number)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number
        outer: Any = self._before.get(number)
        if isinstance(getattr(outer, "__self__", None), StopSignals):  # a study that trains
            outer(number, frame)
