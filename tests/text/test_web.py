"""Web pages: HTML files, WARC and WET, with URLs; damaged records cost themselves alone."""

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from conftest import without_package
from malmoi.corpus.build import run_build
from malmoi.corpus.steps import Execution
from malmoi.errors import MalmoiError
from malmoi.text.documents import DocumentReader, read_documents
from malmoi.text.web import READ_BYTES

STORY = (
    "The ferry left the island before sunrise, and nobody on the quay noticed that the lamp at "
    "its stern had gone out during the night. "
)
PAGE = (
    '<html><head><title>Ferry</title><link rel="canonical" href="https://example.org/ferry">'
    "<script>track()</script></head><body><nav><a href='/'>Home</a> <a href='/x'>Login</a></nav>"
    f"<article><h1>Ferry</h1><p>{STORY * 3}</p><p>{STORY}</p></article>"
    "<footer>Cookie settings</footer></body></html>"
)


def record(body: bytes, url: str = "https://example.org/", length: int | None = None) -> bytes:
    """A record of a WET file, with a Content-Length that may be wrong."""
    size = len(body) if length is None else length
    return warc("conversion", "text/plain", body, url).replace(
        b"Content-Length: %d" % len(body), b"Content-Length: %d" % size
    )


def warc(kind: str, content: str, body: bytes, url: str) -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\n"
        f"Content-Type: {content}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def response(headers: str, body: bytes, status: str = "200 OK") -> bytes:
    http = f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body
    return warc("response", "application/http; msgtype=response", http, "https://example.org/a")


def read(path: Path, data: bytes) -> tuple[list[str], DocumentReader]:
    path.write_bytes(data)
    reader = read_documents(path)
    return [document.text for document in reader], reader


def reasons(reader: DocumentReader) -> list[str]:
    return [line for problem in reader.problems.values() for line in problem.first]


@pytest.mark.parametrize("name", ["a.warc.wet", "a.warc.wet.gz", "a.warc", "a.wet.xz"])
def test_wet_records_are_documents_with_their_urls(tmp_path: Path, name: str) -> None:
    info = warc("warcinfo", "application/warc-fields", b"software: test", "")
    parts = [info, *(record(f"text {n}".encode(), f"https://a.org/{n}") for n in range(3))]
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(b"".join(map(pack, parts)))
    found = list(read_documents(tmp_path))
    assert [(d.text, d.url) for d in found] == [
        (f"text {n}", f"https://a.org/{n}") for n in range(3)
    ]
    assert found[0].place == f"{tmp_path / name}:2"


def test_one_gzip_member_for_all_records(tmp_path: Path) -> None:
    data = b"".join(record(b"word " * 5000 + b"%d" % n) for n in range(9))
    found, reader = read(tmp_path / "a.wet.gz", gzip.compress(data))
    assert [text[-1] for text in found] == [str(n) for n in range(9)]
    assert not reader.problems


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (record(b"x" * 50, length=20), "Content-Length is wrong"),
        (record(b"x" * 50, length=130), "Content-Length is wrong"),
        # it ends where the next record's header does
        (record(b"x" * 50, length=54 + record(b"second").index(b"\r\n\r\n")), "is wrong"),
        (record(b"x" * 50, length=10**9), "Content-Length is 1000000000"),
        (record(b"x" * 50).replace(b"Content-Length: 50\r\n", b""), "Content-Length is missing"),
        (record(b"x" * 50)[:60], "header is damaged"),
        (b"x" * 3 * READ_BYTES, "header has no end"),
    ],
)
@pytest.mark.parametrize("suffix", [".warc", ".warc.gz"])
def test_a_damaged_record_is_skipped_alone(
    tmp_path: Path, damaged: bytes, reason: str, suffix: str
) -> None:
    parts = [record(b"first"), damaged, record(b"second"), record(b"third")]
    pack = gzip.compress if suffix == ".warc.gz" else bytes
    found, reader = read(tmp_path / f"a{suffix}", b"".join(map(pack, parts)))
    assert found == ["first", "second", "third"]
    (line,) = reasons(reader)
    assert line.startswith(f"{tmp_path / f'a{suffix}'}:2: ")
    assert reason in line
    assert "1 bad record skipped" in reader.describe()[-1]


