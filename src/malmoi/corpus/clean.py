"""Step 1, clean: Unicode NFC, no HTML, no surplus white space, no menus."""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from unicodedata import category, is_normalized

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import IndexArray, Shard, StepStats, TextColumn, text_columns
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import LAST_CODE, native_ngrams
from malmoi.text.documents import Document

_BREAKS = re.compile("[\r\x0b\x0c\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
_SPACES = re.compile("[\t\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_BLANKS = re.compile(r"\n{3,}")
_NAMES = "html|head|body|div|p|br|hr|span|a|b|i|em|strong|img|table|tbody|tr|td|th|ul|ol|li|h[1-6]|script|style|pre"  # noqa: E501
_TAG = re.compile(rf"</?(?:{_NAMES})\b[^<>]*>", re.IGNORECASE)
_HIDES = re.compile(r"<(script|style|head)\b|<!--", re.IGNORECASE)
_SHOWS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ("script", "style", "head")}
_SHOWS["comment"] = re.compile("-->")
_BLOCK = re.compile(r"</?(?:p|div|br|hr|tr|li|ul|ol|table|h[1-6]|pre)\b[^<>]*>", re.IGNORECASE)
_ANY = re.compile(r"</?[a-z!][^<>]*>", re.IGNORECASE)
_BYTES_PER_CHARACTER = 4  # of UTF-8, at most
_ENDS = ".!?。！？…:;,\"'”’"  # a line ending in one of these is a sentence, or part of one


def cleaned(shard: Shard, stats: StepStats) -> Shard:
    """The documents with clean text; empty ones are dropped."""
    texts = clean_texts(shard.texts)
    is_left = texts.characters > 0
    for row in np.flatnonzero(~is_left).tolist():
        stats.count_rule("empty", shard[row])
    return stats.count(shard, replace(shard, texts=texts).where(is_left))


def clean_texts(texts: TextColumn) -> TextColumn:
    """Cleans texts; those of plain characters, nearly all, in one call of C."""
    native = native_ngrams()
    rows, after = np.arange(len(texts)), texts
    if native is not None:
        rows, after = _clean_plain(native["clean"], texts)
    others = TextColumn.of([clean(texts[row]) for row in rows.tolist()])
    places = np.arange(len(texts))
    places[rows] = np.arange(len(texts), len(texts) + len(rows))
    return after.append(others).take(places) if len(rows) else after


def _clean_plain(call: Callable[..., int], texts: TextColumn) -> tuple[IndexArray, TextColumn]:
    """The rows of texts that are not plain, and all texts, the others of them clean."""
    clean = np.empty(int((texts.ends - texts.begins).sum()), np.uint8)
    ends, characters = np.empty((2, len(texts)), np.int64)
    is_plain = np.empty(len(texts), bool)
    cleaned = (clean, ends, characters, is_plain)
    size = call(len(texts), texts.data, texts.begins, texts.ends, _plain(), *cleaned)
    after = TextColumn(clean[:size].tobytes(), np.append(0, ends)[:-1], ends, characters)
    return np.flatnonzero(~is_plain), after


def clean_columns(texts: Iterable[str]) -> Iterator[TextColumn]:
    return map(clean_texts, text_columns(texts))


@cache
def _plain() -> NDArray[np.bool_]:
    """The characters that `clean` leaves alone wherever they are.

    NFC may compose marks and parts of Korean syllables with what is before them.
    """
    plain = np.array(
        [
            c.isprintable() and c != "<" and category(c)[0] != "M" and is_normalized("NFC", c)
            for c in map(chr, range(LAST_CODE + 1))
        ]
    )
    plain[0x1100:0x1200] = False  # the parts of syllables
    return plain


def clean(text: str) -> str:
    """Cleans a text: NFC, no tags or control characters, single spaces, at most one blank line."""
    if "<" in text and sum(1 for _ in zip(range(2), _TAG.finditer(text), strict=False)) == 2:
        # blocks become lines, scripts are removed, entities decoded
        text = html.unescape(_ANY.sub("", _BLOCK.sub("\n", _shown(text))))
    text = unicodedata.normalize("NFC", text)
    if not text.replace("\n", "").isprintable():
        text = _CONTROL.sub("", _BREAKS.sub("\n", text.replace("\r\n", "\n")))
        text = _SPACES.sub(" ", text)
    while "  " in text:  # printable text has no other spaces than this one
        text = text.replace("  ", " ")
    text = text.replace(" \n", "\n").replace("\n ", "\n")
    return (_BLANKS.sub("\n\n", text) if "\n\n\n" in text else text).strip()


def _shown(text: str) -> str:
    """Removes scripts, styles and comments; unclosed ones are kept."""
    parts = []
    at = 0
    endless = set()
    for match in _HIDES.finditer(text):
        name = (match[1] or "comment").lower()
        if match.start() < at or name in endless:
            continue
        if end := _SHOWS[name].search(text, match.end()):
            parts.append(text[at : match.start()])
            at = end.end()
        else:
            endless.add(name)
    return "".join(parts) + text[at:]


def short_lines(shard: Shard, config: CorpusConfig) -> dict[str, dict[str, int]]:
    """By source, lines of several documents that could be a menu, short and not a sentence."""
    found = {source: Counter[str]() for source in dict.fromkeys(shard.sources)}
    longest = config.menu_length
    for row in np.flatnonzero(shard.texts.line_breaks() > 1).tolist():
        lines = {*shard.texts.encoded(row).split(b"\n")}
        short = (line.decode() for line in lines if 0 < len(line) <= _BYTES_PER_CHARACTER * longest)
        found[shard.sources[row]].update(
            line for line in short if len(line) <= longest and line[-1] not in _ENDS
        )
    return {source: _repeated(lines) for source, lines in found.items()}


def _repeated(lines: Counter[str]) -> dict[str, int]:
    return {line: count for line, count in lines.items() if count > 1}


def menus(lines: Counter[str], documents: int, config: CorpusConfig) -> list[str]:
    """The lines that are boilerplate, because they occur in too many of a source's documents."""
    limit = max(config.menu_documents, config.menu_share * documents)
    return sorted(line for line, count in lines.items() if count >= limit)


def without_menus(shard: Shard, menus: Mapping[str, Collection[str]], stats: StepStats) -> Shard:
    """The documents without the boilerplate lines of their source."""
    changes: dict[int, list[Document]] = {}
    known = {source: {line.encode() for line in lines} for source, lines in menus.items() if lines}
    for row in [row for row, source in enumerate(shard.sources) if source in known]:
        lines = shard.texts.encoded(row).split(b"\n")
        if known[shard.sources[row]].isdisjoint(lines):
            continue
        before = shard[row]
        stats.count_rule("menu lines", before)
        left = [line for line in lines if line not in known[before.source]]
        text = _BLANKS.sub("\n\n", b"\n".join(left).decode()).strip()
        changes[row] = [before._replace(text=text)] if text else []
    return stats.count(shard, shard.changed(changes))
