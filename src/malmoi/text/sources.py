"""Text sources: files, folders, globs, standard input, built-in texts, hub data sets."""

import hashlib
import json
import shutil
import sys
import tempfile
import unicodedata
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from malmoi.errors import MalmoiError, UsageError, first_line, require_known
from malmoi.system.paths import require_path
from malmoi.system.untrusted import JsonObject, read_object
from malmoi.text.formats import (
    FORMATS,
    FoundDocument,
    FoundDocuments,
    FoundLines,
    ReadOptions,
    checked_column,
    read_plain_blocks,
    text_cells,
)
from malmoi.text.open_file import COMPRESSED, open_bytes, uncompressed_name, whole_items
from malmoi.text.web import WEB_FORMATS

# bytes: smaller files are fingerprinted by content, larger ones by size and time
MAX_HASHED_BYTES = 1 << 20
READERS = {**FORMATS, **WEB_FORMATS}


class TextSource(Protocol):
    """A named source of documents."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def documents(self, want: ReadOptions) -> Iterator[FoundDocument | FoundLines]: ...
    def fingerprint(self) -> list[Any]: ...


@dataclass(frozen=True)
class FileSource:
    """One file of a known format."""

    path: Path
    kind: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def documents(self, want: ReadOptions) -> Iterator[FoundDocument | FoundLines]:
        read = read_plain_blocks if self.kind == ".txt" else READERS[self.kind]
        return whole_items(self.path, read(self.path, want))

    def fingerprint(self) -> list[Any]:
        about = self.path.stat()
        if about.st_size <= MAX_HASHED_BYTES:
            return [self.path.name, hashlib.sha256(self.path.read_bytes()).hexdigest()]
        return [str(self.path.resolve()), about.st_size, about.st_mtime_ns]


class StandardInput:
    """Standard input, spooled to a temporary file so that it can be read again."""

    name = "-"

    def __init__(self) -> None:
        self._spool = Path(tempfile.mkdtemp(prefix="malmoi-")) / "stdin.txt"
        weakref.finalize(self, shutil.rmtree, self._spool.parent, ignore_errors=True)
        digest = hashlib.sha256()
        with self._spool.open("wb") as spool:
            while piece := sys.stdin.buffer.read(1 << 20):
                digest.update(piece)
                spool.write(piece)
        self._digest = digest.hexdigest()

    @property
    def size(self) -> int:
        return self._spool.stat().st_size

    def documents(self, want: ReadOptions) -> FoundDocuments:
        return FORMATS[".txt"](self._spool, want)

    def fingerprint(self) -> list[Any]:
        return ["-", self._digest]


SOTU_MESSAGES = Path(__file__).parent / "sotu" / "messages.jsonl.xz"


@dataclass(frozen=True)
class SotuSource:
    """249 State of the Union messages, 12 MB, in the public domain and part of this package."""

    name: str = "builtin:sotu"
    size: int = 12 << 20

    def documents(self, want: ReadOptions) -> FoundDocuments:
        messages = enumerate(sotu_messages(), start=1)
        return (FoundDocument(message["text"], number) for number, message in messages)

    def fingerprint(self) -> list[Any]:
        return [self.name, [message["name"] for message in sotu_messages()]]


def sotu_messages() -> Iterator[dict[str, Any]]:
    """Each message's name ("1790-Washington-1"), year, president, party and text."""
    with open_bytes(SOTU_MESSAGES) as lines:
        yield from map(json.loads, lines)


KOREAN_TEXTS = Path(__file__).parent / "korean"  # written for Malmoi; a file is a topic


@dataclass(frozen=True)
class KoreanSource:
    """Short Korean pieces on six topics, part of this package and under its licence."""

    name: str = "builtin:korean"

    @property
    def size(self) -> int:
        return sum(source.size for source in self._files())

    def documents(self, want: ReadOptions) -> FoundDocuments:
        pieces = [piece for source in self._files() for piece in korean_pieces(source.path)]
        return (FoundDocument(piece, number) for number, piece in enumerate(pieces, start=1))

    def fingerprint(self) -> list[Any]:
        return [self.name, *(source.fingerprint() for source in self._files())]

    def _files(self) -> list[FileSource]:
        return _in_folder(KOREAN_TEXTS)


