"""The folder of a corpus: whose build it holds."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malmoi.disk import LOCK
from malmoi.errors import UsageError
from malmoi.run_folder import RunFolder


def run_folder(out: Path) -> RunFolder:
    others = {name: f"of other {words}" for name, words in (("sources", "sources"), ("against", "test sets"))}
    others["good"] = "of other good text"
    return RunFolder(out, "corpus.json", "corpus", can_restart=True, unreadable=others)


def begin(out: Path, record: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
    """The folder's record: this build's, or the finished one; another build or strange files are refused."""
    if again:
        _forget(out)
    if not (out / "corpus.json").is_file() and any(file.name != LOCK for file in out.iterdir()):
        raise UsageError(f"{out} is not empty and holds no corpus; name another folder.")
    found = run_folder(out).begin(record)
    (out / "work").mkdir(exist_ok=True)
    return found


def _forget(out: Path) -> None:
    """Removes what a build writes, and nothing else."""
    if not (out / "corpus.json").is_file():
        return
    shutil.rmtree(out / "work", ignore_errors=True)
    for path in (*out.glob("shard-*.jsonl"), out / "corpus.json"):
        path.unlink()
