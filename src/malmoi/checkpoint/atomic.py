"""Files that are either wholly there or not: written beside, flushed to the disk, renamed."""

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a path beside the target, then moves what it wrote into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    replace_file(path, lambda beside: beside.write_text(text, "utf-8"))
