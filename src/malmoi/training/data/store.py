"""The token store: a corpus as a folder of memory-mapped arrays, encoded once.

tokens.bin      every token: uint16, or uint32 for a vocabulary above 65,536
documents.bin   int64: where each document starts, and the end
sentences.bin   the same for sentences, only for objectives that need them
store.json      the format, the counts, the bytes of text, and what it was made from
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from malmoi.errors import MalmoiError, ensure, explained
from malmoi.system.untrusted import MAX_SIZE, JsonObject, read_object, shown

STORE_FORMAT = 1


@dataclass(frozen=True)
class Store:
    """A memory-mapped corpus of tokens; opening one takes constant time."""

    folder: Path
    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    sentences: NDArray[np.int64] | None
    about: dict[str, Any]

    @property
    def end(self) -> int | None:
        """The end-of-text token after every document, if there is one."""
        return cast("int | None", self.about["end"])

    def __len__(self) -> int:
        return len(self.documents) - 1

    def ensure(self, condition: object, sentence: str, /, **values: Any) -> None:
        """Raises this sentence about its {folder} unless the condition holds."""
        ensure(condition, sentence, folder=self.folder, **values)

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Opens a finished store; raises if it is missing, incomplete or damaged."""
        folder = Path(folder)
        about = read_about(folder)
        width = np.dtype(about["dtype"])
        tokens = _map(folder, "tokens", width, about["tokens"])
        documents = _map(folder, "documents", np.dtype(np.int64), about["documents"] + 1)
        sentences = None
        if about["sentences"] is not None:
            sentences = _map(folder, "sentences", np.dtype(np.int64), about["sentences"] + 1)
        return cls(folder, tokens, documents, sentences, about)


def read_about(folder: Path) -> dict[str, Any]:
    """Reads store.json and checks the fields that opening the arrays needs."""
    path = folder / "store.json"
    ensure(
        path.is_file(),
        "The token store {folder} is not there, or half-written; build it again.",
        folder=folder,
    )
    with explained(
        MalmoiError, "{path} does not describe a token store ({error}); build it again.", path=path
    ):
        about = read_object(path)
        known = about.get("format") == STORE_FORMAT
        if known:
            about.require(about.text("dtype") in ("uint16", "uint32"), "dtype", "uint16 or uint32")
            for name in ("tokens", "documents", "bytes"):
                about.whole(name)
            about.whole("sentences", default=None)
            about.whole("end", default=None, high=about.whole("vocab", high=MAX_SIZE))
            about.map_of("made", str)
    ensure(
        known,
        "{path} has another version (format {format}); build it again.",
        path=path,
        format=shown(about.get("format")),
    )
    return {"sentences": None, "end": None, **about}


def _map(folder: Path, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    path = folder / f"{name}.bin"
    size = path.stat().st_size if path.is_file() else 0
    wanted = count * dtype.itemsize
    ensure(
        size == wanted,
        "{path} is damaged: {size:,} bytes and not {wanted:,}; build it again.",
        path=path,
        size=size,
        wanted=wanted,
    )
    if count == 0:
        return np.zeros(0, dtype)
    # slicing a plain array costs a third of slicing a memmap
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)


# ------------------------------------------------------------------ writing a store


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

    def sizes(self, width: int, *, sentences: bool) -> dict[str, int]:
        """Bytes of each file, without the end after the last start."""
        sizes = {"tokens": width * self.tokens, "documents": 8 * self.documents}
        return sizes | ({"sentences": 8 * self.sentences} if sentences else {})


class Appender:
    """Appends to a store's arrays, after truncating what an interrupted build left."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], counts: StoreCounts, *, sentences: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.counts = counts
        self.dtype = dtype
        self.folder = folder
        if not sentences:  # an earlier store in this folder may have had sentences
            (folder / "sentences.bin").unlink(missing_ok=True)
        self._files = {}
        for name, size in counts.sizes(dtype.itemsize, sentences=sentences).items():
            self._files[name] = (folder / f"{name}.bin").open("ab")
            self._files[name].truncate(size)

    def append(
        self,
        tokens: NDArray[Any],
        documents: NDArray[np.int64],
        sentences: NDArray[np.int64] | None,
        text_bytes: int,
    ) -> None:
        """Appends documents by tokens and lengths; they count once the journal includes them."""
        self._files["tokens"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._files["documents"].write(self._starts(documents))
        self.counts.documents += len(documents)
        if sentences is not None:
            self._files["sentences"].write(self._starts(sentences))
            self.counts.sentences += len(sentences)
        self.counts.tokens += len(tokens)
        self.counts.bytes += text_bytes

    def _starts(self, lengths: NDArray[np.int64]) -> bytes:
        return (self.counts.tokens + np.cumsum(lengths) - lengths).tobytes()

    def sync(self) -> None:
        """Flushes appended data to disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Appends the end after the last start, so that each item is a pair of neighbours."""
        for name in self._files:
            if name != "tokens":
                self._files[name].write(np.array([self.counts.tokens], np.int64).tobytes())
        self.sync()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()


def holds(folder: Path, counts: StoreCounts, width: int, *, sentences: bool) -> bool:
    """Whether the files hold at least what the journal says; if not, they were modified."""
    sizes = counts.sizes(width, sentences=sentences)
    files = [(folder / f"{name}.bin", size) for name, size in sizes.items()]
    return all(path.is_file() and path.stat().st_size >= size for path, size in files)
