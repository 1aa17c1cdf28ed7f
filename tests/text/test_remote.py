"""Text at URLs, by fsspec: in memory, over a connection that breaks, and in an S3 server."""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from malmoi.errors import MalmoiError
from malmoi.system import storage
from malmoi.text import remote
from malmoi.text.documents import read_documents

TEXTS = {"a.txt": "one\n\ntwo", "deep/b.txt.gz": "drei\n\nvier", "notes.pdf": "not text"}


class Connection:
    """To files in memory; fails as it is told to, and notes what was fetched."""

    def __init__(self) -> None:
        self.files = MemoryFileSystem()
        self.fetch = MemoryFileSystem.get_file
        self.faults: list[str] = []
        self.fetched: list[str] = []

    def get_file(self, path: str, target: str) -> None:
        self.fetched.append(path)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "dropped":
            raise ConnectionResetError("the connection was reset")
        self.fetch(self.files, path, target)
        if fault == "half":
            os.truncate(target, Path(target).stat().st_size // 2)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(remote, "COPIES", remote.LocalCopies())
    made = Connection()
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda _, *paths: made.get_file(*paths))
    for name, text in TEXTS.items():
        data = text.encode()
        made.files.pipe(f"/texts/{name}", gzip.compress(data) if name.endswith(".gz") else data)
    yield made
    made.files.rm("/texts", recursive=True)


def texts(given: str) -> list[str]:
    return [document.text for document in read_documents(given)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.txt", ["one", "two"]),
        ("", ["one", "two", "drei", "vier"]),  # a folder, where other formats are passed over
        ("*/b.*", ["drei", "vier"]),
    ],
)
def test_a_url_is_read_like_a_path(connection: Connection, given: str, expected: list[str]) -> None:
    assert texts(f"memory://texts/{given}") == expected


def test_a_file_is_fetched_once_and_again_when_it_changed(connection: Connection) -> None:
    reader = read_documents("memory://texts/a.txt")
    before = reader.fingerprint()
    assert [document.place for document in reader] == [
        f"{reader.files[0]}:1",
        f"{reader.files[0]}:2",
    ]
    assert len(list(reader)) == len(connection.fetched) + 1 == 2
    connection.files.pipe("/texts/a.txt", b"three")
    again = read_documents("memory://texts/a.txt")
    assert again.fingerprint() != before
    assert [document.text for document in again] == ["three"]


def test_a_broken_connection_is_tried_again_and_half_a_file_is_never_read(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    connection.faults += ["half", "dropped"]
    with caplog.at_level("INFO"):
        assert texts("memory://texts/a.txt") == ["one", "two"]
    assert "4 of 8 bytes arrived; trying again" in caplog.text
    assert "the connection was reset; trying again" in caplog.text
    connection.files.pipe("/texts/a.txt", b"four")
    connection.faults += ["half"] * storage.ATTEMPTS
    with pytest.raises(MalmoiError, match=r"a\.txt could not be transferred: 2 of 4 bytes"):
        texts("memory://texts/a.txt")


def test_only_the_latest_files_are_kept(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "KEPT_BYTES", 10)
    reader = read_documents("memory://texts")
    assert len(list(reader)) == 4
    (kept,) = remote.COPIES.kept.values()
    assert kept.name == "b.txt.gz"
    assert len(list(reader)) == 4  # the first is fetched again


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("memory://texts/none.txt", "cannot be opened"),
        ("memory://texts/*.pdf", "has no file that can be read"),
        ("memory://texts/notes.pdf", "unknown format"),
        ("nowhere://texts", "Protocol not known: nowhere"),
    ],
)
def test_what_cannot_be_read_is_said(connection: Connection, given: str, said: str) -> None:
    with pytest.raises(MalmoiError, match=said):
        read_documents(given)


def test_an_s3_server_is_read(object_store: Any) -> None:
    object_store.mkdir("books")
    for name, text in {"1.txt": "one\n\ntwo", "2.jsonl": '{"text": "three"}\n'}.items():
        object_store.pipe(f"books/en/{name}", text.encode())
    assert texts("s3://books/en/*") == ["one", "two", "three"]
    with pytest.raises(MalmoiError, match="cannot be opened"):
        texts("s3://books/none.txt")
