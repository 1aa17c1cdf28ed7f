"""Corrects offsets of decomposed characters, of which the library covers only the first part."""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

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
