"""Append-only files, and the journal that records up to where they are valid.

Whenever a build is killed, the journal names a point that is on disk: the files are truncated to it
and the build resumes from there.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from malmoi.system.untrusted import JsonObject

STORE_FILES = ("tokens", "documents", "sentences")


@dataclass
class StoreCounts:
    """How much a store holds; `bytes` counts the text it was made from."""

    tokens: int = 0
    documents: int = 0
    sentences: int = 0
    bytes: int = 0

    @classmethod
    def read(cls, values: JsonObject) -> "StoreCounts":
        return cls(**{field.name: values.whole(field.name) for field in fields(cls)})

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Chunk:
    """Documents to append: their tokens, and the token counts of documents and sentences."""

    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    sentences: NDArray[np.int64] | None
    bytes: int


class Appender:
    """Appends to a store's arrays, after truncating what an interrupted build left."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], counts: StoreCounts, *, sentences: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.counts = counts
        self.dtype = dtype
        self.folder = folder
        if not sentences:  # an earlier store in this folder may have had sentences
            (folder / "sentences.bin").unlink(missing_ok=True)
        names = STORE_FILES if sentences else STORE_FILES[:2]
        self._files = {name: (folder / f"{name}.bin").open("ab", buffering=0) for name in names}
        for name, file in self._files.items():
            file.truncate(getattr(counts, name) * (dtype.itemsize if name == "tokens" else 8))

    def append(self, chunk: Chunk) -> None:
        """Appends documents; they count only once the journal includes them."""
        self._write("tokens", chunk.tokens.astype(self.dtype, copy=False))
        self._write("documents", self._starts(chunk.documents))
        self.counts.documents += len(chunk.documents)
        if chunk.sentences is not None:
            self._write("sentences", self._starts(chunk.sentences))
            self.counts.sentences += len(chunk.sentences)
        self.counts.tokens += len(chunk.tokens)
        self.counts.bytes += chunk.bytes

    def _starts(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.counts.tokens + np.cumsum(lengths) - lengths

    def _write(self, name: str, array: NDArray[Any]) -> None:
        rest = memoryview(array.tobytes())
        while rest:  # a raw write may accept fewer bytes than given
            rest = rest[self._files[name].write(rest) :]

    def sync(self) -> None:
        """Flushes appended data to disk."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Appends the end after the last start, so that each item is a pair of neighbours."""
        for name in self._files:
            if name != "tokens":
                self._write(name, np.array([self.counts.tokens], np.int64))
        self.sync()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()


def holds(folder: Path, counts: StoreCounts, width: int, *, sentences: bool) -> bool:
    """Whether the files hold at least what the journal says; if not, they were modified."""
    for name in STORE_FILES if sentences else STORE_FILES[:2]:
        path = folder / f"{name}.bin"
        wanted = getattr(counts, name) * (width if name == "tokens" else 8)
        if not path.is_file() or path.stat().st_size < wanted:
            return False
    return True
