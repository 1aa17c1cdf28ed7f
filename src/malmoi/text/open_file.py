"""Opens files of data, decompressed by their suffix; whatever is wrong with one names the file."""

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from malmoi.errors import MalmoiError, first_line
from malmoi.system.limits import MAX_GROWTH, MIN_UNPACKED_BYTES
from malmoi.system.paths import require_path

T = TypeVar("T")
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
LONGEST_FRAME_HEADER = 18  # of Zstandard, in bytes
LAST_BLOCK = 1
RLE_BLOCK = 1  # a byte that is repeated


def uncompressed_name(path: Path) -> Path:
    """The path without the suffix of a compression."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


@contextmanager
def open_bytes(path: Path, *, decompress: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file, decompressed by default; a missing or damaged one raises MalmoiError."""
    try:
        with _open(path) if decompress else path.open("rb") as stream:
            yield stream
    except _damages() as error:
        raise MalmoiError(
            "{path} is damaged or truncated ({error}); fetch it again.", path=path, error=error
        ) from error
    except OSError as error:
        raise MalmoiError(
            "{path} cannot be read: {strerror}.", path=path, strerror=error.strerror or error
        ) from error


def whole_items(path: Path, items: Iterator[T]) -> Iterator[T]:
    """The rows or documents that a reader finds in a file; any error of its names the file."""
    count = 0
    require_path(path)
    try:
        for item in items:
            yield item
            count += 1
    except MalmoiError:
        raise
    except Exception as error:  # every format has a library, and each has errors of its own
        kind = uncompressed_name(path).suffix
        place = f"{path}:{count + 1}" if count else str(path)
        raise MalmoiError(
            "{place} is damaged, or no {kind} file ({error}); fetch it again.",
            place=place,
            kind=kind,
            error=first_line(error),
        ) from error


def require_real_size(path: Path, unpacked: int) -> None:
    """Refuses a file that grows as no text does when it is unpacked, before it fills the memory."""
    limit = max(MIN_UNPACKED_BYTES, MAX_GROWTH * path.stat().st_size)
    if unpacked > limit:
        raise MalmoiError(
            "{path} unpacks to more than {limit:,} bytes, which no text of its size does: it "
            "is damaged, or made to fill the memory.",
            path=path,
            limit=limit,
        )


def read_whole(path: Path) -> bytes:
    """All bytes of a file, decompressed."""
    parts: list[bytes] = []
    with open_bytes(path) as stream:
        while piece := stream.read(1 << 20):
            parts.append(piece)
            require_real_size(path, len(parts) << 20)
    return b"".join(parts)


def _damages() -> tuple[type[Exception], ...]:
    known = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
    zstandard = sys.modules.get("zstandard")
    return known if zstandard is None else (*known, zstandard.ZstdError)


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        return _zstandard(path)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return cast(IO[bytes], openers.get(path.suffix, Path.open)(path, "rb"))


def _zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise MalmoiError(
            "{path} needs the package zstandard: pip install zstandard.", path=path
        ) from error
    with path.open("rb") as file:
        while file.read(1):
            file.seek(-1, io.SEEK_CUR)
            _skip_frame(file, zstandard)
    return io.BufferedReader(
        zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    )


def _skip_frame(file: IO[bytes], zstandard: Any) -> None:
    """Goes behind a frame (RFC 8878 §3.1): the package ends quietly where one is cut off."""
    start = file.tell()
    head = file.read(LONGEST_FRAME_HEADER)
    if head[1:4] == b"\x2a\x4d\x18":  # no text, to be skipped
        _skip(file, start + 8 + int.from_bytes(head[4:8], "little"))
        return
    about = zstandard.get_frame_parameters(head)
    file.seek(start + zstandard.frame_header_size(head))
    block = 0
    while not block & LAST_BLOCK:
        if len(header := file.read(3)) < 3:
            raise EOFError("the last frame has no end")
        block = int.from_bytes(header, "little")
        _skip(file, file.tell() + (1 if block >> 1 & 3 == RLE_BLOCK else block >> 3))
    _skip(file, file.tell() + 4 * about.has_checksum)


def _skip(file: IO[bytes], place: int) -> None:
    """Goes on to a place behind some bytes, which must be there."""
    file.seek(place - 1)
    if not file.read(1):
        raise EOFError("the last frame has no end")
