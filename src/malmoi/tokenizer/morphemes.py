"""Korean words cut into morphemes by Kiwi before the vocabulary sees them.

A mark, which no text has, is written between the morphemes of each run of Hangul, and the
vocabulary's pipeline splits at it and drops it. Cuts fall between syllables (갔다 → 갔|다), so
that the tokens are still the text. A run is cut alike wherever it occurs.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache, lru_cache
from threading import Lock
from typing import Any, Literal

from malmoi.errors import MalmoiError
from malmoi.tokenizer.offsets import Offsets

Morphemes = Literal["none", "kiwi"]
MARK = "\U0001fffe"  # a noncharacter, reserved for internal use
REPLACEMENT = "\ufffd"  # for a mark in the text itself
HANGUL_RUN = re.compile("[가-힣]{2,}")
MAX_CACHED_RUNS = 1 << 18
_LOCK = Lock()


@cache
def load_kiwi() -> Any:
    """Kiwi, once per process: it takes a second and 100 MB."""
    try:
        import kiwipiepy
    except ImportError as error:
        raise MalmoiError(
            "This tokenizer splits Korean into morphemes with the package kiwipiepy: pip install "
            "kiwipiepy."
        ) from error
    return kiwipiepy.Kiwi()


def mark_morphemes(text: str) -> str:
    """The text with a mark between the morphemes of each word."""
    return HANGUL_RUN.sub(lambda run: _marked(run[0]), text.replace(MARK, REPLACEMENT))


@lru_cache(MAX_CACHED_RUNS)
def _marked(run: str) -> str:
    kiwi = load_kiwi()
    with _LOCK:
        found = kiwi.tokenize(run)
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
