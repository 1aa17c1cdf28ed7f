"""From what a user names to a folder: a path, or a hub id where there is a network."""

import os
import re
from pathlib import Path

from malmoi.errors import MalmoiError, UsageError

FILES = ["*.json", "*.safetensors", "*.txt", "*.bpe", "*.model", "pytorch_model*.bin"]
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find(source: str | Path) -> Path:
    """The folder itself, or a hub model downloaded into the usual cache."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UsageError(f"{source} is a file; name the folder that holds config.json and the weights.")
    name = str(source)
    if not HUB_ID.fullmatch(name) or name.startswith(".") or (folder.parent.name and folder.parent.is_dir()):
        raise UsageError(f"There is no folder {source}.")
    return _download(name)


def _download(name: str) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise MalmoiError(f"There is no folder {name!r}, and HF_HUB_OFFLINE forbids looking for it on the hub.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        hint = "install it with: pip install huggingface_hub"
        raise MalmoiError(
            f"There is no folder {name!r}; to fetch a hub model huggingface_hub is needed, {hint}."
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # every transport has errors of its own; none of them is ours to handle
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MalmoiError(f"There is no folder {name!r}, and the hub could not be asked for it: {reason}") from error
