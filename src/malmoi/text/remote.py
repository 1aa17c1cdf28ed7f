"""Text at any URL that fsspec knows: s3://, gs://, hf://, https://, memory://…

A file is fetched whole when it is read. The latest ones are kept until the process ends, since a
run reads its text more than once.
"""

import tempfile
import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

from malmoi.errors import MalmoiError, ensure, explained
from malmoi.system.native import temporary_folder
from malmoi.system.storage import StoredFile, fetch_file, open_url
from malmoi.text.formats import FoundDocuments, ReadOptions
from malmoi.text.sources import FileSource, OtherSource, format_of, known_format

KEPT_BYTES = 4 << 30


def _remote_file(files: Any, path: str, kind: str) -> OtherSource:
    name = str(files.unstrip_protocol(path))
    size = int(files.size(path) or 0)

    def documents(want: ReadOptions) -> FoundDocuments:
        copy = FileSource(COPIES.fetch(files, StoredFile(path, size, None), fingerprint()), kind)
        with explained(MalmoiError, "{name}: {error}", name=name):
            yield from copy.documents(want)

    def fingerprint() -> list[Any]:
        return [name, size, str(files.ukey(path))]

    return OtherSource(name, size, documents, fingerprint)


def remote_files(given: str) -> list[OtherSource]:
    """The files of a URL: one, those of a folder, or those that match a glob."""
    files, path = open_url(given)
    with explained(Exception, "{given} cannot be opened: {error}", given=given):
        if any(sign in path for sign in "*?["):
            found = files.glob(path)
        else:
            found = files.find(path) if files.isdir(path) else [files.info(path)["name"]]
    if found == [path]:
        return [_remote_file(files, path, known_format(PurePosixPath(path)))]
    kinds = {path: format_of(Path(path)) for path in sorted(found)}
    readable = [_remote_file(files, path, kind) for path, kind in kinds.items() if kind]
    ensure(readable, "{given} has no file that can be read.", given=given)
    return readable


class LocalCopies:
    """The latest files that were fetched, up to KEPT_BYTES and always the newest."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[str, ...], Path] = OrderedDict()
        self.lock = threading.Lock()

    def fetch(self, files: Any, stored: StoredFile, fingerprint: list[Any]) -> Path:
        with self.lock:
            key = tuple(map(str, fingerprint))
            if key not in self.kept:
                parent = Path(tempfile.mkdtemp(dir=temporary_folder()))
                target = parent / PurePosixPath(stored.path).name
                self.kept[key] = fetch_file(files, stored, target)
            self.kept.move_to_end(key)
            while len(self.kept) > 1 and self._bytes() > KEPT_BYTES:
                self.kept.popitem(last=False)[1].unlink()
            return self.kept[key]

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self.kept.values())


COPIES = LocalCopies()
