"""Files and folders at any URL that fsspec knows: s3://, gs://, hf://, memory://…

What is read is fetched into the cache, checked, and kept until it changes at the URL. A folder to
be written has a working copy in the cache: what changed is uploaded beside the work, the list of
its files last. So a reader finds one whole state, this one or the one before, and the same command
goes on from it on any machine.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from malmoi.errors import MalmoiError, ensure, explained, first_line
from malmoi.messages import logger
from malmoi.system.files import file_checksum, flush_to_disk, folder_lock, write_text
from malmoi.system.native import cache_or_temporary
from malmoi.system.packages import optional_package
from malmoi.system.untrusted import parse_object

T = TypeVar("T")

ATTEMPTS = 4
FIRST_WAIT = 0.5  # seconds after the first failure, twice as long after each other
MISSING = (FileNotFoundError, PermissionError, NotADirectoryError)  # trying again does not help
READ_WHOLE = 16 << 20  # bytes of a file that is uploaded from memory
LIST = "malmoi-files.json"  # in a folder that was uploaded
WORK = "@work"  # the version that is written


# ------------------------------------------------------------------ URLs, and how they are reached


def remote_url(given: str | Path) -> str:
    """The URL that is given, also as a Path, which makes s3:/b of s3://b; "" if it is a path."""
    text = given if isinstance(given, str) else given.as_posix().replace(":/", "://", 1)
    found = re.match(r"([a-z][a-z0-9+]+)://(.+)", text)
    if not found:
        return ""
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2].strip('/')}"


