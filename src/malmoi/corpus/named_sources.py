"""Named sources: NAME=SOURCE, or a name taken from the source."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malmoi.corpus.config import CorpusConfig
from malmoi.errors import UsageError
from malmoi.text.documents import DocumentReader, read_documents
from malmoi.text.open_file import COMPRESSED
from malmoi.text.sources import FileSource, format_of, resolve_source


@dataclass(frozen=True)
class NamedSource:
    """All sources under one name."""

    name: str
    given: list[str]
    reader: DocumentReader

    def about(self) -> dict[str, Any]:
        """Its entry in corpus.json."""
        r = self.reader
        sizes = {"files": len(r.files), "bytes": r.size}
        return {"name": self.name, "given": self.given, **sizes, "is": r.fingerprint()}

    def clash(self, out: Path) -> str | None:
        """The path of this source that is inside the folder or contains it, if any."""
        out = out.resolve()
        for given in self.given:
            if Path(given).is_dir() and out.is_relative_to(Path(given).resolve()):
                return given
        paths = (s.path for s in self.reader.sources if isinstance(s, FileSource))
        return next((str(path) for path in paths if path.resolve().is_relative_to(out)), None)


def named_sources(
    given: str | Path | Sequence[str | Path], config: CorpusConfig
) -> list[NamedSource]:
    """The sources grouped by name, in order of first appearance."""
    found: dict[str, list[str]] = {}
    for one in [given] if isinstance(given, str | Path) else given:
        name, source = _name(str(one))
        found.setdefault(name, []).append(source)
    if not found:
        raise UsageError("No text was given: pass files, folders, globs, - or builtin:sotu.")
    return [
        NamedSource(n, s, read_documents(s, documents=config.documents, text=config.text))
        for n, s in found.items()
    ]


def _name(given: str) -> tuple[str, str]:
    match = re.fullmatch(r"([\w.-]+)=(.+)", given)
    if match and not Path(given).exists():
        return match[1], match[2]
    if given == "-":
        return "stdin", given
    if given.startswith(("builtin:", "hf:")):
        return given.partition(":")[2], given
    path = Path(given)
    return (
        path.absolute().parent.name if re.search(r"[*?\[]", path.name) else _bare(path.absolute())
    ), given


def _bare(path: Path) -> str:
    """The name of a file without its suffixes."""
    kind = format_of(path)
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.stem if kind else name.name


def benchmark_files(given: Sequence[str]) -> list[Path]:
    """The files of test sets."""
    found = [source for text in given for source in resolve_source(text)]
    for source in found:
        if not isinstance(source, FileSource):
            raise UsageError(
                "{source} cannot be used as a test set: give files.", source=source.name
            )
    return [source.path for source in found if isinstance(source, FileSource)]
