"""Web pages as documents: HTML files, and the records of WARC and WET files, with their URLs.

WARC records (ISO 28500) are streamed; a damaged one is reported and reading resumes behind it. A
.gz file has a gzip member per record, so a damaged member costs its own record alone; in one member
that holds everything, what follows the damage cannot be read.
"""

import logging
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from malmoi.messages import msg
from malmoi.system.packages import optional_package
from malmoi.text.formats import FoundDocument, FoundDocuments, ReadOptions
from malmoi.text.lines import OnBadLine, decode_sample, open_bytes

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


class WarcRecord(NamedTuple):
    """One record: its number in the file, its fields by lower-case name, and its content."""

    number: int
    headers: dict[str, str]
    body: bytes

    @property
    def url(self) -> str:
        return self.headers.get("warc-target-uri", "").strip("<>")


def read_records(path: Path, bad: OnBadLine) -> Iterator[WarcRecord]:
    """Yields the complete records of a file; damaged ones go to `bad` with their number."""
    by_member = path.suffix == ".gz"
    with open_bytes(path, decompress=not by_member) as stream:
        plain = iter(lambda: stream.read(READ_BYTES), b"")
        yield from _Records(_members(stream) if by_member else plain, bad).read()


def _members(stream: IO[bytes]) -> Iterator[bytes | str]:
    """Decompresses the gzip members of a file, and says where one is damaged."""
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
                yield piece
        except zlib.error as error:
            yield msg(
                "the gzip member at byte {begin:,} is damaged ({error})", begin=begin, error=error
            )
            if not _seek_member(stream, begin + 1):
                return
            rest = b""


def _seek_member(stream: IO[bytes], begin: int) -> bool:
    """Moves to the first gzip member from `begin` on that starts with a WARC record."""
    while True:
        stream.seek(begin)
        head = stream.read(READ_BYTES)
        at = head.find(_GZIP_MAGIC)
        if at == 0 and _starts_record(head):
            stream.seek(begin)
            return True
        if at < 0 and len(head) < READ_BYTES:
            return False
        begin += max(at, 1) if at >= 0 else len(head) - len(_GZIP_MAGIC) + 1


def _starts_record(member: bytes) -> bool:
    try:
        return zlib.decompressobj(_GZIP_WBITS).decompress(member, 8).startswith(b"WARC/")
    except zlib.error:
        return False


class _Records:
    """Splits chunks into records; only the record being read is held in memory."""

    def __init__(self, chunks: Iterator[bytes | str], bad: OnBadLine):
        self._chunks = chunks
        self._bad = bad
        self._buffer = bytearray()
        self._number = 0
        # what comes after the buffer: None, more bytes; a text, damage; "", nothing
        self._end: str | None = None

    def read(self) -> Iterator[WarcRecord]:
        while self._end != "":
            self._end = None
            is_reported = False
            while self._skip_newlines():
                self._number += 1
                try:
                    yield self._record()
                except _BadRecord as reason:
                    self._seek_record()
                    is_reported = bool(self._end) and not self._buffer
                    self._bad(self._number, str(self._end if is_reported else reason))
            if self._end and not is_reported:  # nothing of the record could be read
                self._number += 1
                self._bad(self._number, self._end)

    def _record(self) -> WarcRecord:
        header = self._header()
        headers = _fields(self._buffer[:header].decode("utf-8", "replace"))
        if not headers.get("warc-type"):
            raise _BadRecord("its WARC-Type is missing")
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise _BadRecord("its Content-Length is missing")
        if len(length) > 18 or int(length) > MAX_RECORD_BYTES:
            raise _BadRecord(msg("its Content-Length is {length}", length=length))
        end = header + int(length)
        if not self._fill(end) or not self._ends_at(end):
            raise _BadRecord("its Content-Length is wrong")
        body = bytes(self._buffer[header:end])
        del self._buffer[:end]
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
            self._buffer = self._buffer.lstrip(b"\r\n")
            if self._buffer:
                return True
        return False

    def _seek_record(self) -> None:
        """Moves to the beginning of the next record, or to the end."""
        start = 1
        while not (found := _BEGIN.search(self._buffer, start)):
            if len(self._buffer) > _BEGIN_BYTES:
                del self._buffer[:-_BEGIN_BYTES]
                start = 0
            if not self._fill(len(self._buffer) + 1):
                self._buffer.clear()
                return
        del self._buffer[: found.start()]

    def _fill(self, size: int) -> bool:
        """Reads until the buffer has `size` bytes; False if there are fewer before its end."""
        while len(self._buffer) < size and self._end is None:
            chunk = next(self._chunks, "")
            if isinstance(chunk, str):
                self._end = chunk
            else:
                self._buffer += chunk
        return len(self._buffer) >= size


class _BadRecord(Exception):
    """What is wrong with a record."""


