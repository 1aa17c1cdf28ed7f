"""Text at any URL that fsspec knows: s3://, gs://, hf://, https://, memory://…

A file is fetched whole when it is read. The latest ones are kept until the process ends, since a
run reads its text more than once.
"""

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from malmoi.errors import MalmoiError, ensure, explained
from malmoi.system.native import temporary_folder
from malmoi.system.storage import StoredFile, fetch_file, open_url
from malmoi.text.formats import FoundDocument, FoundLines, ReadOptions
from malmoi.text.sources import FileSource, format_of, known_format

KEPT_BYTES = 4 << 30


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
        copy = FileSource(COPIES.fetch(self), self.kind)
        with explained(MalmoiError, "{name}: {error}", name=self.name):
            yield from copy.documents(want)

    def fingerprint(self) -> list[Any]:
        return [self.name, self.size, str(self.files.ukey(self.path))]


def remote_files(given: str) -> list[RemoteFile]:
    """The files of a URL: one, those of a folder, or those that match a glob."""
    files, path = open_url(given)
    with explained(Exception, "{given} cannot be opened: {error}", given=given):
        if any(sign in path for sign in "*?["):
            found = files.glob(path)
        else:
            found = files.find(path) if files.isdir(path) else [files.info(path)["name"]]
    if found == [path]:
        return [RemoteFile(files, path, known_format(PurePosixPath(path)))]
    kinds = {path: format_of(Path(path)) for path in sorted(found)}
    readable = [RemoteFile(files, path, kind) for path, kind in kinds.items() if kind]
    ensure(readable, "{given} has no file that can be read.", given=given)
    return readable


class LocalCopies:
    """The latest files that were fetched, up to KEPT_BYTES and always the newest."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[str, ...], Path] = OrderedDict()
        self.lock = threading.Lock()

    def fetch(self, file: RemoteFile) -> Path:
        with self.lock:
            key = tuple(map(str, file.fingerprint()))
            if key not in self.kept:
                parent = Path(tempfile.mkdtemp(dir=temporary_folder()))
                stored = StoredFile(file.path, file.size, None)
                target = parent / PurePosixPath(file.path).name
                self.kept[key] = fetch_file(file.files, stored, target)
            self.kept.move_to_end(key)
            while len(self.kept) > 1 and self._bytes() > KEPT_BYTES:
                self.kept.popitem(last=False)[1].unlink()
            return self.kept[key]

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self.kept.values())


COPIES = LocalCopies()
