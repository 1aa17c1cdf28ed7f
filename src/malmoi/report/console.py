"""What the command line shows while it works: log records as lines, progress as a bar."""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from unicodedata import east_asian_width

from malmoi.messages import language, msg, translate
from malmoi.system.progress import VALIDATE, Progress, listening

SECONDS_BETWEEN_LINES = 5.0  # where there is no terminal
SECONDS_BETWEEN_UPDATES = 0.1  # on a terminal
SECONDS_BETWEEN_TICKS = 0.5
AMOUNTS = {
    "tokens": "{value:,.0f} tokens",
    "megabytes": "{value:,.0f} MB",
    "utilization": "{value:.0%} of the machine",
}
LOGGER = logging.getLogger("malmoi")


class Console(logging.Handler):
    """A logging handler and a progress callback that share stderr.

    Examples:
        >>> with Console().attached():
        ...     malmoi.pretrain("gpt-char", data="book.txt", out="runs/book", minutes=3)
    """

    def __init__(self) -> None:
        super().__init__()
        self._live = _is_live()
        self._ticker: Ticker | None = None  # while work without progress is going on
        self._open = False  # whether the line that updates in place is on the screen
        self._last = -SECONDS_BETWEEN_LINES
        self._verb = ""
        self._shown = False  # whether the verb had a line
        self._began = (0.0, 0.0)  # when the verb began, and how much was done by then
        self._done = 0.0

    @contextmanager
    def attached(self) -> Iterator["Console"]:
        """Context manager that shows the log and the progress of `malmoi`."""
        level = LOGGER.level
        LOGGER.addHandler(self)
        LOGGER.setLevel(logging.INFO)
        _attached.append(self)
        try:
            with listening(self):
                yield self
        finally:
            _attached.remove(self)
            LOGGER.setLevel(level)
            LOGGER.removeHandler(self)
            self.close_line()

    def emit(self, record: logging.LogRecord) -> None:
        """A log record as a line of its own; a warning is a note."""
        note = "note: " if record.levelno >= logging.WARNING else ""
        text = translate(note) + translate(record.getMessage())
        self._print(text)
        self._open = False
        if self._live and text.endswith("…"):  # announces work that takes a while
            self._ticker = Ticker()

    def __call__(self, event: Progress) -> None:
        """Shows progress: updated in place on a terminal, otherwise a line every few seconds."""
        if event.verb == VALIDATE:  # its metrics have a line of the log
            return
        now = time.monotonic()
        # the same work again, on other data, starts over
        if event.verb != self._verb or event.done < self._done:
            self._verb = event.verb
            self._began = (now, event.done)
            self._shown = False
        self._done = event.done
        ends = event.total is not None and event.done >= event.total
        pause = SECONDS_BETWEEN_UPDATES if self._live else SECONDS_BETWEEN_LINES
        # a bar that was shown is also shown at its end; very short work is never shown
        if not self._shown if ends else now - self._last < pause:
            return
        self._last = now
        self._shown = not ends  # an end that is reported again is not shown again
        self._show(event, now, ends=ends)

    def _show(self, event: Progress, now: float, *, ends: bool) -> None:
        # a line that wraps cannot be updated in place
        columns = shutil.get_terminal_size().columns - 1 if self._live else None
        text = progress_line(event, self._seconds_left(event, now), columns)
        self._print(text, end="" if self._live else "\n")
        self._open = self._live
        uncounted = event.total is None and not event.unit
        # a shard takes up to a minute: its seconds are counted
        if self._live and not ends and (uncounted or event.unit == "shards"):
            self._ticker = Ticker(text)

    def _seconds_left(self, event: Progress, now: float) -> float | None:
        began, first = self._began
        if event.seconds_left is not None or event.total is None:
            return event.seconds_left
        done = event.done - first
        return (event.total - event.done) * (now - began) / done if done > 0 else None

    def _print(self, text: str, end: str = "\n") -> None:
        self._stop_ticker()
        print(f"\r\033[K{text}" if self._live else text, end=end, file=sys.stderr, flush=True)

    def _stop_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.close()
            self._ticker = None

    def close_line(self) -> None:
        """Ends the line that updates in place."""
        self._stop_ticker()
        if self._open:
            print(file=sys.stderr)
            self._open = False


_attached: list[Console] = []


def end_status() -> None:
    """Ends the line that updates in place, before a result is printed on the same terminal."""
    for console in _attached:
        console.close_line()


class Ticker:
    """A line on a terminal that counts the seconds of work without progress."""

    def __init__(self, text: str = "") -> None:
        self._text = f"{text} … " if text else "  "
        self._unit = "초" if language() == "ko" else " s"
        self._began = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_TICKS):
            seconds = int(time.monotonic() - self._began)
            print(f"\r\033[K{self._text}{seconds}{self._unit}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def waiting(text: str) -> AbstractContextManager[object]:
    """Shows a message and the elapsed seconds on a terminal while waiting."""
    return closing(Ticker(translate(text))) if _is_live() else nullcontext()


def _is_live() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ


def progress_line(event: Progress, seconds_left: float | None, columns: int | None = None) -> str:
    """━━━─── 50%  1:30 left  pretrain 500/1,000 steps  loss 3.2; cut to the columns."""
    parts = []
    if event.share is not None:
        parts.append(f"{progress_bar(event.share, 16)} {event.share:4.0%}")
    if seconds_left is not None:
        parts.append(translate(msg("{left} left", left=format_duration(seconds_left))))
    parts.append(_amount(event))
    parts += [_metric(*one) for one in event.metrics.items()]
    while columns and len(parts) > 1 and _cells("  ".join(parts)) > columns:
        parts.pop()
    return (line := "  ".join(parts))[:1].upper() + line[1:]


def _cells(text: str) -> int:
    """Columns of a terminal: Hangul takes two each."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text)


def _amount(event: Progress) -> str:
    verb = translate(event.verb)
    # the bar and the time left say it, or the work cannot be counted, or not yet
    if event.unit == "seconds" or (event.total is None and not (event.unit and event.done)):
        return verb
    total = "" if event.total is None else f"/{event.total:,.0f}"
    if language() == "ko":
        return f"{verb} {event.done:,.0f}{total}{translate(event.unit)}"
    one = (event.total if event.total is not None else event.done) == 1
    unit = event.unit.removesuffix("s") if one else event.unit
    return f"{verb} {event.done:,.0f}{total} {unit}".rstrip()


def _metric(name: str, value: float) -> str:
    """loss 3.214, 1,200,000 tokens, 9 MB, 12,300 tokens/s, 41% of the machine."""
    words = name.replace("_", " ").replace("megabytes", "MB")
    if name.endswith("_per_second"):
        shown = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        return f"{shown} {translate(words.removesuffix(' per second'))}/s"
    if name in AMOUNTS:
        return translate(msg(AMOUNTS[name], value=value))
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
    return translate(msg(words + " {value}", value=shown))


def format_duration(seconds: float) -> str:
    """90 → 1:30."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_bar(share: float, width: int = 24) -> str:
    """A share of 1 as a bar of this many characters."""
    return ("━" * int(min(1.0, share) * width)).ljust(width, "─")
