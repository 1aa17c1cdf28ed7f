"""Files of data, decompressed by their suffix, and their lines, decoded by what they hold.

Whatever is wrong with a file names it; bad lines are reported.

Long lines come in chunks, so memory stays bounded.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import IO, Any, TypeVar, cast
from unicodedata import category

from malmoi.errors import MalmoiError, UsageError, ensure, first_line
from malmoi.messages import msg
from malmoi.system.packages import optional_package
from malmoi.system.paths import require_path
from malmoi.system.untrusted import MAX_GROWTH, MAX_LINE_CHARACTERS, MIN_UNPACKED_BYTES

T = TypeVar("T")
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
ZSTANDARD_BYTES = 1 << 10  # decompressed at once: they may become 32,768 times as many


def uncompressed_name(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def unknown_format(path: PurePath, known: Iterable[str]) -> UsageError:
    """The error of a file whose suffix tells no format."""
    return UsageError(
        "{path} has an unknown format: its name should end in one of {kinds}.",
        path=path,
        kinds=shown_formats(known),
    )


def shown_formats(known: Iterable[str]) -> str:
    return f"{' '.join(known)}, also {' '.join(COMPRESSED)}"


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
        raise MalmoiError(
            "{place} is damaged, or no {kind} file ({error}); fetch it again.",
            place=f"{path}:{count + 1}" if count else str(path),
            kind=uncompressed_name(path).suffix,
            error=first_line(error),
        ) from error


def require_real_size(path: Path, unpacked: int) -> None:
    """Refuses a file that grows as no text does when it is unpacked, before it fills the memory."""
    limit = max(MIN_UNPACKED_BYTES, MAX_GROWTH * path.stat().st_size)
    ensure(
        unpacked <= limit,
        "{path} unpacks to more than {limit:,} bytes, which no text of its size does: it "
        "is damaged, or made to fill the memory.",
        path=path,
        limit=limit,
    )


def read_whole(path: Path) -> bytes:
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
        zstandard = optional_package("zstandard", path)
        return io.BufferedReader(_Zstandard(zstandard, path.open("rb")))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return cast(IO[bytes], openers.get(path.suffix, Path.open)(path, "rb"))


class _Zstandard(io.RawIOBase):
    """The frames of a file; the package's own reader ends quietly where the last is cut off."""

    def __init__(self, zstandard: Any, file: IO[bytes]) -> None:
        self._file = file
        self._begin = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._rest = io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (size := self._rest.readinto(buffer)):
            given = (self._frame and self._frame.unused_data) or self._file.read(ZSTANDARD_BYTES)
            if not given and self._frame and not self._frame.eof:
                raise EOFError("the last frame has no end")
            if not given:
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._begin()
            self._rest = io.BytesIO(self._frame.decompress(given))
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


