"""Web pages as documents: HTML files, and the records of WARC and WET files, with their URLs."""

import logging
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from malmoi.errors import MalmoiError
from malmoi.messages import msg
from malmoi.text.formats import FoundDocument, FoundDocuments, ReadOptions
from malmoi.text.lines import decode_sample
from malmoi.text.open_file import open_bytes
from malmoi.text.warc import MAX_RECORD_BYTES, WarcRecord, read_records

NO_TEXT = "no main text was found"
PAGE_TYPES = ("text/html", "application/xhtml+xml")
_CANONICAL = '//link[@rel="canonical"]/@href | //meta[@property="og:url"]/@content'
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
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
            text = decode_sample(body)[1].replace("\r\n", "\n").strip()
            if text:
                yield FoundDocument(text, record.number, record.url)
            else:
                want.on_bad_line(record.number, NO_TEXT)


def main_text(name: str, page: bytes) -> tuple[str, str]:
    """A page's main text and canonical URL ("" where it has none)."""
    trafilatura = _trafilatura(name)
    tree: Any = trafilatura.load_html(page)
    if tree is None:
        return "", ""
    links = tree.xpath(_CANONICAL)
    text = trafilatura.extract(tree, include_comments=False)
    return text or "", str(links[0]) if links else ""


def _trafilatura(name: str) -> Any:
    try:
        import trafilatura
    except ImportError as error:
        raise MalmoiError(
            "{name} needs two packages ({error}): pip install trafilatura lxml_html_clean.",
            name=name,
            error=error,
        ) from error
    # a page without text is reported by its place, not by trafilatura's own log
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    return trafilatura


def _content(record: WarcRecord, want: ReadOptions) -> tuple[str, bytes] | None:
    """Type and bytes of a record's content; None if it is not a document."""
    kind = _media_type(record.headers.get("content-type", ""))
    if record.type in ("conversion", "resource"):
        return kind, record.body
    if record.type != "response" or kind != "application/http":
        return None
    parts = _BLANK_LINE.split(record.body, maxsplit=1)
    body = parts[1] if len(parts) > 1 else b""
    status, *lines = parts[0].decode("latin-1").splitlines() or [""]
    if status.split()[1:2] != ["200"]:
        return None
    fields = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    kind = _media_type(headers.get("content-type", ""))
    if kind not in (*PAGE_TYPES, "text/plain"):
        return None
    try:
        return kind, _unpacked(body, headers)
    except (ValueError, zlib.error) as error:
        want.on_bad_line(record.number, msg("the page cannot be unpacked: {error}", error=error))
        return None


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
