"""What a run says: metrics.jsonl for machines, a bar on a terminal, one line every few seconds elsewhere."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malmoi.disk import write_text
from malmoi.train.recipe import TrainConfig

EVERY = 5.0  # seconds between lines where there is no terminal


class Voice:
    """Words for the person who waits: lines, and on a terminal one that renews itself."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._open = False  # whether the line that renews itself is on the screen
        self._last = -EVERY

    def progress(self, text: str, *, now: bool = False) -> None:
        """How it goes: renewed on a terminal, a line every few seconds elsewhere, or at once where it is `now`."""
        early = time.monotonic() - self._last < (0.1 if self._live else EVERY)
        if self._quiet or (early and not now):
            return
        self._last = time.monotonic()
        if self._live:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be renewed
        self._print(text, end="" if self._live else "\n")
        self._open = self._live

    def say(self, text: str) -> None:
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


class Log(Voice):
    """Rows of metrics, and words. Only the first process speaks."""

    def __init__(self, out: Path, c: TrainConfig, *, first: bool) -> None:
        super().__init__(quiet=not first)
        self.path, self.first = out / "metrics.jsonl", first
        self._board: Any = None
        self._there: set[tuple[int, bool]] = set()  # rows of the step that a run goes on from
        if first and c.tensorboard:
            self._board = _tensorboard(out)

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Forgets rows that a killed run wrote after its last saved step; returns the rest."""
        if not self.first or not self.path.is_file():
            return []
        rows = read_rows(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) != len(rows) or self.path.read_bytes()[-1:] not in (b"\n", b""):
            write_text(self.path, "".join(_line(row) for row in kept))
        self._there = {_kind(row) for row in kept if row["step"] == step}
        return kept

    def row(self, **values: Any) -> None:
        """Adds a row, unless the run had written it before it was stopped."""
        if not self.first or _kind(values) in self._there:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(values))
        for name, value in values.items() if self._board else ():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        super().close()
        if self._board:
            self._board.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _kind(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Which row of a run this is: its step, and whether it is of training or of validation."""
    return row["step"], "loss" in row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, none where there is none; a last line that a kill cut short is left out."""
    rows = []
    if not path.is_file():
        return []
    for line in path.read_text("utf-8", errors="replace").split("\n"):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def _tensorboard(out: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"))


def clock(seconds: float) -> str:
    """90 → 1:30."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plural(count: float, noun: str) -> str:
    """1 step, 2 steps, 1,000 steps, 0.5 minutes."""
    return f"{count:,g} {noun}{'s' if count != 1 else ''}" if count < 1e6 else f"{count:,.0f} {noun}s"


def bar(share: float, width: int = 24) -> str:
    full = int(min(1.0, share) * width)
    return "━" * full + "─" * (width - full)
