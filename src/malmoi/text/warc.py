"""WARC records (ISO 28500), streamed; a damaged one is reported and reading resumes behind it.

A .gz file has a gzip member per record, so a damaged member costs its own record alone; in one
member that holds everything, what follows the damage cannot be read.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from malmoi.messages import msg
from malmoi.text.lines import OnBadLine
from malmoi.text.open_file import open_bytes

READ_BYTES = 1 << 16
MAX_PIECE_BYTES = 1 << 20  # decompressed at once
MAX_HEADER_BYTES = 1 << 16
MAX_RECORD_BYTES = 1 << 26  # a longer record is no page; it is skipped and reported
_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_WBITS = 31
# where a record begins: its version, then the name of its first field
_BEGIN = re.compile(rb"WARC/\d\.\d\r?\n[\w-]+:")
_BEGIN_BYTES = 64  # enough to hold that
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_NEWLINES = re.compile(rb"[\r\n]+")
Damage = tuple[int, str]  # byte offset and description


@dataclass(frozen=True)
class WarcRecord:
    """One record: its number in the file, its fields by lower-case name, and its content."""

    number: int
    headers: dict[str, str]
    body: bytes

    @property
    def type(self) -> str:
        return self.headers.get("warc-type", "")

    @property
    def url(self) -> str:
        return self.headers.get("warc-target-uri", "").strip("<>")


def read_records(path: Path, bad: OnBadLine) -> Iterator[WarcRecord]:
    """Yields the complete records of a file; damaged ones go to `bad` with their number."""
    by_member = path.suffix == ".gz"
    damages: list[Damage] = []
    with open_bytes(path, decompress=not by_member) as stream:
        plain = iter(lambda: stream.read(READ_BYTES), b"")
        chunks = _members(stream, damages) if by_member else plain
        yield from _Records(chunks, damages, bad).read()


def _members(stream: IO[bytes], damages: list[Damage]) -> Iterator[bytes]:
    """Decompresses the gzip members of a file; behind a damaged one it looks for the next."""
    given = 0
    rest = b""
    while True:
        begin = stream.tell() - len(rest)
        inflate = zlib.decompressobj(_GZIP_WBITS)
        try:
            while not inflate.eof:
                chunk = rest or stream.read(READ_BYTES)
                if not chunk and stream.tell() == begin:
                    return
                if not chunk:
                    raise zlib.error("it is truncated")
                piece = inflate.decompress(chunk, MAX_PIECE_BYTES)
                rest = inflate.unconsumed_tail or inflate.unused_data
                given += len(piece)
                yield piece
        except zlib.error as error:
            why = msg(
                "the gzip member at byte {begin:,} is damaged ({error})", begin=begin, error=error
            )
            damages.append((given, why))
            if not _seek_member(stream, begin + 1):
                return
            rest = b""


def _seek_member(stream: IO[bytes], begin: int) -> bool:
    """Moves to the first gzip member from `begin` on that starts with a WARC record."""
    while True:
        stream.seek(begin)
        head = stream.read(READ_BYTES)
        at = head.find(_GZIP_MAGIC)
        if at < 0 and len(head) < READ_BYTES:
            return False
        if at < 0:
            begin += len(head) - len(_GZIP_MAGIC) + 1
            continue
        stream.seek(begin + at)
        if _starts_record(stream.read(READ_BYTES)):
            stream.seek(begin + at)
            return True
        begin += at + 1


def _starts_record(member: bytes) -> bool:
    try:
        return zlib.decompressobj(_GZIP_WBITS).decompress(member, 8).startswith(b"WARC/")
    except zlib.error:
        return False


class _Records:
    """Splits chunks into records; only the record being read is held in memory."""

    def __init__(self, chunks: Iterator[bytes], damages: list[Damage], bad: OnBadLine):
        self._chunks = chunks
        self._damages = damages
        self._bad = bad
        self._buffer = bytearray()
        self._position = 0  # of the buffer's first byte
        self._number = 0

    def read(self) -> Iterator[WarcRecord]:
        while self._skip_newlines():
            self._report_lost_members()
            self._number += 1
            begin = self._position
            try:
                yield self._record()
            except _BadRecord as reason:
                self._seek_record()
                cut = bool(self._damages) and begin < self._damages[0][0] <= self._position
                self._bad(self._number, self._damages.pop(0)[1] if cut else str(reason))
        self._report_lost_members()

    def _report_lost_members(self) -> None:
        """Reports the gzip members so far of which nothing could be read."""
        while self._damages and self._damages[0][0] <= self._position:
            self._number += 1
            self._bad(self._number, self._damages.pop(0)[1])

    def _record(self) -> WarcRecord:
        header = self._header()
        lines = self._buffer[:header].decode("utf-8", "replace").split("\n")
        fields = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        if not headers.get("warc-type"):
            raise _BadRecord("its WARC-Type is missing")
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise _BadRecord("its Content-Length is missing")
        if len(length) > 18 or int(length) > MAX_RECORD_BYTES:
            raise _BadRecord(msg("its Content-Length is {length}", length=length))
        end = header + int(length)
        if not self._fill(end) or self._is_cut(end) or not self._ends_at(end):
            raise _BadRecord("its Content-Length is wrong")
        body = bytes(self._buffer[header:end])
        self._drop(end)
        return WarcRecord(self._number, headers, body)

    def _header(self) -> int:
        """The size of the header, with the blank line after it."""
        while not (found := _BLANK_LINE.search(self._buffer)):
            if len(self._buffer) > MAX_HEADER_BYTES or not self._fill(len(self._buffer) + 1):
                raise _BadRecord("its header has no end")
        begins = [match.start() for match in _BEGIN.finditer(self._buffer, 0, found.end())]
        if begins != [0]:
            raise _BadRecord("its header is damaged")
        return found.end()

    def _is_cut(self, end: int) -> bool:
        return bool(self._damages) and self._damages[0][0] < self._position + end

    def _ends_at(self, end: int) -> bool:
        """Whether two newlines, another record or the end of the file come there."""
        self._fill(end + _BEGIN_BYTES)
        rest = bytes(self._buffer[end : end + _BEGIN_BYTES])
        if rest == b"\r\n\r\n" or rest.startswith(b"\r\n\r\nWARC/"):
            return True
        # newlines are missing or other bytes follow: it is whole unless it holds another's header
        likely = rest.startswith(b"\r\n\r\n") or rest.lstrip(b"\r\n")[:5] in (b"", b"WARC/")
        return likely and not _BEGIN.search(self._buffer, 1, end)

    def _skip_newlines(self) -> bool:
        """Moves to the next byte that is no newline; False at the end."""
        while self._fill(1):
            found = _NEWLINES.match(self._buffer)
            self._drop(found.end() if found else 0)
            if self._buffer:
                return True
        return False

    def _seek_record(self) -> None:
        """Moves to the beginning of the next record, or to the end."""
        start = 1
        while not (found := _BEGIN.search(self._buffer, start)):
            if len(self._buffer) > _BEGIN_BYTES:
                self._drop(len(self._buffer) - _BEGIN_BYTES)
                start = 0
            if not self._fill(len(self._buffer) + 1):
                self._drop(len(self._buffer))
                return
        self._drop(found.start())

    def _fill(self, size: int) -> bool:
        """Reads until the buffer has `size` bytes; False if the file has fewer."""
        while len(self._buffer) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._buffer += chunk
        return True

    def _drop(self, size: int) -> None:
        del self._buffer[:size]
        self._position += size


class _BadRecord(Exception):
    """What is wrong with a record."""
