"""Progress for a person who waits: a bar on a terminal, one line every few seconds elsewhere."""

import os
import shutil
import sys
import time

SECONDS_BETWEEN_LINES = 5.0  # seconds between lines where there is no terminal


class Console:
    """Progress on stderr: lines, and on a terminal one that updates in place."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._open = False  # whether the line that renews itself is on the screen
        self._last = -SECONDS_BETWEEN_LINES

    def progress(self, text: str, *, now: bool = False) -> None:
        """How it goes: renewed on a terminal, a line every few seconds elsewhere, or at once
        where it is `now`.
        """
        early = time.monotonic() - self._last < (0.1 if self._live else SECONDS_BETWEEN_LINES)
        if self._quiet or (early and not now):
            return
        self._last = time.monotonic()
        if self._live:
            # a line that wraps cannot be renewed
            text = text[: shutil.get_terminal_size().columns - 1]
        self._print(text, end="" if self._live else "\n")
        self._open = self._live

    def line(self, text: str) -> None:
        """Something worth a line of its own."""
        if not self._quiet:
            self._print(text)
            self._open = False

    def _print(self, text: str, end: str = "\n") -> None:
        print(f"\r\033[K{text}" if self._live else text, end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._open:
            print(file=sys.stderr)
            self._open = False


def format_duration(seconds: float) -> str:
    """90 → 1:30."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_bar(share: float, width: int = 24) -> str:
    full = int(min(1.0, share) * width)
    return "━" * full + "─" * (width - full)