def open_url(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path there."""
    url_to_fs = optional_package("fsspec", url).url_to_fs
    # every store has errors of its own, and some stores are packages of their own
    with explained(Exception, "{given} cannot be opened: {error}", given=url):
        files, path = url_to_fs(url, **({"auto_mkdir": True} if url.startswith("file:") else {}))
        files.invalidate_cache()
        return files, path


def persistently(name: str, action: Callable[[], T]) -> T:
    """The result of an action over a network, tried again if it fails and that may help."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except MISSING as error:
            raise MalmoiError(
                "{name} cannot be reached: {error}.", name=name, error=first_line(error)
            ) from error
        except Exception as error:
            why = str(error) if isinstance(error, MalmoiError) else first_line(error)
        if attempt + 1 < ATTEMPTS:
            logger.info("{name}: {why}; trying again.", name=name, why=why)
            time.sleep(FIRST_WAIT * 2**attempt)
    raise MalmoiError("{name} could not be transferred: {why}.", name=name, why=why)


class StoredFile(NamedTuple):
    """Where the contents of a file lie in a store, and what they are."""

    path: str
    size: int  # 0: unknown
    checksum: int | None  # None: unknown
    version: str = ""  # if the checksum is unknown


def fetch_file(files: Any, file: StoredFile, target: Path) -> Path:
    """Fetches a file, again if the connection breaks or ends early."""

    def once() -> Path:
        files.get_file(file.path, str(target))
        got, size = target.stat().st_size, file.size
        ensure(size in (0, got), "{got} of {size} bytes arrived", got=got, size=size)
        ensure(file.checksum in (None, file_checksum(target)), "its checksum is wrong")
        return target

    return persistently(str(files.unstrip_protocol(file.path)), once)


Listing = dict[str, StoredFile]  # by name below the folder; that of a file is ""


class Store:
    """The file or folder at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files, self.root = open_url(url)

    def listing(self) -> Listing:
        """The files of the last complete upload, or whatever is there; empty if nothing is."""
        return persistently(self.url, self._listing)

    def _listing(self) -> Listing:
        self.files.invalidate_cache()
        if self.files.isfile(self.root):
            return {"": _as_found(self.files.info(self.root))}
        try:
            written = self.files.cat_file(f"{self.root}/{LIST}").decode()
        except FileNotFoundError:
            found = self.files.find(self.root, detail=True)
            return {path[len(self.root) :].strip("/"): _as_found(found[path]) for path in found}
        listed = parse_object(written, f"{self.url}/{LIST}").object("files")
        return {name: _as_listed(self.root, name, listed[name]) for name in listed}

    def put(self, source: Path, path: str) -> StoredFile:
        """Uploads a file, again if the connection breaks or the file has changed meanwhile."""

        def once() -> StoredFile:
            before = source.stat()
            size = before.st_size
            if size <= READ_WHOLE:  # it may be growing
                contents = source.read_bytes()
                size, checksum = len(contents), crc32(contents)
                self.files.pipe_file(path, contents)
            else:
                checksum = _known_checksum(source, size, before.st_mtime_ns)
                self.files.put_file(str(source), path)
                ensure(
                    source.stat().st_mtime_ns == before.st_mtime_ns,
                    "the file has changed meanwhile",
                )
            self.files.invalidate_cache()
            got = self.files.size(path)
            ensure(got == size, "{got} of {size} bytes arrived", got=got, size=size)
            return StoredFile(path, size, checksum)

        return persistently(f"{self.url}: {source.name}", once)

    def write_list(self, listed: Listing) -> None:
        values = {n: [f.path[len(self.root) + 1 :], f.size, f.checksum] for n, f in listed.items()}
        text = json.dumps({"files": values}, ensure_ascii=False)
        persistently(
            f"{self.url}/{LIST}", lambda: self.files.pipe_file(f"{self.root}/{LIST}", text.encode())
        )

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self.files.rm_file(path)


def _as_found(info: dict[str, Any]) -> StoredFile:
    return StoredFile(info["name"], int(info.get("size") or 0), None, str(info))


def _as_listed(root: str, name: str, values: Any) -> StoredFile:
    path, size, checksum = values
    ensure(
        ".." not in PurePosixPath(f"{name}/{path}").parts and not name.startswith("/"),
        "{url} is damaged: it lists the file {name!r}.",
        url=root,
        name=name,
    )
    return StoredFile(f"{root}/{path}", int(size), int(checksum))


def _digest(listed: Listing) -> str:
    return f"{crc32(repr(sorted(listed.items())).encode()):08x}"


@lru_cache(maxsize=4096)
def _known_checksum(path: Path, size: int, modified: int) -> int:
    return file_checksum(path)


# ------------------------------------------------------------------ what is read


def local_path(given: str | Path) -> Path:
    """The path that is given; of a URL, that of its copy in the cache, which is fetched."""
    url = remote_url(given)
    return fetched(url) if url else Path(given).expanduser()


def fetched(url: str) -> Path:
    """The copy of a file or folder; a folder that changes meanwhile is fetched as it is then."""
    store = Store(url)
    listed = store.listing()
    ensure(listed, "There is no file or folder {url}.", url=url)
    copy = _place(url, f"@{_digest(listed)}")
    with folder_lock(copy.parents[1], wait=True):
        if copy.exists():
            return copy
        half = _place(url, "@half")
        try:
            _mirror(store, listed, half)
        except MalmoiError:
            if store.listing() == listed:
                raise
            listed = {}
        else:
            copy.parent.mkdir(exist_ok=True)
            half.rename(copy)
            _remove_others(copy.parent)
    return copy if listed else fetched(url)


def _place(url: str, version: str) -> Path:
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
    return cache_or_temporary("storage").joinpath(scheme, *parts, version, parts[-1])


def _remove_others(kept: Path) -> None:
    """Removes the versions before this one; a copy that is worked on stays."""
    for other in kept.parent.glob("@*"):
        if other.name not in (kept.name, WORK):
            shutil.rmtree(other, ignore_errors=True)


def address(path: Path) -> str:
    """The URL of what is a copy, else the path."""
    cached = f"{cache_or_temporary('storage').as_posix()}/([^/]+)/(.+)/@\\w+/[^/]+(.*)"
    found = re.fullmatch(cached, path.as_posix())
    return f"{found[1]}://{found[2]}{found[3]}" if found else str(path)


def _mirror(store: Store, listed: Listing, place: Path) -> None:
    """Makes a folder what is listed; files that are known to be the same are not fetched."""
    for name in _names(place) - {*listed}:
        (place / name).unlink()
    for folder in sorted(place.rglob("*/"), reverse=True):
        with suppress(OSError):  # it has files
            folder.rmdir()
    for name, file in listed.items():
        target = place / name
        here = target.is_file() and target.stat().st_size == file.size
        if not (here and file.checksum == file_checksum(target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            flush_to_disk(fetch_file(store.files, file, target))


def _names(place: Path) -> set[str]:
    """The files of a folder; hidden ones are locks, or half written."""
    found = (path.relative_to(place) for path in place.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not any(p.startswith(".") for p in path.parts)}


# ------------------------------------------------------------------ what is written


@contextmanager
def working_copy(out: str | Path) -> Iterator[Path]:
    """Where to write: the path itself, or a copy of what is at a URL, uploaded as it changes.

    Of several processes on a machine the first uploads.
    """
    url = remote_url(out)
    if not url:
        yield Path(out)
        return
    copy = WorkingCopy(url)
    if os.environ.get("RANK", "0") != "0":
        copy.restore()
        yield copy.place
        return
    with folder_lock(copy.place.parent):
        copy.restore()
        _worked_on.append(copy)
        try:
            yield copy.place
        except BaseException:
            copy.finish(failed=True)
            raise
        else:
            copy.finish()
        finally:
            _worked_on.remove(copy)


def publish(folder: Path) -> None:
    """Uploads beside the work what changed in a folder, if it is in a copy that is worked on."""
    for copy in _worked_on:
        if copy.place in (folder, *folder.parents):
            copy.request()


class WorkingCopy:
    """The copy of what is at a URL, with a record of the list that it has last agreed with."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.place = _place(url, WORK)
        self.record = self.place.parent / ".agreed"
        self.listed: Listing = {}
        self.pool = ThreadPoolExecutor(1, "upload")
        self.requested: Future[None] | None = None

    def restore(self) -> None:
        """Makes the copy what is at the URL, unless it has gone on from that here."""
        with folder_lock(self.place.parents[1], wait=True):
            self.listed = self.store.listing()
            agreed = self.record.read_text() if self.record.is_file() else None
            if not self.listed:
                self.store.write_list({})  # says now that nothing can be written there
            if agreed == _digest(self.listed) or (agreed is None and not self.listed):
                return
            logger.info("Fetching {url} …", url=self.store.url)
            self.record.unlink(missing_ok=True)
            _mirror(self.store, self.listed, self.place)
            self._agree(self.listed)

    def request(self) -> None:
        """Uploads in another thread, once more if an upload is running."""
        if not self.requested or self.requested.running() or self.requested.done():
            self.requested = self.pool.submit(self._try_upload)

    def _try_upload(self) -> None:
        try:
            self.upload()
        except Exception as error:
            logger.warning(
                "{url} could not be updated: {error} The work goes on in {place}; the next save "
                "is uploaded again.",
                url=self.store.url,
                error=error,
                place=self.place,
            )

    def finish(self, *, failed: bool = False) -> None:
        """Uploads what is left, each file under its own name."""
        self.pool.shutdown(cancel_futures=True)
        if failed:
            self._try_upload()
            return
        with explained(
            Exception,
            "{place} is complete, but {url} could not be updated: {error} Run the same command "
            "again to upload it.",
            place=self.place,
            url=self.store.url,
        ):
            self.upload()
            self.upload(own_names=True)
        logger.info("Uploaded to {url}.", url=self.store.url)

    def upload(self, *, own_names: bool = False) -> None:
        """Uploads what changed, then the list, then removes what the list has no more.

        What the list has is not overwritten: a new version has another name until the work is done.
        """
        if self.place.is_file():
            self.store.remove([f"{self.store.root}/{LIST}"])
            self.store.put(self.place, self.store.root)
            return
        ensure(
            _digest(self.store.listing()) == _digest(self.listed),
            "{url} was changed from elsewhere: let one machine at a time write to it.",
            url=self.store.url,
        )
        found: Listing = {}
        while {*found} != (names := _names(self.place)):  # states come and go meanwhile
            known = {**self.listed, **found}
            each = {n: self._stored(n, known.get(n), own_names=own_names) for n in sorted(names)}
            found = {name: file for name, file in each.items() if file is not None}
        if found == self.listed:
            return
        self.store.write_list(found)
        used = {file.path for file in found.values()}
        old = [file.path for file in self.listed.values() if file.path not in used]
        self._agree(found)
        self.store.remove(old)

    def _stored(self, name: str, known: StoredFile | None, *, own_names: bool) -> StoredFile | None:
        """Where a file is in the store, uploaded if it was not; None if it is gone meanwhile."""
        path = self.place / name
        plain = f"{self.store.root}/{name}"
        try:
            now = path.stat()
            checksum = _known_checksum(path, now.st_size, now.st_mtime_ns)
            same = known is not None and known[1:3] == (now.st_size, checksum)
            if known is not None and same and (known.path == plain or not own_names):
                return known
            taken = any(file.path == plain for file in self.listed.values())
            return self.store.put(path, f"{plain}.{checksum:08x}" if taken else plain)
        except (FileNotFoundError, MalmoiError):
            if path.exists():
                raise
            return None

    def _agree(self, listed: Listing) -> None:
        self.listed = listed
        write_text(self.record, _digest(listed))


_worked_on: list[WorkingCopy] = []
