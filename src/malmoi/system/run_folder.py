"""Which run a folder holds: the same one is resumed or already finished, another is refused."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError, UsageError, explained
from malmoi.messages import joined, msg
from malmoi.system.files import write_json
from malmoi.system.untrusted import JsonObject, flat_settings, read_object

SHOWN = 4  # differences that an error names
FINISHED = "finished"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, and the file in it that records the settings."""

    folder: Path
    file: str  # the record's name
    kind: str  # of run, as messages name it: "fine-tuning"
    can_restart: bool = False  # whether the command has --overwrite
    # settings that are checksums, with words for a change of each
    unreadable: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[JsonObject], Mapping[str, Any]] = dict

    @property
    def path(self) -> Path:
        return self.folder / self.file

    def read(self) -> dict[str, Any]:
        """The record; empty if the folder holds no such run."""
        if not self.path.is_file():
            return {}
        with explained(
            MalmoiError,
            "{path} is not a valid record of a {kind}: {error} Choose another folder{restart}.",
            path=self.path,
            kind=msg(self.kind),
            restart=self._restart(),
        ):
            return dict(self.parse(read_object(self.path)))

    def begin(self, settings: Mapping[str, Any], *, free: Collection[str] = ()) -> dict[str, Any]:
        """The record of this run, with `finished` if it has finished; refuses another run's folder.

        `free` settings (dotted names) may change between two calls.
        """
        before = self.read()
        if before:
            self._check_same(before, settings, free)
        if FINISHED in before:
            return before
        if before != json.loads(json.dumps(settings)):  # others may be reading it
            write_json(self.path, settings)
        return dict(settings)

    def finish(self, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        write_json(self.path, {**settings, FINISHED: results})

    def restart(self) -> None:
        """Deletes the record."""
        self.path.unlink(missing_ok=True)

    def refusal(self, differences: Sequence[str]) -> UsageError:
        """The error that the folder holds another run, with what differs."""
        return UsageError(
            "{folder} holds another {kind} ({differences}): give the same settings to resume "
            "it, or choose another folder{restart}.",
            folder=self.folder,
            kind=msg(self.kind),
            differences=joined(", ", map(msg, differences[:SHOWN])),
            restart=self._restart(),
        )

    def _restart(self) -> str:
        return msg(", or start over with --overwrite (overwrite=True)") if self.can_restart else ""

    def _check_same(
        self, before: Mapping[str, Any], settings: Mapping[str, Any], free: Collection[str]
    ) -> None:
        old = dict(flat_settings(before))
        now = flat_settings(json.loads(json.dumps(settings)))
        if changed := [name for name, value in now if name not in free and old.get(name) != value]:
            was = {name: json.dumps(old.get(name), ensure_ascii=False) for name in changed}
            words = [
                self.unreadable.get(name) or msg("{name} was {value}", name=name, value=was[name])
                for name in changed
            ]
            raise self.refusal(words)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a metrics.jsonl, if any; an incomplete last line is skipped."""
    rows = []
    for line in path.read_text("utf-8", errors="replace").split("\n") if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return [row for row in rows if isinstance(row, dict) and "step" in row]
