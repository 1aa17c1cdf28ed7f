"""Paths that a user names: whether they are there, and which ones may have been meant."""

import os
import re
from itertools import islice
from pathlib import Path

from malmoi.errors import MOST_NAMES, MalmoiError, UsageError, did_you_mean, similar_names
from malmoi.system.storage import local_path

ADAPTER_CONFIG = "adapter_config.json"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def require_path(path: Path) -> None:
    """Raises an error if a file or folder does not exist."""
    if not local_path(path).exists():
        raise UsageError(
            "There is no file or folder {path!r}.{hint}", path=str(path), hint=similar_path(path)
        )


def similar_path(path: Path) -> str:
    """A hint for a path that does not exist: similar names where its first missing part would be.

    What follows that part must be there too: runs/tinny/gpt is not runs/tiny without a gpt.
    """
    missing = path.expanduser()
    while not missing.parent.is_dir():
        missing = missing.parent
    rest = path.expanduser().relative_to(missing)
    beside = islice(missing.parent.iterdir(), MOST_NAMES)
    # every name with the same suffix is alike to some degree
    alike = [entry.name for entry in beside if similar_names(missing.stem, [entry.stem])]
    likely = [missing.with_name(name) / rest for name in similar_names(missing.name, alike)]
    there = [str(other) for other in likely if other.exists()]
    return did_you_mean(there) if there else ""


def local_model(source: str | Path) -> Path | None:
    """A model's folder or file; None if it is not here but may be on the hub."""
    path = local_path(source)
    if path.exists():
        return path
    name = str(source)
    beside = bool(path.parent.name) and path.parent.is_dir()
    if not HUB_ID.fullmatch(name) or name.startswith(".") or beside:
        raise UsageError("There is no folder {name!r}.{hint}", name=name, hint=similar_path(path))
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise MalmoiError(
            "There is no folder {name!r}, and HF_HUB_OFFLINE forbids looking for it on the "
            "hub.{hint}",
            name=name,
            hint=similar_path(path),
        )
    return None


def names_file(text: str) -> bool:
    """Whether a text is the path of a file; a long one, or one with a NUL, cannot be."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def is_adapter(source: str | Path) -> bool:
    """Whether a folder holds an adapter, in PEFT's format, instead of a whole model."""
    return (local_path(source) / ADAPTER_CONFIG).is_file()
