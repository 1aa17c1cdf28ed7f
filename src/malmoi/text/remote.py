"""Text at any URL that fsspec knows: s3://, gs://, hf://, https://, memory://…

A file is fetched whole when it is read, and checked by its size. The latest ones are kept until the
process ends, since a run reads its text more than once.
"""

import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from malmoi.errors import MalmoiError, explained, first_line
from malmoi.messages import StatusLog, msg
from malmoi.system.packages import optional_package
from malmoi.text.formats import FoundDocument, FoundLines, ReadOptions
from malmoi.text.sources import FileSource, format_of, known_format

logger = StatusLog(__name__)

ATTEMPTS = 4
FIRST_WAIT = 0.5  # seconds after the first failure, twice as long after each other
KEPT_BYTES = 4 << 30
MISSING = (FileNotFoundError, PermissionError, NotADirectoryError)  # trying again does not help


@dataclass(frozen=True)
class RemoteFile:
    """One file of an fsspec file system."""

    files: Any
    path: str
    kind: str

    @property
    def name(self) -> str:
        return str(self.files.unstrip_protocol(self.path))

    @cached_property
    def size(self) -> int:
        return int(self.files.size(self.path) or 0)

    def documents(self, want: ReadOptions) -> Iterator[FoundDocument | FoundLines]:
        with explained(MalmoiError, "{name}: {error}", name=self.name):
            yield from FileSource(COPIES.fetch(self), self.kind).documents(want)

    def fingerprint(self) -> list[Any]:
        return [self.name, self.size, str(self.files.ukey(self.path))]


def remote_files(given: str) -> list[RemoteFile]:
    """The files of a URL: one, those of a folder, or those that match a glob."""
    url_to_fs = optional_package("fsspec", given).url_to_fs
    try:
        files, path = url_to_fs(given)
        if any(sign in path for sign in "*?["):
            found = files.glob(path)
        else:
            found = files.find(path) if files.isdir(path) else [files.info(path)["name"]]
    # every store has errors of its own, and some stores are packages of their own
    except Exception as error:
        raise MalmoiError(
            "{given} cannot be opened: {error}", given=given, error=first_line(error)
        ) from error
    if found == [path]:
        return [RemoteFile(files, path, known_format(PurePosixPath(path)))]
    kinds = {path: format_of(Path(path)) for path in sorted(found)}
    readable = [RemoteFile(files, path, kind) for path, kind in kinds.items() if kind]
    if not readable:
        raise MalmoiError("{given} has no file that can be read.", given=given)
    return readable


class LocalCopies:
    """The latest files that were fetched, up to KEPT_BYTES and always the newest."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[str, ...], Path] = OrderedDict()
        self.lock = threading.Lock()

    @cached_property
    def folder(self) -> str:
        folder = tempfile.mkdtemp(prefix="malmoi-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def fetch(self, file: RemoteFile) -> Path:
        with self.lock:
            key = tuple(map(str, file.fingerprint()))
            if key not in self.kept:
                parent = Path(tempfile.mkdtemp(dir=self.folder))
                self.kept[key] = _fetched(file, parent / PurePosixPath(file.path).name)
            self.kept.move_to_end(key)
            while len(self.kept) > 1 and self._bytes() > KEPT_BYTES:
                self.kept.popitem(last=False)[1].unlink()
            return self.kept[key]

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self.kept.values())


COPIES = LocalCopies()


def _fetched(file: RemoteFile, target: Path) -> Path:
    """Fetches a file, again if the connection breaks or ends early."""
    for attempt in range(ATTEMPTS):
        try:
            file.files.get_file(file.path, str(target))
            if file.size in (0, target.stat().st_size):
                return target
            why: str = msg(
                "{got} of {size} bytes arrived", got=target.stat().st_size, size=file.size
            )
        except MISSING as error:
            raise MalmoiError("it cannot be read: {error}", error=first_line(error)) from error
        except Exception as error:
            why = first_line(error)
        if attempt + 1 < ATTEMPTS:
            logger.info("{name}: {why}; trying again.", name=file.name, why=why)
            time.sleep(FIRST_WAIT * 2**attempt)
    raise MalmoiError("it could not be fetched: {why}", why=why)
