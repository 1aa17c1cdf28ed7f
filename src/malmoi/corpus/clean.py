"""Step 1, clean: Unicode NFC, no HTML, no surplus white space, no menus."""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from unicodedata import category, is_normalized

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import LAST_CODE, code_points, native_ngrams, text_groups, text_places
from malmoi.corpus.stats import StepStats
from malmoi.text.documents import Document

_BREAKS = re.compile(r"\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
_SPACES = re.compile(r"[^\S\n]{2,}|[^\S\n ]")
_BLANKS = re.compile(r"\n{3,}")
_NAMES = "html|head|body|div|p|br|hr|span|a|b|i|em|strong|img|table|tbody|tr|td|th|ul|ol|li|h[1-6]|script|style|pre"  # noqa: E501
_TAG = re.compile(rf"</?(?:{_NAMES})\b[^<>]*>", re.IGNORECASE)
_HIDES = re.compile(r"<(script|style|head)\b|<!--", re.IGNORECASE)
_SHOWS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ("script", "style", "head")}
_SHOWS["comment"] = re.compile("-->")
_BLOCK = re.compile(r"</?(?:p|div|br|hr|tr|li|ul|ol|table|h[1-6]|pre)\b[^<>]*>", re.IGNORECASE)
_ANY = re.compile(r"</?[a-z!][^<>]*>", re.IGNORECASE)
_ENDS = ".!?。！？…:;,\"'”’"  # a line ending in one of these is a sentence, or part of one


def cleaned(documents: Sequence[Document], stats: StepStats) -> list[Document]:
    """The documents with clean text; empty ones are dropped."""
    after = []
    texts = clean_each([document.text for document in documents])
    for document, text in zip(documents, texts, strict=True):
        if text:
            after.append(document if text is document.text else document._replace(text=text))
        else:
            stats.count_rule("empty", document)
    return stats.count(documents, after)


def clean_each(texts: Iterable[str]) -> Iterator[str]:
    """Cleans texts; one look at many texts together finds those that are clean."""
    native = native_ngrams()
    for group in text_groups(texts):
        if native is None:
            yield from map(clean, group)
            continue
        may_change = np.empty(len(group), bool)
        arrays = (code_points("\n".join(group)), *text_places(group), _plain(), may_change)
        native[5](len(group), *(array.ctypes.data for array in arrays))
        for text, may in zip(group, may_change.tolist(), strict=True):
            yield clean(text) if may else text


@cache
def _plain() -> NDArray[np.bool_]:
    """The characters that `clean` leaves alone wherever they are, and line breaks.

    NFC may compose marks and parts of Korean syllables with what is before them.
    """
    signs = map(chr, range(LAST_CODE))
    plain = np.array(
        [
            c.isprintable() and c != "<" and category(c)[0] != "M" and is_normalized("NFC", c)
            for c in signs
        ]
    )
    plain[ord("\n")] = True
    plain[0x1100:0x1200] = False  # the parts of syllables
    return plain


def clean(text: str) -> str:
    """Cleans a text: NFC, no tags or control characters, single spaces, at most one blank line."""
    if "<" in text and sum(1 for _ in zip(range(2), _TAG.finditer(text), strict=False)) == 2:
        text = without_html(text)
    text = unicodedata.normalize("NFC", text)
    if not text.replace("\n", "").isprintable():
        text = _CONTROL.sub("", _BREAKS.sub("\n", text))
        text = _SPACES.sub(" ", text)
    while "  " in text:  # printable text has no other spaces than this one
        text = text.replace("  ", " ")
    text = text.replace(" \n", "\n").replace("\n ", "\n")
    return (_BLANKS.sub("\n\n", text) if "\n\n\n" in text else text).strip()


def without_html(text: str) -> str:
    """Extracts the text of a page: blocks become lines, scripts are removed, entities decoded."""
    return html.unescape(_ANY.sub("", _BLOCK.sub("\n", _shown(text))))


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


def short_lines(document: Document, config: CorpusConfig) -> set[str]:
    """The lines of a document that could be a menu: short and not a sentence."""
    if document.text.count("\n") < 2:
        return set()
    lines = document.text.split("\n")
    return {line for line in lines if 0 < len(line) <= config.menu_length and line[-1] not in _ENDS}


def menus(lines: Counter[str], documents: int, config: CorpusConfig) -> list[str]:
    """The lines that are boilerplate, because they occur in too many of a source's documents."""
    limit = max(config.menu_documents, config.menu_share * documents)
    return sorted(line for line, count in lines.items() if count >= limit)


def without_menus(
    documents: Sequence[Document], menus: Mapping[str, Collection[str]], stats: StepStats
) -> list[Document]:
    """The documents without the boilerplate lines of their source."""
    after = []
    for document in documents:
        if known := menus.get(document.source):
            lines = document.text.split("\n")
            left = [line for line in lines if line not in known]
            if len(left) < len(lines):
                stats.count_rule("menu lines", document)
                document = document._replace(text=_BLANKS.sub("\n\n", "\n".join(left)).strip())
        if document.text:
            after.append(document)
    return stats.count(documents, after)
