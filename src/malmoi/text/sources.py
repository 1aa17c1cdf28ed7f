"""Text sources: files, folders, globs, URLs, standard input, built-in texts, hub data sets."""

import hashlib
import json
import shutil
import sys
import tempfile
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from malmoi.errors import MalmoiError, ensure, first_line, require_known
from malmoi.system.packages import optional_package
from malmoi.system.paths import require_path
from malmoi.system.untrusted import JsonObject, read_object
from malmoi.text.formats import (
    FORMATS,
    FoundDocument,
    FoundDocuments,
    ReadOptions,
    column_documents,
)
from malmoi.text.lines import (
    open_bytes,
    shown_formats,
    uncompressed_name,
    unknown_format,
    whole_items,
)
from malmoi.text.records import checked_column
from malmoi.text.web import WEB_FORMATS

# bytes: smaller files are fingerprinted by content, larger ones by size and time
MAX_HASHED_BYTES = 1 << 20
READERS = {**FORMATS, **WEB_FORMATS}


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

    def documents(self, want: ReadOptions) -> FoundDocuments:
        return whole_items(self.path, READERS[self.kind](self.path, want))

    def fingerprint(self) -> list[Any]:
        about = self.path.stat()
        if about.st_size <= MAX_HASHED_BYTES:
            return [self.path.name, hashlib.sha256(self.path.read_bytes()).hexdigest()]
        return [str(self.path.resolve()), about.st_size, about.st_mtime_ns]


@dataclass(frozen=True)
class OtherSource:
    """A source that is no file of the user's."""

    name: str
    size: int
    documents: Callable[[ReadOptions], FoundDocuments]
    fingerprint: Callable[[], list[Any]]


TextSource = FileSource | OtherSource


def _standard_input() -> OtherSource:
    """Standard input, spooled to a temporary file so that it can be read again."""
    spool = Path(tempfile.mkdtemp(prefix="malmoi-")) / "stdin.txt"
    with spool.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    with spool.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    source = OtherSource(
        "-", spool.stat().st_size, partial(FORMATS[".txt"], spool), lambda: ["-", digest]
    )
    weakref.finalize(source, shutil.rmtree, spool.parent, ignore_errors=True)
    return source


SOTU_MESSAGES = Path(__file__).parent / "sotu" / "messages.jsonl.xz"


def _sotu() -> OtherSource:
    """249 State of the Union messages, 12 MB, in the public domain and part of this package."""
    name = "builtin:sotu"
    return OtherSource(
        name,
        12 << 20,
        lambda want: _numbered(message["text"] for message in sotu_messages()),
        lambda: [name, [message["name"] for message in sotu_messages()]],
    )


def _numbered(texts: Iterable[str]) -> FoundDocuments:
    return (FoundDocument(text, number) for number, text in enumerate(texts, start=1))


def sotu_messages() -> Iterator[dict[str, Any]]:
    """Each message's name ("1790-Washington-1"), year, president, party and text."""
    with open_bytes(SOTU_MESSAGES) as lines:
        yield from map(json.loads, lines)


KOREAN_TEXTS = Path(__file__).parent / "korean"  # written for Malmoi; a file is a topic


def _korean() -> OtherSource:
    """Short Korean pieces on six topics, part of this package and under its licence."""
    name = "builtin:korean"
    files = _in_folder(KOREAN_TEXTS)
    return OtherSource(
        name,
        sum(file.size for file in files),
        lambda want: _numbered(piece for file in files for piece in korean_pieces(file.path)),
        lambda: [name, *(file.fingerprint() for file in files)],
    )


def korean_pieces(path: Path) -> list[str]:
    """The pieces of one topic: a line is a paragraph, a blank line ends a piece."""
    return path.read_text("utf-8").strip().split("\n\n")


BUILT_IN: dict[str, Callable[[], TextSource]] = {"builtin:sotu": _sotu, "builtin:korean": _korean}