# ------------------------------------------------------------------ pages

NO_TEXT = "no main text was found"
PAGE_TYPES = ("text/html", "application/xhtml+xml")
_CANONICAL = '//link[@rel="canonical"]/@href | //meta[@property="og:url"]/@content'
_CHUNK = re.compile(rb"([0-9A-Fa-f]+)[^\r\n]*\r?\n")


def read_html(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a page; its URL will be the one that it calls canonical."""
    with open_bytes(path) as stream:
        page = stream.read(MAX_RECORD_BYTES + 1)
    if len(page) > MAX_RECORD_BYTES:
        want.on_bad_line(1, msg("longer than {most:,} bytes", most=MAX_RECORD_BYTES))
    else:
        yield FoundDocument("", 1, page=page)


def read_warc(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads pages that were answered with 200, and plain text (all of a WET file)."""
    for record in read_records(path, want.on_bad_line):
        content = _content(record, want)
        if content is None:
            continue
        kind, body = content
        if kind in PAGE_TYPES:
            yield FoundDocument("", record.number, record.url, body)
        elif kind == "text/plain":
            # undecodable bytes become U+FFFD
            if text := decode_sample(body)[1].replace("\r\n", "\n").strip():
                yield FoundDocument(text, record.number, record.url)
            else:
                want.on_bad_line(record.number, NO_TEXT)


def main_text(name: str, page: bytes) -> tuple[str, str]:
    """A page's main text and canonical URL ("" where it has none)."""
    trafilatura = optional_package("trafilatura", name, "trafilatura lxml_html_clean")
    # a page without text is reported by its place, not by trafilatura's own log
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    tree: Any = trafilatura.load_html(page)
    if tree is None:
        return "", ""
    links = tree.xpath(_CANONICAL)
    return trafilatura.extract(tree, include_comments=False) or "", str(links[0]) if links else ""


def _content(record: WarcRecord, want: ReadOptions) -> tuple[str, bytes] | None:
    """Type and bytes of a record's content; None if it is not a document."""
    kind = _media_type(record.headers.get("content-type", ""))
    type = record.headers["warc-type"]
    if type in ("conversion", "resource"):
        return kind, record.body
    if type != "response" or kind != "application/http":
        return None
    head, body = [*_BLANK_LINE.split(record.body, maxsplit=1), b""][:2]
    status, _, lines = head.decode("latin-1").partition("\n")
    if status.split()[1:2] != ["200"]:
        return None
    headers = _fields(lines)
    kind = _media_type(headers.get("content-type", ""))
    if kind not in (*PAGE_TYPES, "text/plain"):
        return None
    try:
        return kind, _unpacked(body, headers)
    except (ValueError, zlib.error) as error:
        want.on_bad_line(record.number, msg("the page cannot be unpacked: {error}", error=error))
        return None


def _fields(header: str) -> dict[str, str]:
    """The values of a header by the lower-case names of its fields."""
    fields = (line.partition(":") for line in header.split("\n"))
    return {name.strip().lower(): value.strip() for name, _, value in fields}


def _media_type(header: str) -> str:
    return header.partition(";")[0].strip().lower()


def _unpacked(body: bytes, headers: dict[str, str]) -> bytes:
    """The body without its transfer and content encodings; crawlers often removed them before."""
    if "chunked" in headers.get("transfer-encoding", "").lower() and _CHUNK.match(body):
        body = b"".join(_chunks(body))
    coding = headers.get("content-encoding", "identity").lower()
    if coding in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
        return _inflated(body, 31)
    if coding in ("br", "zstd") and not body.lstrip().startswith(b"<"):
        raise ValueError(msg("its Content-Encoding is {coding}", coding=coding))
    if coding == "deflate" and not body.lstrip().startswith(b"<"):
        return _inflated(body, 15 if body.startswith(b"\x78") else -15)
    return body


def _inflated(body: bytes, wbits: int) -> bytes:
    """Decompresses up to the size of a record: a page may be made to fill the memory."""
    inflate = zlib.decompressobj(wbits)
    found = inflate.decompress(body, MAX_RECORD_BYTES)
    if not inflate.eof:
        raise ValueError("it is truncated or too long")
    return found


def _chunks(body: bytes) -> Iterator[bytes]:
    at = 0
    while found := _CHUNK.match(body, at):
        size = int(found[1], 16)
        yield body[found.end() : found.end() + size]
        if not size:
            return
        at = found.end() + size
        at += len(body[at : at + 2]) - len(body[at : at + 2].lstrip(b"\r\n"))
    raise ValueError("a chunk of its Transfer-Encoding is damaged")


WEB_FORMATS: dict[str, Callable[[Path, ReadOptions], FoundDocuments]] = {
    ".html": read_html,
    ".htm": read_html,
    ".warc": read_warc,
    ".wet": read_warc,
}
