"""A safe GGUF reader: every stated length is checked against the bytes in the file.

(The `gguf` package's own reader trusts them: an array of 2⁶⁰ numbers makes it loop forever.)
Layout, version 3: magic, version, counts; metadata as (name, type, value); tensors as (name, shape,
type, offset); padding; the tensors' bytes.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.messages import msg
from malmoi.system.limits import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBER_FORMATS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
TEXT_TYPE = 8
ARRAY_TYPE = 9
MAX_DIMENSIONS = 4


class Cursor:
    """Reads bytes sequentially and refuses to read past the end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise damaged_file(
                self.path,
                msg(
                    "the value at byte {at} has {size} bytes, but only {data} are left",
                    at=self.at,
                    size=size,
                    data=len(self.data),
                ),
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, format: str) -> Any:
        return struct.unpack(f"<{format}", self.take(struct.calcsize(f"<{format}")))[0]

    def text(self) -> str:
        try:
            return str(self.take(self.number("Q")), "utf-8")
        except UnicodeDecodeError:
            raise damaged_file(
                self.path, msg("the text before byte {at} is not UTF-8", at=self.at)
            ) from None

    def count(self, what: str, smallest: int) -> int:
        """The number of entries that follow; refused if the file has no room for them."""
        count = int(self.number("Q"))
        if count * smallest > len(self.data) - self.at:
            raise damaged_file(
                self.path,
                msg(
                    "it declares {count} {what} but is too short to hold them",
                    count=count,
                    what=what,
                ),
            )
        return count

    def value(self) -> Any:
        kind = self.number("I")
        several = kind == ARRAY_TYPE
        kind = self.number("I") if several else kind
        if kind == TEXT_TYPE:
            return [self.text() for _ in range(self.count("texts", 8))] if several else self.text()
        if kind not in NUMBER_FORMATS:
            what = "list" if several else "value"
            raise damaged_file(
                self.path,
                msg(
                    "there is no type {kind} for a {what} at byte {at}",
                    kind=kind,
                    what=what,
                    at=self.at,
                ),
            )
        format = NUMBER_FORMATS[kind]
        if not several:
            return self.number(format)
        size = struct.calcsize(format)
        count = self.count("numbers", size)
        return list(struct.unpack(f"<{count}{format}", self.take(count * size)))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's location and type in the file."""

    shape: tuple[int, ...]  # in torch's order: the fastest dimension last
    kind: int
    start: int


class GGUFFile:
    """Metadata and tensors of a GGUF file; tensors are read and dequantized on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        cursor = Cursor(self.data, path)
        tensors, entries = self._header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = cursor.text()
            self.metadata[name] = cursor.value()
        found = dict(self._entry(cursor) for _ in range(tensors))
        step = self.metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise damaged_file(path, msg("an alignment of {step} is impossible", step=shown(step)))
        start = -(-cursor.at // step) * step
        self.tensors = {
            name: StoredTensor(t.shape, t.kind, start + t.start) for name, t in found.items()
        }
        for name in self.tensors:
            self._bytes(name)

    def _header(self, cursor: Cursor) -> tuple[int, int]:
        if bytes(cursor.take(4)) != MAGIC:
            raise MalmoiError(
                "{path} is not a GGUF file: it does not begin with GGUF.", path=self.path
            )
        version = cursor.number("I")
        if version not in VERSIONS:
            raise MalmoiError(
                "{path} is a GGUF file of version {version}; Malmoi reads versions 2 and 3.",
                path=self.path,
                version=version,
            )
        # by the bytes of the smallest possible entry
        return cursor.count("tensors", 24), cursor.count("metadata", 13)

    def _entry(self, cursor: Cursor) -> tuple[str, StoredTensor]:
        name = cursor.text()
        dimensions = cursor.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise damaged_file(
                self.path,
                msg(
                    "the tensor {name} has {dimensions} dimensions",
                    name=shown(name),
                    dimensions=dimensions,
                ),
            )
        shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))[::-1]
        return name, StoredTensor(shape, int(cursor.number("I")), int(cursor.number("Q")))

    def _bytes(self, name: str) -> memoryview:
        """A tensor's bytes, once they are checked to be in the file."""
        stored = self.tensors[name]
        gguf = gguf_package()
        try:  # how many numbers make a block, and its size in bytes
            block, size = map(int, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(stored.kind)])
        except (ValueError, KeyError):
            raise damaged_file(
                self.path,
                msg(
                    "{name} is stored in a format (type {kind}) that is unknown here",
                    name=shown(name),
                    kind=stored.kind,
                ),
            ) from None
        if not stored.shape or stored.shape[-1] % block:
            raise damaged_file(
                self.path,
                msg(
                    "the shape {shape} of {name} does not divide into blocks of {block}",
                    shape=list(stored.shape),
                    name=shown(name),
                    block=block,
                ),
            )
        end = stored.start + prod(stored.shape) // block * size
        if end > len(self.data):
            raise damaged_file(
                self.path,
                msg(
                    "{name} ends at byte {end} of a file of {data}",
                    name=shown(name),
                    end=end,
                    data=len(self.data),
                ),
            )
        return self.data[stored.start : end]

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantised to fp32."""
        stored = self.tensors[name]
        gguf = gguf_package()
        rows = np.frombuffer(self._bytes(name), np.uint8).reshape(*stored.shape[:-1], -1)
        kind = gguf.GGMLQuantizationType(stored.kind)
        try:
            # a damaged scale may be infinite; no need for NumPy to warn
            with np.errstate(all="ignore"):
                numbers = gguf.quants.dequantize(rows, kind)
        except NotImplementedError:
            raise MalmoiError(
                "{path}: {name} is packed as {kind}, which cannot be dequantised here.",
                path=self.path,
                name=shown(name),
                kind=kind.name,
            ) from None
        return torch.from_numpy(np.array(numbers, np.float32)).reshape(stored.shape)


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise MalmoiError("{path} is empty; copy or download it again.", path=path)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def damaged_file(path: Path, reason: str) -> MalmoiError:
    return MalmoiError(
        "{path} is cut short or damaged: {reason}. Copy or download it again.",
        path=path,
        reason=reason,
    )


def gguf_package() -> Any:
    """The `gguf` package, which knows the layout of every quantised type."""
    try:
        import gguf
    except ImportError as error:
        raise MalmoiError("GGUF files need the gguf package: pip install gguf.") from error
    return gguf
