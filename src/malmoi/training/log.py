"""The log of a run: metrics.jsonl, log records and progress events."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.system.files import write_text
from malmoi.system.progress import Progress, report_progress
from malmoi.system.run_folder import read_metrics
from malmoi.training.recipe import TrainConfig
from malmoi.training.trackers import Tracker, open_trackers

logger = logging.getLogger(__name__)


class RunLog:
    """Metrics rows, status lines and progress events. Only the first process reports."""

    def __init__(self, out: Path, c: TrainConfig, *, first: bool) -> None:
        self.path = out / "metrics.jsonl"
        self.first = first
        self._trackers: list[Tracker] = []
        self._there: set[tuple[int, bool]] = set()  # rows of the step that a run resumes from
        self._written = False
        if first and c.trackers:
            self._trackers = open_trackers(c.trackers, out, c.to_dict())

    def resume(self, step: int) -> None:
        """Drops rows that a killed run wrote after its last saved step."""
        if not self.first or not self.path.is_file():
            return
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) != len(rows) or self.path.read_bytes()[-1:] not in (b"\n", b""):
            write_text(self.path, "".join(_line(row) for row in kept))
        self._there = {_kind(row) for row in kept if row["step"] == step}

    def require_folder(self) -> None:
        """Stops a run whose folder was removed: what it would write there, nobody could resume."""
        gone = self._written and not self.path.is_file()
        if self.first and (gone or not self.path.parent.is_dir()):
            raise MalmoiError(
                "{parent} was removed while the run was writing to it, so the run has "
                "stopped. Run the same command again to start over.",
                parent=self.path.parent,
            )

    def write_row(self, **values: Any) -> None:
        """Adds a row, unless the run had written it before it was interrupted."""
        if not self.first or _kind(values) in self._there:
            return
        self.require_folder()
        self._written = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(values))
        step = values.pop("step")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def line(self, text: str) -> None:
        """Logs a line of status."""
        if self.first:
            logger.info(text)

    def progress(self, event: Progress) -> None:
        if self.first:
            report_progress(event)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _kind(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Identifies a row by its step and whether it is from validation."""
    return row["step"], "loss" in row
