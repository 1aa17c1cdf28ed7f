"""Atomic writes, locked folders, and explanations of disk errors."""

import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import IO

from malmoi.errors import MalmoiError, UsageError

LOCK_NAME = ".lock"
PARTIAL_SUFFIX = ".tmp"
SCRATCH = ".scratch-"
# errors of a disk, and what to do about them
REFUSALS = {
    errno.ENOSPC: ("The disk is full", "Free some space"),
    errno.EDQUOT: ("Your disk quota is used up", "Free some space"),
    errno.EFBIG: (
        "The file is larger than this disk or this process may write",
        "Use another disk or raise the limit",
    ),
    errno.EROFS: ("The disk is read-only", "Make it writable, or choose another folder,"),
    errno.EIO: ("The disk reports an I/O error", "Check the disk"),
}


class DiskError(MalmoiError):
    """A file could not be written; nothing is left half-written."""


@contextmanager
def explain_disk_errors(what: str | Path) -> Iterator[None]:
    """Turns disk errors (full, failing) into a sentence about `what`; others propagate."""
    try:
        yield
    except Exception as error:
        explained = disk_error(error, what)
        if explained is None:
            raise
        raise explained from error


def disk_error(error: Exception, what: str | Path) -> DiskError | None:
    """The sentence for a disk error of Python, NumPy or safetensors; None for any other error."""
    refusal = REFUSALS.get(_errno(error))
    if refusal is None:
        return None
    reason, advice = refusal
    where = getattr(error, "filename", None) or what
    failed = (
        "could not be read or written" if _errno(error) == errno.EIO else "could not be written"
    )
    return DiskError(
        f"{reason}: {where} {failed}. {advice} and run the same command again; what was finished "
        "is kept."
    )


def _errno(error: Exception) -> int:
    if isinstance(error, MalmoiError):
        return 0
    if isinstance(error, OSError) and error.errno:
        return error.errno
    # Rust libraries have the number in their message
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    # NumPy's tofile reports no number at all
    return errno.ENOSPC if re.search(r"\d+ requested and \d+ written", str(error)) else 0


@contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """A path beside the target; the file is flushed and moved into place, or removed on error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    _check_no_folder(beside, path)
    with explain_disk_errors(path):
        try:
            yield beside
            flush_to_disk(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder, which Windows does by itself."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_no_folder(*files: Path) -> None:
    for path in files:
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder where a file should be written: move it away, or choose "
                "another path."
            )


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a path beside the target, then moves the file into place."""
    with _temporary_path(path) as beside:
        write(beside)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces the target atomically once it is complete."""
    with _temporary_path(path) as beside, beside.open("wb") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """A folder for several files; if it is new, it is removed when writing any of them fails."""
    is_new = not folder.exists()
    with explain_disk_errors(folder):
        make_folder(folder)
        _remove_partial_files(folder.glob(f".*{PARTIAL_SUFFIX}"))
        try:
            yield
        except BaseException:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as `parent`, removed at the end or after a kill."""
    with explain_disk_errors(parent):
        _remove_partial_files(parent.glob(f"{SCRATCH}*{PARTIAL_SUFFIX}"))
        folder = Path(mkdtemp(prefix=SCRATCH, suffix=f".{os.getpid()}{PARTIAL_SUFFIX}", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{folder} is a file, or lies inside one; give a folder.") from error


@contextmanager
def folder_lock(folder: Path, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
    """Locks a folder, created if needed, for one process; a second one waits or is refused.

    Several processes may hold a shared lock together, also from several machines. Otherwise partial
    files of killed processes are removed first; disk errors are explained. A folder made for work
    that fails before it writes anything is removed again.
    """
    new = not (wait or shared or folder.exists())
    with explain_disk_errors(folder):
        make_folder(folder)
        _check_no_folder(folder / LOCK_NAME)
        with _shared_lock(folder) if shared else _whole_lock(folder, wait=wait):
            if not shared:
                _remove_partial_files(folder.rglob(f".*{PARTIAL_SUFFIX}"))
            try:
                yield
            except Exception:
                if new and [path.name for path in folder.iterdir()] == [LOCK_NAME]:
                    shutil.rmtree(folder)
                raise


@contextmanager
def _file_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Locks a file, on Windows too; it stays, since others may be waiting for it."""
    from filelock import FileLock, Timeout  # imports much

    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise MalmoiError(
            f"Another process is using {path.parent}: wait for it to finish, or choose another "
            "folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _whole_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    with _file_lock(folder / LOCK_NAME, wait=wait):
        for other in folder.glob(f".*{LOCK_NAME}"):  # shared locks
            with _file_lock(other, wait=wait):
                pass
        yield


@contextmanager
def _shared_lock(folder: Path) -> Iterator[None]:
    """A lock of one's own that a lock of the whole looks for, taken while nobody has the whole."""
    own = folder / f".{secrets.token_hex(8)}{LOCK_NAME}"
    with ExitStack() as held:
        with _file_lock(folder / f".begin{LOCK_NAME}", wait=True), _file_lock(folder / LOCK_NAME):
            held.callback(own.unlink, missing_ok=True)
            held.enter_context(_file_lock(own))
        yield


def _remove_partial_files(halves: Iterable[Path]) -> None:
    """Removes partial files of killed processes, but no folder that we did not create."""
    for half in halves:
        writer = half.name.removesuffix(PARTIAL_SUFFIX).rpartition(".")[2]
        if not writer.isdecimal() or _runs(int(writer)):
            continue
        if half.is_file():
            half.unlink(missing_ok=True)
        elif half.name.startswith(SCRATCH):
            shutil.rmtree(half, ignore_errors=True)


def _runs(process: int) -> bool:
    if sys.platform == "win32":  # where signal 0 is Ctrl-C
        import ctypes

        handle = ctypes.windll.kernel32.OpenProcess(0x1000, 0, process)  # may ask about it
        ctypes.windll.kernel32.CloseHandle(handle)
        return bool(handle)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


def require_free(out: Path, *, overwrite: bool) -> None:
    """Refuses to replace an existing file or non-empty folder unless `overwrite` is set."""
    taken = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if taken and not overwrite:
        raise UsageError(f"{out} already exists; choose another --out, or pass --overwrite.")