def test_a_damaged_gzip_member_is_skipped_alone(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(97, 123, 3 * READ_BYTES, np.uint8).tobytes()
    whole = [gzip.compress(record(text)) for text in (b"first", noise, b"second", b"third")]
    at = len(whole[0])
    for middle in (
        whole[1][: len(whole[1]) // 2],  # truncated within its content
        whole[1][:200],
        whole[1][:12] + b"\xff" * 9 + whole[1][21:],
        whole[1][:-8] + b"\0" * 8,  # its checksum is wrong
    ):
        found, reader = read(tmp_path / "a.warc.gz", b"".join([whole[0], middle, *whole[2:]]))
        assert found == ["first", "second", "third"]
        (line,) = reasons(reader)
        assert f"the gzip member at byte {at:,} is damaged" in line
    found, reader = read(tmp_path / "b.warc.gz", b"".join(whole)[:-30])
    assert [text[:6] for text in found] == ["first", noise[:6].decode(), "second"]
    assert "it is truncated" in reasons(reader)[0]


def test_html_needs_an_extractor(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(PAGE)
    with (
        without_package("trafilatura"),
        pytest.raises(MalmoiError, match="pip install trafilatura"),
    ):
        list(read_documents(tmp_path / "a.html"))


def test_html_is_read_for_its_main_text(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", reason="it extracts the main text of pages")
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.htm").write_text("<html><body></body></html>")
    reader = read_documents(tmp_path)
    (found,) = reader
    assert found.text.count(STORY.strip()) == 4
    assert "Login" not in found.text
    assert "Cookie" not in found.text
    assert found.url == "https://example.org/ferry"
    assert "no main text" in reasons(reader)[0]


def test_responses_are_unpacked_and_errors_left_out(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", reason="it extracts the main text of pages")
    html = "Content-Type: text/html; charset=utf-8"
    page = PAGE.encode()
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (page[:99], page[99:], b""))
    found, reader = read(
        tmp_path / "a.warc",
        response(html, page)
        + response(f"{html}\r\nTransfer-Encoding: chunked", chunked)
        + response(f"{html}\r\nContent-Encoding: gzip", gzip.compress(page))
        + response(html, page, "404 Not Found")
        + response("Content-Type: image/png", b"\x89PNG")
        + response(f"{html}\r\nContent-Encoding: gzip", gzip.compress(page)[:-20])
        + response("Content-Type: text/plain", b"plain text"),
    )
    assert [STORY.strip() in text for text in found] == [True, True, True, False]
    assert len(set(found[:3])) == 1
    assert found[3] == "plain text"
    assert "a.warc:6: the page cannot be unpacked" in reasons(reader)[0]


def test_a_corpus_keeps_the_urls(tmp_path: Path) -> None:
    data = record(STORY.encode(), "https://a.org/1") + b"broken" + record(STORY[::-1].encode())
    (tmp_path / "a.warc.wet").write_bytes(data)
    out = tmp_path / "corpus"
    done = run_build([str(tmp_path / "a.warc.wet")], out, min_words=5, steps="clean")
    rows = [json.loads(line) for line in (out / "shard-00000.jsonl").read_text().splitlines()]
    assert [row["url"] for row in rows] == ["https://a.org/1", "https://example.org/"]
    assert "bad record skipped" in done["finished"]["bad"][-1]
    assert [d.url for d in read_documents(out / "shard-00000.jsonl")] == [r["url"] for r in rows]


def test_pages_extracted_by_two_workers_are_the_same_bytes(tmp_path: Path) -> None:
    """In order, with the broken record and the page without text located as by one."""
    pytest.importorskip("trafilatura", reason="it extracts the main text of pages")
    html = "Content-Type: text/html"
    pages = [response(html, PAGE.replace("Ferry", f"Ferry {n}").encode()) for n in range(12)]
    pages[3] = response(html, b"<html><body></body></html>")
    (tmp_path / "a.warc").write_bytes(b"".join(pages[:6]) + b"broken" + b"".join(pages[6:]))
    (tmp_path / "b.html").write_text(PAGE)
    sources = [str(tmp_path / "a.warc"), str(tmp_path / "b.html")]
    settings = {"steps": "clean", "shard": 2000}
    done = {
        workers: run_build(
            sources, tmp_path / str(workers), execution=Execution(workers), **settings
        )
        for workers in (1, 2)
    }
    assert done[1]["finished"] == done[2]["finished"]
    assert "2 bad records skipped" in done[2]["finished"]["bad"][0]
    assert "a.warc:4: no main text" in done[2]["finished"]["bad"][0]
    shards = [sorted((tmp_path / str(n)).glob("*.jsonl")) for n in (1, 2)]
    assert [p.read_bytes() for p in shards[0]] == [p.read_bytes() for p in shards[1]]
    rows = [json.loads(line) for path in shards[1] for line in path.read_text().splitlines()]
    assert len(shards[1]) > 2
    assert [row["url"] for row in rows] == ["https://example.org/a"] * 11 + [
        "https://example.org/ferry"
    ]
