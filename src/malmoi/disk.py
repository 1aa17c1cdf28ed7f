"""Files that are wholly there or not, folders with one writer at a time, and a full disk told in a sentence."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from malmoi.errors import MalmoiError, UsageError

LOCK, HALF = ".lock", ".tmp"


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path beside the target; what is written there is flushed to the disk and moved into place, or goes."""
    beside = path.with_name(f".{path.name}.{os.getpid()}{HALF}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a path beside the target, then moves what it wrote into place."""
    with _beside(path) as beside:
        write(beside)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes its place when all of it is there."""
    with _beside(path) as beside, beside.open("wb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    with written(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


@contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """One process at a time in a folder, which is made if need be; a second one waits, or is refused."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"{folder} is a file; name a folder.") from error
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise MalmoiError(
                f"Another process is at work in {folder}: wait for it, or name another folder."
            ) from error
        _sweep(folder)
        yield


def _sweep(folder: Path) -> None:
    """Removes what processes that were killed left half written."""
    for half in folder.rglob(f".*{HALF}"):
        writer = half.name.removesuffix(HALF).rpartition(".")[2]
        if writer.isdecimal() and not _runs(int(writer)):
            half.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


@contextmanager
def full_disk_told(what: str) -> Iterator[None]:
    """Turns a full disk into a sentence that says what could not be written; the same command can go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MalmoiError(
            f"The disk is full: {what}. Free some space and run the same command again; it goes on where it stopped."
        ) from error
