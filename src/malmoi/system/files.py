"""Atomic writes, locked folders, and explanations of disk errors."""

import errno
import json
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from stat import S_IMODE
from tempfile import mkdtemp
from typing import IO
from zlib import crc32

from malmoi.errors import MalmoiError, UsageError, explained, require_that
from malmoi.messages import msg

LOCK_NAME = ".lock"
PARTIAL_SUFFIX = ".tmp"
# a partial file or folder ends in its writer: the machine, which may share the disk with others,
# and the process
WRITER = re.compile(r"\.(?:(?P<machine>[0-9a-f]{8})-)?(?P<process>\d+)\.tmp")
SCRATCH = ".scratch-"
UNFINISHED = ".unfinished-"  # in a folder whose files are not all there yet
_in_use: set[str] = set()  # folders that this process writes to
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
    if (number := _errno(error)) not in REFUSALS:
        return None
    reason, advice = map(msg, REFUSALS[number])
    failed = "could not be read or written" if number == errno.EIO else "could not be written"
    return DiskError(
        "{reason}: {where} {failed}. {advice} and run the same command again; what was finished "
        "is kept.",
        reason=reason,
        where=getattr(error, "filename", None) or what,
        failed=msg(failed),
        advice=advice,
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
    """A path in a folder of its own beside the target; the file is flushed and moved into place.

    On errors the folder is removed, and after a kill by the next writer beside it: with all that a
    library left there. The file has the mode that the umask gives, whatever a library made of it.
    """
    _check_no_folder(path)
    with explain_disk_errors(path), _own_folder(path.parent, SCRATCH) as own:
        beside = own / path.name
        beside.touch()
        mode = S_IMODE(beside.stat().st_mode)
        yield beside
        beside.chmod(mode)
        flush_to_disk(beside)
        beside.replace(path)


@contextmanager
def _own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder of this process in `parent`; those of killed ones are removed."""
    suffix = f".{_machine()}-{os.getpid()}{PARTIAL_SUFFIX}"
    try:
        folder = Path(mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
    except OSError as error:
        error.filename = str(parent)
        raise
    _in_use.add(folder.name)
    try:
        _remove_partial_files(parent.glob(f"{prefix}*{PARTIAL_SUFFIX}"), shared=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _in_use.discard(folder.name)


def _machine() -> str:
    return f"{crc32(platform.node().encode()):08x}"


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


def file_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            checksum = crc32(chunk, checksum)
    return checksum


def _check_no_folder(path: Path) -> None:
    require_that(
        not path.is_dir(),
        "{path} is a folder where a file should be written: move it away, or choose another path.",
        path=path,
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
def output_folder(folder: Path) -> Iterator[Path]:
    """Where to write the files of a folder: in a free one they appear when all are written.

    A new folder is removed if that fails.
    """
    is_new = not folder.exists()
    with explain_disk_errors(folder):
        make_folder(folder)
        place = _own_folder(folder, UNFINISHED) if _is_free(folder) else nullcontext(folder)
        try:
            with place as own:
                _remove_partial_files(folder.glob(f".*{PARTIAL_SUFFIX}"), shared=True)
                yield own
                for path in list(own.iterdir()) if own != folder else ():
                    target = folder / path.name
                    if target.is_dir():  # of a writer that was killed here
                        shutil.rmtree(target)
                    path.replace(target)
        except BaseException:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as `parent`, removed at the end or after a kill."""
    with explain_disk_errors(parent), _own_folder(parent, SCRATCH) as folder:
        yield folder


def make_folder(folder: Path) -> None:
    with explained(
        (FileExistsError, NotADirectoryError),
        "{folder} is a file, or lies inside one; give a folder.",
        raises=UsageError,
        folder=folder,
    ):
        folder.mkdir(parents=True, exist_ok=True)


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
                if new and [path.name for path in folder.glob("*")] == [LOCK_NAME]:
                    shutil.rmtree(folder, ignore_errors=True)  # Windows keeps an open file
                raise


@contextmanager
def _file_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Locks a file, on Windows too; it stays, since others may be waiting for it."""
    from filelock import FileLock, Timeout  # imports much

    lock = FileLock(path)
    with explained(
        Timeout,
        "Another process is using {parent}: wait for it to finish, or choose another folder.",
        parent=path.parent,
    ):
        held = lock.acquire(timeout=-1 if wait else 0)
    with held:
        yield


@contextmanager
def _whole_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    with _file_lock(folder / LOCK_NAME, wait=wait):
        for other in folder.glob(f".*{LOCK_NAME}"):  # of those who share it
            with _file_lock(other, wait=wait):
                pass
            other.unlink(missing_ok=True)  # whoever locks it now is refused the whole
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


def _remove_partial_files(halves: Iterable[Path], *, shared: bool = False) -> None:
    """Removes what killed processes left, but no folder that we did not create.

    If the folder is `shared`, another machine may be writing its files.
    """
    with suppress(FileNotFoundError):  # another writer has removed its own meanwhile
        for half in [half for half in halves if _is_left(half, shared=shared)]:
            if half.is_file():
                half.unlink(missing_ok=True)
            elif half.name.startswith((SCRATCH, UNFINISHED)):
                shutil.rmtree(half, ignore_errors=True)


def _is_left(half: Path, *, shared: bool) -> bool:
    writer = WRITER.fullmatch(half.name, half.name.rfind(".", 0, -len(PARTIAL_SUFFIX)))
    if writer is None:
        return False
    if writer["machine"] not in (None, _machine()):
        return not shared
    process = int(writer["process"])
    # in a container every first process has the number 1
    own = process == os.getpid() and half.name.startswith((SCRATCH, UNFINISHED))
    return half.name not in _in_use if own else not _runs(process)


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
    require_that(
        overwrite or (_is_free(out) if out.is_dir() else not out.is_file()),
        "{out} already exists; choose another --out, or pass --overwrite.",
        out=out,
    )


def _is_free(folder: Path) -> bool:
    """Whether a folder is empty, or holds no more than a writer left that was killed there."""
    left = [path for path in folder.glob(f".*{PARTIAL_SUFFIX}") if _is_left(path, shared=True)]
    return any(path.name.startswith(UNFINISHED) for path in left) or not (
        {*folder.iterdir()} - {*left}
    )
