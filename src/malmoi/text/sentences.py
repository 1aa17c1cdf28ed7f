"""Splits English and Korean sentences: a regular expression finds candidates, rules decide.

Only white space is lost: the sentences joined are the text without its spaces.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from malmoi.errors import require_known
from malmoi.system.packages import optional_package

_OPENING = "\"'“‘([『「《〈"
_CLOSING = "\"'”’»)]』」》〉"
# It starts with a single character class, so that the search runs at memory speed, and captures
# further marks, the space after them and the first letter of the next word.
_END = re.compile(
    r"[.!?…。！？\n](?:(?<=\n)|(?P<more>[.!?…。！？]*)"
    rf"[{re.escape(_CLOSING)}]*(?P<space>\s*)(?=[{re.escape(_OPENING)}]*(?P<letter>\w?)))"
)
_NEXT_WORD = re.compile(rf"[{re.escape(_OPENING)}]*(\w*)")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)*[A-Za-z]")
_MARKER = re.compile(r"\(?(?:\d{1,3}|[가-힣]|[A-Za-z]|[ivxIVX]{1,5})\)?")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Precedes a name or a number, so never ends a sentence.
_TITLES = _words(
    "mr mrs ms mx dr prof st rev hon gen col maj capt cmdr lt sgt cpl adm gov sen rep pres messrs "
    "mme mlle e.g i.e cf vs viz al no nos vol vols pp fig figs eq eqs sec ch art approx ca"
)
# May end a sentence: it does if the next word is a typical sentence opener.
_SHORT = _words(
    "etc inc ltd co corp jr sr bros dept est jan feb mar apr jun jul aug sep sept oct nov dec mt "
    "ft ph.d"
)
_STARTERS = _words(
    "the a an this that these those he she it i we you they there here his her its our your their "
    "my in on at as if but and so or for when while after before since then what who why how where "
    "which with by from to no not yes however although because some many most all both each one "
    "two also now"
)


def split_sentences(text: str) -> list[str]:
    """Splits a text into stripped sentences; a line break always ends one."""
    found = []
    start = 0
    lowered = text.islower()  # then the case of the next word carries no information
    for match in _END.finditer(text):
        if _ends(text, start, match, lowered=lowered):
            if piece := text[start : match.end()].strip():
                found.append(piece)
            start = match.end()
    if piece := text[start:].strip():
        found.append(piece)
    return found


def _ends(text: str, start: int, match: re.Match[str], *, lowered: bool) -> bool:
    """Whether a sentence that began at `start` ends with this punctuation."""
    more, space, letter = match.groups()
    if space is None or "\n" in space:
        return True
    begin, end = match.span()
    mark = text[begin]
    if not space and end < len(text):
        return _without_space(text[max(begin - 1, 0) : begin], mark, text[end])
    if not lowered and letter.islower():
        return False
    return mark != "." or more != "" or _full_stop(text, start, begin, end)


def _without_space(before: str, mark: str, after: str) -> bool:
    """Whether no space is needed: after CJK full stops, and Korean verb endings (했다.그러나)."""
    return mark in "。！？" or (before != "" and before in "다요죠까" and "가" <= after <= "힣")


def _full_stop(text: str, start: int, begin: int, end: int) -> bool:
    """Whether a full stop ends a sentence, and not an abbreviation, initial or list number."""
    if begin - start < 12 and _MARKER.fullmatch(text[start:begin].strip()):
        return False
    first = max(text.rfind(" ", start, begin) + 1, start, begin - 12)
    word = text[first:begin].lstrip(_OPENING).lower()
    if word in _TITLES:
        return False
    if word in _SHORT or _INITIALS.fullmatch(word):
        following = _NEXT_WORD.match(text, end)
        return following is None or not following[1] or following[1].lower() in _STARTERS
    return True


class KiwiSplitter:
    """Splits Korean by kiwipiepy's morphological analysis: slower and more accurate."""

    def __init__(self) -> None:
        kiwipiepy = optional_package("kiwipiepy", "Splitting Korean")
        self._kiwi: Any = kiwipiepy.Kiwi()
        self.name = f"kiwi {kiwipiepy.__version__}"

    def __call__(self, text: str) -> list[str]:
        starts = [sentence.start for sentence in self._kiwi.split_into_sents(text)]
        pieces = (text[begin:end].strip() for begin, end in pairwise([0, *starts[1:], len(text)]))
        return [line.strip() for piece in pieces for line in piece.split("\n") if line.strip()]


def sentence_splitter(name: str) -> Callable[[str], list[str]]:
    require_known(
        name, ("rules", "kiwi"), "There is no method to split sentences called {name!r}.{hint}"
    )
    return split_sentences if name == "rules" else KiwiSplitter()
