"""From a file on disk to decoded lines: compression by suffix, encoding by a look at the bytes, bad lines told.

A line longer than a piece is given in pieces, so memory stays bounded whatever the file holds.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from malmoi.errors import MalmoiError

PIECE = 1 << 24  # bytes of one line that are decoded at once
SAMPLE = 4 << 20  # bytes that decide about the encoding and the shape of a file
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_UNREADABLE = "\udcff"  # stands for bytes that are no text; a lone surrogate, so that no text contains it
Bad = Callable[[int, str], None]


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed; a file that is missing, locked or damaged is a sentence."""
    try:
        with _open(path) as stream:
            yield stream
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise MalmoiError(f"{path} is damaged or cut off ({error}); fetch it again.") from error
    except OSError as error:
        raise MalmoiError(f"{path} cannot be read: {error.strerror or error}.") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        return _zstandard(path)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return cast(IO[bytes], openers.get(path.suffix, Path.open)(path, "rb"))


def _zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise MalmoiError(f"{path} needs the package zstandard: pip install zstandard.") from error
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True))


def encoding_of(sample: bytes) -> str:
    """utf-8, utf-8-sig, utf-16 (by its mark) or cp949 (which contains EUC-KR), from the first bytes of a file."""
    for mark, name in _MARKS:
        if sample.startswith(mark):
            return name
    ours = [line for line in sample.split(b"\n")[:-1] or [sample] if not line.isascii()]
    korean = sum(_strict(line, "utf-8") is None and _korean(line) is not None for line in ours)
    return "cp949" if korean * 2 > len(ours) else "utf-8"


def _strict(line: bytes, encoding: str) -> str | None:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError:
        return None


def _korean(line: bytes) -> str | None:
    """As cp949, if that gives Korean: nearly any Latin-1 text decodes as well, but not into Hangul."""
    text = _strict(line, "cp949")
    if text is None:
        return None
    foreign = len(re.findall(r"[^\x00-\x7f]", text))
    return text if len(re.findall(r"[가-힣ㄱ-ㆎ]", text)) * 2 >= foreign else None


def lines(stream: IO[bytes], encoding: str, bad: Bad) -> Iterator[tuple[int, str, bool]]:
    """(number, text, whether the line ends here); a line that is no text is told to `bad` and left out."""
    read = _wide_lines(stream, encoding) if encoding == "utf-16" else _byte_lines(stream, encoding)
    for number, text, ends in read:
        if text is None:
            bad(number, f"not readable as {encoding}")
        else:
            yield number, text, ends


def _byte_lines(stream: IO[bytes], encoding: str) -> Iterator[tuple[int, str | None, bool]]:
    number, rest = 1, b""
    korean = encoding == "cp949"
    if encoding == "utf-8-sig":
        stream.read(len(codecs.BOM_UTF8))
    while piece := stream.readline(PIECE):
        ends = piece.endswith(b"\n")
        line = rest + piece if rest else piece
        rest = b""
        if not ends and len(piece) == PIECE:
            line, rest = _cut(line, korean)
        yield number, _decode(line.rstrip(b"\r\n") if ends else line, korean), ends
        number += ends
    if rest:
        yield number, _decode(rest, korean), False


def _decode(line: bytes, korean: bool) -> str | None:
    """By the encoding of the file first, then by the other one: files are pasted together from both."""
    if korean:
        text = _strict(line, "cp949")
        return _strict(line, "utf-8") if text is None else text
    text = _strict(line, "utf-8")
    return _korean(line) if text is None else text


def _cut(line: bytes, korean: bool) -> tuple[bytes, bytes]:
    """Part of an endless line up to its last space, or at least to the end of a character, and the rest."""
    at = line.rfind(b" ", len(line) // 2) + 1
    if not at:
        at = len(line)
        decoder = codecs.getincrementaldecoder("cp949" if korean else "utf-8")("replace")
        decoder.decode(line[-4096:] if korean else line[-4:])
        at -= len(decoder.getstate()[0])
    return line[:at], line[at:]


def _wide_lines(stream: IO[bytes], encoding: str) -> Iterator[tuple[int, str | None, bool]]:
    """UTF-16 has no newline byte to look for, so it is decoded first; broken pairs are marked on the way."""
    codecs.register_error("malmoi.mark", _mark)
    reader = io.TextIOWrapper(stream, encoding, errors="malmoi.mark", newline=None)
    number = 1
    while piece := reader.readline(PIECE // 2):
        ends = piece.endswith("\n")
        yield number, None if _UNREADABLE in piece else piece.removesuffix("\n"), ends
        number += ends
    reader.detach()


def _mark(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _UNREADABLE, error.end
