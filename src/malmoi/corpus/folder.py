"""The folder of a corpus: whose build it holds, one process at a time, and what a full disk means."""

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from malmoi.corpus.stages import read_json, write_json
from malmoi.errors import MalmoiError, UsageError


def begin(out: Path, record: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
    """The folder's record: this build's, or the finished one; another build or strange files are refused."""
    path = out / "corpus.json"
    if again:
        _forget(out)
    before = read_json(path) if path.is_file() else {}
    if not before and any(file.name != "lock" for file in out.iterdir()):
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


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Only one process builds in a folder."""
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MalmoiError(f"Another process is at work in {out}; wait until it is done.") from None
        yield


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MalmoiError(
            f"The disk is full: {out} needs up to three times the text while it is made. Free some space and run the "
            "same command again; it goes on where it stopped."
        ) from error
