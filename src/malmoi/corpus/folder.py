"""The folder of a corpus: whose build it holds."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malmoi.corpus.stages import read_json
from malmoi.disk import LOCK, write_json
from malmoi.errors import UsageError


def begin(out: Path, record: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
    """The folder's record: this build's, or the finished one; another build or strange files are refused."""
    path = out / "corpus.json"
    if again:
        _forget(out)
    before = read_json(path) if path.is_file() else {}
    if not before and any(file.name != LOCK for file in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no corpus; name another folder.")
    if changed := [name for name, value in record.items() if before and before.get(name) != value]:
        raise UsageError(
            f"{out} holds another corpus (other {', '.join(changed)}): give the same again to go on with it, name "
            "another folder, or start anew with --again (again=True)."
        )
    if not before:
        write_json(path, record)
    (out / "work").mkdir(exist_ok=True)
    return before or dict(record)


def _forget(out: Path) -> None:
    """Removes what a build writes, and nothing else."""
    if not (out / "corpus.json").is_file():
        return
    shutil.rmtree(out / "work", ignore_errors=True)
    for path in (*out.glob("shard-*.jsonl"), out / "corpus.json"):
        path.unlink()
