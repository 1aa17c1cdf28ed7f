"""Where texts are cut: to fit a number of tokens, and Korean words into morphemes before the
vocabulary sees them; and where tokens lie in their texts.

Kiwi finds the morphemes. A mark, which no text has, is written between those of each run of Hangul,
and the vocabulary's pipeline splits at it and drops it. Cuts fall between syllables (갔다 → 갔|다),
so that the tokens are still the text. A run is cut alike wherever it occurs.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any, Literal

from malmoi.system.packages import optional_package


def truncate_to_tokens(sequences: list[int | None], max_tokens: int) -> list[int]:
    """The positions kept when truncating to `max_tokens`; special tokens (None) always stay."""
    first, second = ([at for at, text in enumerate(sequences) if text == one] for one in (0, 1))
    here, there = truncated(len(first), len(second), max_tokens - sequences.count(None))
    cut = {*first[here:], *second[there:]}
    return [at for at in range(len(sequences)) if at not in cut]


def truncated(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of each text of a pair fits: the longer one is truncated first (BERT's rule).

    If both are truncated and the room is odd, the longer text keeps the odd token, the second in a
    tie, as in transformers' "longest_first".
    """
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - room // 2
    return (long, short) if first > second else (short, long)


# ------------------------------------------------------------------ offsets

Offsets = list[tuple[int, int]]
# Characters that may compose with the one before (Unicode's NFC_Quick_Check=Maybe) without being
# combining marks: Hangul vowels and finals, and second halves of Indic vowel signs.
JOINS = re.compile(
    "[\u1161-\u1175\u11a8-\u11c2\u09be\u09d7\u0b3e\u0b56\u0b57\u0bbe\u0bd7\u0cc2\u0cd5\u0cd6\u0d3e\u0d57\u0dcf\u0ddf\u102e\u1b35\U00011127\U0001133e\U00011357\U000114b0\U000114ba\U000114bd\U000115af\U00011930]"
)


def widened(text: str, offsets: Sequence[tuple[int, int]]) -> Offsets:
    """Extends each end over the parts that NFC composed, up to the next token's start."""
    starts = sorted({start for start, end in offsets if start < end})
    return [(start, _end(text, end, starts) if start < end else end) for start, end in offsets]


def _end(text: str, end: int, starts: Sequence[int]) -> int:
    later = bisect_left(starts, end)
    limit = starts[later] if later < len(starts) else len(text)
    while end < limit and (unicodedata.combining(text[end]) or JOINS.match(text[end])):
        end += 1
    return end


def moved_offsets(given: Sequence[str], shown: Sequence[str]) -> Callable[[int], int]:
    """Maps offsets in joined parts to offsets after parts were rewritten."""
    begins = list(accumulate(map(len, given), initial=0))
    moved = list(accumulate(map(len, shown), initial=0))

    def place(at: int) -> int:
        part = bisect_right(begins, at) - 1
        return at - begins[part] + moved[part]

    return place


# ------------------------------------------------------------------ morphemes

Morphemes = Literal["none", "kiwi"]
MARK = "\U0001fffe"  # a noncharacter, reserved for internal use
REPLACEMENT = "\ufffd"  # for a mark in the text itself
HANGUL_RUN = re.compile("[가-힣]{2,}")
MAX_CACHED_RUNS = 1 << 18
_LOCK = Lock()


@cache
def load_kiwi() -> Any:
    """Kiwi, once per process: it takes a second and 100 MB."""
    return optional_package("kiwipiepy", "Splitting Korean").Kiwi()


def mark_morphemes(text: str) -> str:
    """The text with a mark between the morphemes of each word."""
    return HANGUL_RUN.sub(lambda run: _marked(run[0]), text.replace(MARK, REPLACEMENT))


@lru_cache(MAX_CACHED_RUNS)
def _marked(run: str) -> str:
    with _LOCK:
        found = load_kiwi().tokenize(run)
    return MARK.join(run[start:end] for start, end in _bounds(found, len(run)))


def _bounds(morphemes: Iterable[Any], length: int) -> Iterable[tuple[int, int]]:
    """Splits a run wherever a morpheme starts at a syllable boundary."""
    cuts = [0]
    end = 0
    for morpheme in morphemes:
        if cuts[-1] < morpheme.start < length and morpheme.start >= end:
            cuts.append(morpheme.start)
        end = max(end, morpheme.start + morpheme.len)
    return zip(cuts, [*cuts[1:], length], strict=True)


def without_marks(text: str, offsets: Offsets) -> Offsets:
    """Offsets in a marked text as offsets in the text itself."""
    marks = [found.start() for found in re.finditer(MARK, text)]
    return [
        (start - bisect_left(marks, start), end - bisect_left(marks, end)) for start, end in offsets
    ]