MAX_LINE_BYTES = 1 << 24  # of one line that are decoded at once
BLOCK_BYTES = 1 << 18  # of several lines that are decoded at once
SAMPLE_BYTES = 4 << 20  # that determine the encoding and the rule for documents
_MARKS = (  # UTF-32's begins with UTF-16's, so it comes first
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_HEAD = 1 << 14  # bytes examined for UTF-16 and UTF-32
# Unicode categories that are rare in real text and frequent after a wrong guess
_UNUSUAL = {"Cc", "Cn", "Co", "Cs"}
# marks undecodable bytes; a lone surrogate, so no text can contain it
_UNREADABLE = "\udcff"
OnBadLine = Callable[[int, str], None]
HAS_NULS = "not text: it has NUL characters"
TOO_LONG = msg("longer than {most:,} characters", most=MAX_LINE_CHARACTERS)
# lines, of which None is undecodable; whether they end
DecodedLines = tuple[list[str | None] | list[str], bool]


def decode_sample(sample: bytes) -> tuple[str, str]:
    """The encoding of a file, and the text that it begins with.

    Guesses utf-8, utf-16, utf-32 (by BOM or NULs) or cp949 (which includes EUC-KR).
    """
    marked = next((name for mark, name in _MARKS if sample.startswith(mark)), None)
    encoding = marked or _wide_encoding(sample[:_HEAD])
    whole = sample[: sample.rfind(b"\n") + 1] or sample
    if encoding is None and (text := _strict(whole, "utf-8")) is not None:
        return "utf-8", text + sample[len(whole) :].decode("utf-8", "replace")
    encoding = encoding or _by_lines(whole)
    return encoding, sample.decode(encoding, "replace")


def _by_lines(whole: bytes) -> str:
    """The encoding of most lines that are not ASCII."""
    ours = [line for line in whole.split(b"\n") if not line.isascii()]
    korean = sum(_strict(line, "utf-8") is None and _korean(line) is not None for line in ours)
    return "cp949" if korean * 2 > len(ours) else "utf-8"


def _wide_encoding(head: bytes) -> str | None:
    """Detects UTF-16 or UTF-32 without a BOM: their spaces and newlines contain NULs."""
    if b"\0" not in head or (_begins(head, "utf-8") is not None and head.count(0) * 4 < len(head)):
        return None
    guesses = {name: text for name in _WIDE if (text := _begins(head, name)) is not None}
    unusual = {name: _unusual_share(text) for name, text in guesses.items()}
    best = min(unusual, key=unusual.__getitem__, default=None)
    return best if best is not None and unusual[best] <= 0.01 else None


def _begins(head: bytes, encoding: str) -> str | None:
    """Decodes the start of some bytes, whose last character may be incomplete."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _unusual_share(text: str) -> float:
    """The share of unusual characters; 1 if no space or newline supports the guess."""
    if not re.search("[ \n]", text):
        return 1.0
    return sum(category(sign) in _UNUSUAL for sign in text if sign not in "\t\n\r\f\v") / len(text)


def _strict(line: bytes, encoding: str) -> str | None:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError:
        return None


def _korean(line: bytes) -> str | None:
    """Decodes as cp949 if that gives Hangul: Latin-1 text often decodes too, but not to Hangul."""
    text = _strict(line, "cp949")
    if text is None:
        return None
    foreign = len(re.findall(r"[^\x00-\x7f]", text))
    return text if len(re.findall(r"[가-힣ㄱ-ㆎ]", text)) * 2 >= foreign else None


def read_sample(path: Path) -> tuple[str, str, bool]:
    """The encoding of a file, the text that it begins with, and whether that is all of it."""
    with open_bytes(path) as stream:
        sample = stream.read(SAMPLE_BYTES)
    encoding, text = decode_sample(sample)
    return encoding, text.lstrip("\ufeff"), len(sample) < SAMPLE_BYTES


def read_lines(path: Path, bad: OnBadLine) -> Iterator[tuple[int, str]]:
    """The whole lines of a file, with their numbers; one that is too long goes to `bad`."""
    parts: list[str] = []
    size = 0
    number = 1
    for first, lines, ends in _read_blocks(path, bad):
        for number, text in enumerate(lines, first):
            if size <= MAX_LINE_CHARACTERS < size + len(text):
                bad(number, TOO_LONG)
                parts = []
            size += len(text)
            if size <= MAX_LINE_CHARACTERS:
                parts.append(text)
            if ends:
                yield from [(number, "".join(parts))] if size <= MAX_LINE_CHARACTERS else ()
                parts = []
                size = 0
    if parts:
        yield number, "".join(parts)


def whole_text(path: Path, bad: OnBadLine) -> str:
    parts: list[str] = []
    size = 0
    for _, lines, ends in _read_blocks(path, bad):
        parts.append("\n".join([*lines, ""]) if ends else lines[0])
        size += len(parts[-1])
        require_real_size(path, size)
    return "".join(parts)


def _read_blocks(path: Path, bad: OnBadLine) -> Iterator[tuple[int, list[str], bool]]:
    encoding = read_sample(path)[0]
    with open_bytes(path) as stream:
        yield from decode_blocks(stream, encoding, bad)


def repair(why: str, path: Path) -> str:
    """What to do about a file with such a bad line; empty if that is clear."""
    name = uncompressed_name(path)
    if why == HAS_NULS:
        return msg(
            "Remove them, with tr -d '\\000' < {name} > clean{suffix} for example.",
            name=name,
            suffix=name.suffix,
        )
    if why == TOO_LONG:
        return msg("Save long texts as plain text: .txt.")
    if not why.startswith("not readable"):
        return ""
    return msg(
        "Malmoi reads UTF-8, UTF-16 and CP949 (EUC-KR); convert a file of Windows in "
        "Europe with iconv -f WINDOWS-1252 -t UTF-8 {name} > utf8{suffix} for example.",
        name=name,
        suffix=name.suffix,
    )


def refuse_bad_lines(path: Path) -> OnBadLine:
    """Raises the error of a line that cannot be read."""

    def bad(number: int, why: str) -> None:
        place = f"{path}:{number}"
        raise MalmoiError(
            "{place}: {why}. {repair}", place=place, why=msg(why), repair=repair(why, path)
        )

    return bad


def decode_blocks(
    stream: IO[bytes], encoding: str, bad: OnBadLine, *, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, list[str], bool]]:
    """Yields (number of the first, lines, whether the last ends); undecodable ones go to `bad`."""
    wide = encoding.startswith(("utf-16", "utf-32"))
    first = 1
    for lines, end in (_wide_lines if wide else _byte_lines)(stream, encoding, max_bytes):
        good = [text for text in lines if text is not None and "\0" not in text]
        if len(good) == len(lines):
            yield first, good, end
        else:
            yield from (
                (number, [text], end) for number, text in _readable(lines, first, encoding, bad)
            )
        first += len(lines) if end else 0


def _readable(
    lines: Sequence[str | None], first: int, encoding: str, bad: OnBadLine
) -> Iterator[tuple[int, str]]:
    for number, text in enumerate(lines, first):
        if text is None:
            bad(number, msg("not readable as {encoding}", encoding=encoding))
        elif "\0" in text:
            bad(number, HAS_NULS)
        else:
            yield number, text


def _byte_lines(stream: IO[bytes], encoding: str, limit: int) -> Iterator[DecodedLines]:
    korean = encoding == "cp949"
    if encoding == "utf-8-sig":
        stream.read(len(codecs.BOM_UTF8))
    for block in _line_blocks(stream, limit, korean=korean):
        end = block.endswith(b"\n")
        text = None if korean else _strict(block, "utf-8")
        if text is None:
            pieces = block.removesuffix(b"\n").split(b"\n")
            yield [_decode(one.rstrip(b"\r") if end else one, korean=korean) for one in pieces], end
        else:
            lines = text.removesuffix("\n").split("\n")
            yield [one.rstrip("\r") for one in lines] if end and "\r" in text else lines, end


def _line_blocks(stream: IO[bytes], limit: int, *, korean: bool) -> Iterator[bytes]:
    """Yields some whole lines, or a piece of a line that is longer than `limit`."""
    rest = b""
    while block := stream.read(min(BLOCK_BYTES, limit)):
        block = rest + block
        at = block.rfind(b"\n") + 1
        if not at and len(block) >= limit:
            at = _cut(block, korean=korean)
        if at:
            yield block[:at]
        rest = block[at:]
    if rest:
        yield rest


def _decode(line: bytes, *, korean: bool) -> str | None:
    """Decodes a line on its own, because some files mix both encodings.

    Two bytes of UTF-8 may also be a Korean syllable; three cannot.
    """
    text = _strict(line, "utf-8")
    if text is not None and (not korean or text.isascii() or max(text) >= "\u0800"):
        return text
    return (_strict(line, "cp949") or text) if korean else _korean(line)


def _cut(line: bytes, *, korean: bool) -> int:
    """Where to split an overlong line: after its last space, or at least a whole character."""
    if at := line.rfind(b" ", len(line) // 2) + 1:
        return at
    decoder = codecs.getincrementaldecoder("cp949" if korean else "utf-8")("replace")
    decoder.decode(line[-4096:] if korean else line[-4:])
    return len(line) - len(decoder.getstate()[0])


def _wide_lines(stream: IO[bytes], encoding: str, limit: int) -> Iterator[DecodedLines]:
    """Decodes before splitting, because UTF-16 and UTF-32 have no newline byte."""
    codecs.register_error("malmoi.mark", _mark)
    reader = io.TextIOWrapper(stream, encoding, errors="malmoi.mark", newline=None)
    try:
        while piece := reader.readline(limit // 2):
            text = None if _UNREADABLE in piece else piece.removesuffix("\n")
            yield [text], piece.endswith("\n")
    finally:
        with suppress(ValueError):  # the file may be closed by now
            reader.detach()


def _mark(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _UNREADABLE, error.end
