"""Splits files into documents: plain text by one of four rules, Markdown, JSON, tables."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from malmoi.errors import MalmoiError, ensure, explained
from malmoi.messages import msg
from malmoi.text.lines import OnBadLine, decode_blocks, open_bytes, read_sample
from malmoi.text.records import Records, WantedColumns, checked_column, label_name, read_records

MAX_DOCUMENT_CHARACTERS = 1 << 24  # a longer document is split at a space
MAX_BAD_SHARE = 0.2  # unreadable characters of a text file
SURROGATE = re.compile("[\ud800-\udfff]")
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
DOCUMENT_RULES = {
    "blank": "a blank line separates documents",
    "blanks": "two blank lines separate documents",
    "line": "every line is a document",
    "file": "the file is one document",
}


class FoundDocument(NamedTuple):
    """A document in a file: its text, its line or record, and its URL if it has one."""

    text: str
    line: int
    url: str = ""
    page: bytes | None = None  # HTML whose main text has yet to be extracted


LineBlocks = Iterator[tuple[int, list[str], bool]]  # number of the first, lines, whether they end


class FoundLines(NamedTuple):
    """Lines that are a document each, from line `first` on; empty ones are none."""

    texts: list[str]
    first: int


FoundDocuments = Iterator[FoundDocument | FoundLines]


@dataclass(frozen=True)
class ReadOptions:
    """The rule for plain text ("auto": by file), the column or key, and callbacks."""

    rule: str
    column: str
    on_bad_line: OnBadLine
    on_rule: Callable[[str], None]


def read_plain(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads plain text, by the given rule or the one that fits the file."""
    encoding, start, _ = read_sample(path)
    ensure(
        start.count("\ufffd") + start.count("\0") <= max(MAX_BAD_SHARE * len(start), 100),
        "{path} is not text: most of its bytes are not readable as {encoding}.",
        path=path,
        encoding=encoding,
    )
    rule = guess_rule(start) if want.rule == "auto" else want.rule
    want.on_rule(rule)
    with open_bytes(path) as stream:
        yield from _by_rule(decode_blocks(stream, encoding, want.on_bad_line), rule)


def read_markdown(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a Markdown file as one document, unless another rule was given."""
    yield from read_plain(path, replace(want, rule="file") if want.rule == "auto" else want)


def guess_rule(text: str) -> str:
    """Guesses the rule from the beginning of a text.

    No blank line, or one in thousands of lines: every line is a document. Short blocks in a long
    text (under 200 characters on average: verses, speeches) are parts of one document. Many single
    blank lines and a few double ones: paragraphs and documents.
    """
    blank = re.findall(r"\n(?:[ \t\r]*\n)+(?=[ \t\r]*\S)", text.strip())
    gaps = [gap.count("\n") - 1 for gap in blank]
    if max(gaps, default=1) == 1 and text.count("\n") >= 2000 * len(gaps):
        return "line"
    average = len(text) / (len(gaps) + 1)
    if len(text) >= 1 << 16 and average < 200:
        return "file"
    few = 0 < 20 * sum(gap > 1 for gap in gaps) <= len(gaps)  # double ones
    return "blanks" if len(gaps) >= 100 and few and average < 500 else "blank"


def _by_rule(blocks: LineBlocks, rule: str) -> FoundDocuments:
    """Joins lines into documents, stripped unless the file is one document.

    Where each line is one, many are given at once, and the pieces of a long one joined.
    """
    limit = {"blank": 1, "blanks": 2}.get(rule, 0)
    tidy: Callable[[str], str] = str if rule == "file" else str.strip
    parts: list[str] = []
    begun = 1
    size = 0
    blank = 0
    for first, lines, ends in blocks:
        whole = rule == "line" and ends and not parts
        if whole and sum(map(len, lines)) <= MAX_DOCUMENT_CHARACTERS:
            yield FoundLines([text.strip() for text in lines], first)
            continue
        if rule == "file" and ends:
            lines = ["\n".join(lines)]
        for number, text in enumerate(lines, first):
            blank = 0 if text and not text.isspace() else blank + 1
            is_new = blank == limit if limit else rule == "line" and begun < number
            if parts and (is_new or size > MAX_DOCUMENT_CHARACTERS):
                yield FoundDocument(tidy("".join(parts)), begun)
                parts = []
                size = 0
            begun = begun if parts else number
            parts.append(text + "\n" if ends else text)
            size += len(parts[-1])
    yield FoundDocument(tidy("".join(parts)), begun)


def read_column(path: Path, want: ReadOptions) -> FoundDocuments:
    """Reads a column of a table or the values at a key of JSON objects, with their URLs."""
    wanted = WantedColumns((want.column, label_name(want.column), "url"), only=True)
    return column_documents(f"{path}:1", read_records(path, want.on_bad_line, wanted), want)


def column_documents(where: str | Path, records: Records, want: ReadOptions) -> FoundDocuments:
    """The texts of a column of some records; what has none is reported."""
    column = ""
    for number, record in records:
        if isinstance(record, str):
            want.on_bad_line(number, record)
            continue
        if not column:  # a table has its names as `label_name` writes them
            named = want.column if want.column in record else label_name(want.column)
            with explained(
                MalmoiError,
                "{error} Name the column of the text: --text COLUMN for corpus build, "
                "--set data.text=COLUMN for pretrain (text=…).",
            ):
                column = checked_column(where, named, record)
        text, url = (record.get(name) for name in (column, "url"))
        # JSON can express a lone surrogate, which is no character
        if isinstance(text, str) and (text.isascii() or not SURROGATE.search(text)):
            yield FoundDocument(text, number, url if isinstance(url, str) else "")
        else:
            want.on_bad_line(number, msg("no text in {column!r}", column=want.column))


FORMATS: dict[str, Callable[[Path, ReadOptions], FoundDocuments]] = {
    ".txt": read_plain,
    ".md": read_markdown,
    **dict.fromkeys(TABLES, read_column),
}