def _hub_dataset(name: str) -> OtherSource:
    """A Hugging Face data set: hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT (default: train)."""
    dataset, config, split = [*name.removeprefix("hf:").split(":"), "", ""][:3]
    load_dataset = optional_package("datasets", name).load_dataset
    try:
        data = load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:  # of many kinds, all of which mean that it is unavailable
        raise MalmoiError(
            "The data set {name} cannot be loaded: {error}", name=name, error=first_line(error)
        ) from error

    def documents(want: ReadOptions) -> FoundDocuments:
        checked_column(name, want.column, data.column_names)
        read = [column for column in data.column_names if column in (want.column, "url")]
        return column_documents(name, enumerate(data.select_columns(read), start=1), want)

    return OtherSource(
        name, int(data.dataset_size or 0), documents, lambda: [name, data._fingerprint]
    )


def resolve_source(given: str) -> list[TextSource]:
    """Resolves a command line argument to its sources."""
    if given == "-":
        return [_standard_input()]
    if given.startswith("builtin:"):
        require_known(given, BUILT_IN, "There is no built-in corpus {name!r}.{hint}")
        return [BUILT_IN[given]()]
    if "://" in given:
        from malmoi.text.remote import remote_files

        return [*remote_files(given)]
    folder = Path(given.removeprefix("hf:")).expanduser()
    # a folder that `save_to_disk` of the datasets library wrote is read without it
    is_saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if given.startswith("hf:") and not is_saved:
        return [_hub_dataset(given)]
    return [*_on_disk(given.removeprefix("hf:"))]


def _on_disk(given: str) -> list[FileSource]:
    path = _as_spelt(Path(given).expanduser())
    if path.is_dir():
        found = _in_folder(path)
    elif path.exists() or not any(sign in given for sign in "*?["):
        require_path(path)
        found = [FileSource(path, known_format(path))]
    else:
        matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        files = (match for match in sorted(matches) if match.is_file())
        found = [FileSource(file, known_format(file)) for file in files]
    ensure(
        found,
        "No file matches {given!r}: text is in files of the formats {known}.",
        given=given,
        known=shown_formats(READERS),
    )
    return found


def _as_spelt(path: Path) -> Path:
    """The path with the name that its folder has, which macOS may have decomposed."""
    if path.exists() or not path.parent.is_dir():
        return path
    composed = unicodedata.normalize("NFC", path.name)
    names = (other.name for other in path.parent.iterdir())
    same = (name for name in names if unicodedata.normalize("NFC", name) == composed)
    return path.with_name(next(same, path.name))


def known_format(path: PurePath) -> str:
    """Of an explicitly named file: a known format, or without suffix plain text."""
    kind = format_of(Path(path))
    if kind is None and path.suffix:
        raise unknown_format(path, READERS)
    return kind or ".txt"


def format_of(path: Path) -> str | None:
    """The suffix that determines the format, without that of the compression."""
    suffix = uncompressed_name(path).suffix
    return suffix if suffix in READERS else None


def _in_folder(folder: Path) -> list[FileSource]:
    """Every file of a known format below, but of models; of a saved data set the training split.

    .json files count as data only if there are no others.
    """
    if (folder / "dataset_dict.json").is_file() and (folder / "train").is_dir():
        folder = folder / "train"
    if (folder / "state.json").is_file():
        state = folder / "state.json"
        entries = read_object(state).list_of("_data_files", dict, default=[])
        names = (JsonObject(entry, str(state)).text("filename") for entry in entries)
        return [FileSource(folder / name, ".arrow") for name in names]
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    models = {path.parent for path in paths if path.name in ("recipe.json", "tokenizer.json")}
    shown = (
        path
        for path in paths
        if not path.name.startswith(".") and (models - {folder}).isdisjoint(path.parents)
    )
    found = [FileSource(path, kind) for path in shown if (kind := format_of(path))]
    return [file for file in found if file.kind != ".json"] or found