def korean_pieces(path: Path) -> list[str]:
    """The pieces of one topic: a line is a paragraph, a blank line ends a piece."""
    return path.read_text("utf-8").strip().split("\n\n")


BUILT_IN: dict[str, Callable[[], TextSource]] = {
    "builtin:sotu": SotuSource,
    "builtin:korean": KoreanSource,
}


class HubDataset:
    """A Hugging Face data set: hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT (default: train)."""

    def __init__(self, name: str):
        self.name = name
        try:
            import datasets
        except ImportError as error:
            raise MalmoiError(
                "{name} needs the package datasets: pip install datasets.", name=name
            ) from error
        dataset, config, split = [*name.removeprefix("hf:").split(":"), "", ""][:3]
        try:
            self._data = datasets.load_dataset(dataset, config or None, split=split or "train")
        # the hub raises many kinds of errors; all mean that the data set is unavailable
        except Exception as error:
            raise MalmoiError(
                "The data set {name} cannot be loaded: {error}", name=name, error=first_line(error)
            ) from error

    @property
    def size(self) -> int:
        return int(self._data.dataset_size or 0)

    def documents(self, want: ReadOptions) -> FoundDocuments:
        name = checked_column(self.name, want.column, self._data.column_names)
        yield from text_cells((row[name] for row in self._data.select_columns([name])), want)

    def fingerprint(self) -> list[Any]:
        return [self.name, self._data._fingerprint]


def resolve_source(given: str) -> list[TextSource]:
    """Resolves a command line argument to its sources."""
    if given == "-":
        return [StandardInput()]
    if given.startswith("builtin:"):
        require_known(given, BUILT_IN, "There is no built-in corpus {name!r}.{hint}")
        return [BUILT_IN[given]()]
    if given.startswith("hf:") and not _is_saved(Path(given.removeprefix("hf:")).expanduser()):
        return [HubDataset(given)]
    return [*_on_disk(given.removeprefix("hf:"))]


def _is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of the datasets library."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _on_disk(given: str) -> list[FileSource]:
    path = _as_spelt(Path(given).expanduser())
    if path.is_dir():
        found = _in_folder(path)
        if not found:
            raise MalmoiError(
                "The folder {path} has no file in a known format ({known}).",
                path=path,
                known=_known(),
            )
        return found
    if path.exists() or not any(sign in given for sign in "*?["):
        require_path(path)
        return [_file(path)]
    matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
    found = [_file(match) for match in sorted(matches) if match.is_file()]
    if not found:
        raise MalmoiError("No file matches {given!r}.", given=given)
    return found


def _as_spelt(path: Path) -> Path:
    """The path with the name that its folder has, which macOS may have decomposed."""
    if path.exists() or not path.parent.is_dir():
        return path
    composed = unicodedata.normalize("NFC", path.name)
    names = (other.name for other in path.parent.iterdir())
    same = (name for name in names if unicodedata.normalize("NFC", name) == composed)
    return path.with_name(next(same, path.name))


def _file(path: Path) -> FileSource:
    """An explicitly named file: of a known format, or without suffix, which means plain text."""
    kind = format_of(path)
    if kind is None and path.suffix:
        raise UsageError(
            "{path} has an unknown format: its name should end in one of {kinds}.",
            path=path,
            kinds=_known(),
        )
    return FileSource(path, kind or ".txt")


def format_of(path: Path) -> str | None:
    """The suffix that determines the format, without that of the compression."""
    suffix = uncompressed_name(path).suffix
    return suffix if suffix in READERS else None


def _known() -> str:
    return f"{' '.join(READERS)}, also {' '.join(COMPRESSED)}"


def _in_folder(folder: Path) -> list[FileSource]:
    """Every file of a known format below; of a saved data set the files of its training split.

    .json files count as data only if there are no others.
    """
    if (folder / "dataset_dict.json").is_file() and (folder / "train").is_dir():
        folder = folder / "train"
    if (folder / "state.json").is_file():
        state = folder / "state.json"
        entries = read_object(state).list_of("_data_files", dict, default=[])
        names = (JsonObject(entry, str(state)).text("filename") for entry in entries)
        return [FileSource(folder / name, ".arrow") for name in names]
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    shown = (path for path in paths if not path.name.startswith("."))
    found = [FileSource(path, kind) for path in shown if (kind := format_of(path))]
    return [file for file in found if file.kind != ".json"] or found
