"""Step 2, filter: rules that ordinary prose passes in any script (Rae et al. 2021, appendix A)."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from malmoi.corpus.columns import IndexArray, Reasons, TextColumn
from malmoi.corpus.config import CorpusConfig
from malmoi.corpus.ngrams import (
    LAST_CODE,
    HashArray,
    HashedTexts,
    HashedWords,
    are_letters,
    code_points,
    hash_words,
    is_among,
    letter_table,
    native_ngrams,
    random_odd,
)
from malmoi.errors import require_known

Flags = NDArray[np.bool_]

# ------------------------------------------------------------------ languages

MAX_LOOKED_AT_CHARACTERS = 1 << 16  # only this much of a text is examined
MIN_SCRIPT_SHARE = 0.5  # of the letters must be in the script
MIN_COMMON_WORD_SHARE = 0.05  # of the words must be common ones

SCRIPTS = {
    "ko": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7A3)),
    "ru": ((0x0400, 0x04FF),),
    "el": ((0x0370, 0x03FF),),
    "he": ((0x0590, 0x05FF),),
    "ar": ((0x0600, 0x06FF),),
    "hi": ((0x0900, 0x097F),),
    "th": ((0x0E00, 0x0E7F),),
}
LATIN = ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF))
COMMON_WORDS = {
    "en": (
        "the of and to in a is that it was for on with as be at by this have from or not are but "
        "you he his they an"
    ),
    "de": (
        "der die und das ist nicht ein eine zu den mit sich auf von dem des für im auch es an "
        "werden aus er hat sie"
    ),
    "fr": (
        "le la les de des et est un une que qui dans pour pas sur au il elle en du ce plus par "
        "avec ne se sont nous"
    ),
    "es": (
        "el la los las de que y en un una es se no por con para su al del lo como más pero sus "
        "le ya o fue este"
    ),
    "it": (
        "il la di che e è un una per non in sono del della con si le da dei al gli anche come "
        "più ma nel lo i"
    ),
    "pt": (
        "o a os as de que e do da em um uma é não para com se por no na dos mais como mas ao ele "
        "foi das à"
    ),
    "nl": (
        "de het een en van ik te dat die in is niet zijn op aan met voor er maar om hij ook als "
        "bij naar uit dan"
    ),
}
LANGUAGES = (*SCRIPTS, *COMMON_WORDS)


def check_language(language: str) -> None:
    if language:
        require_known(language, LANGUAGES, "There is no detector for the language {name!r}.{hint}")


def are_in_language(texts: TextColumn, language: str) -> Flags:
    """Whether most letters are in the language's script and, in Latin, its common words lead."""
    looked_at = [text[:MAX_LOOKED_AT_CHARACTERS] for text in texts]
    codes = np.minimum(code_points("".join(looked_at)), LAST_CODE)
    ends = np.cumsum(list(map(len, looked_at)), dtype=np.int64)
    letters, ours = (_totals(table[codes], ends) for table in (letter_table(), _script(language)))
    found = ours >= MIN_SCRIPT_SHARE * np.maximum(letters, 1)
    if language in SCRIPTS or not found.any():
        return found
    hashed = HashedTexts.of(TextColumn.of(looked_at))
    words = np.maximum(hashed.lasts - hashed.firsts, 1)
    shares = {
        name: _totals(is_among(hashed.words.hashes, _common(name)), hashed.lasts) / words
        for name in COMMON_WORDS
    }
    leading = np.maximum(np.max(list(shares.values()), axis=0), MIN_COMMON_WORD_SHARE)
    found &= shares[language] >= leading
    return found


def _totals(flags: Flags, ends: IndexArray) -> IndexArray:
    """How many flags are set in each part, one after another."""
    return np.diff(np.append(0, flags.cumsum())[ends], prepend=0)


@cache
def _script(language: str) -> Flags:
    """Which characters are letters of the language's script."""
    ours = np.zeros(LAST_CODE + 1, bool)
    for low, high in SCRIPTS.get(language, LATIN):
        ours[low : high + 1] = True
    return ours & letter_table()


@cache
def _common(language: str) -> HashArray:
    return np.unique(hash_words(COMMON_WORDS[language]).hashes)


# ------------------------------------------------------------------ the rules

MIN_LINES = 4  # with fewer lines, shares of lines mean nothing
BULLETS = ("- ", "* ", "•", "·", "●", "○", "■", "▪", "◦", "‣", "※", "▶", "►")
ELLIPSES = ("…", "...", "‥")


class TextStats(NamedTuple):
    """Some texts, and what the rules count in each."""

    texts: TextColumn
    characters: IndexArray
    words: IndexArray
    word_characters: IndexArray
    letters: IndexArray
    spaces: IndexArray  # and line breaks
    symbols: IndexArray  # number signs and ellipses
    lines: IndexArray  # that are not empty
    bullets: IndexArray  # lines that begin with one
    ellipses: IndexArray  # lines that end in one
    repeated_lines: IndexArray  # characters in them
    repeated_paragraphs: IndexArray
    # characters in the most frequent 2-, 3- or 4-gram, if it makes up more than its share
    repeated_run: IndexArray


def text_stats(texts: HashedTexts, max_run: Sequence[float]) -> TextStats:
    """Counts in each text, which `max_run` shares of its characters make repetitive."""
    native = native_ngrams()
    if native is None:
        parts = map(texts.part, range(len(texts)))
        rows = [_counted(*both, max_run) for both in zip(texts.texts, parts, strict=True)]
        return TextStats(texts.texts, *np.array(rows).T)
    column, words = texts.texts, texts.words
    found = np.empty((len(texts), len(TextStats._fields) - 1), np.int64)
    room = int(max(column.line_breaks().max() + 1, (texts.lasts - texts.firsts).max()))
    slots = np.empty((1 << (room + room // 2 + 1).bit_length(), 2), np.uint64)
    places = (words.hashes, words.starts, words.ends, texts.firsts, texts.lasts)
    tables = (_kinds(), random_odd(4, seed=1), np.array(max_run, np.float64), slots, found)
    bounds = (column.begins, column.ends)
    native["text_stats"](len(texts), column.data, *bounds, *places, *tables)
    return TextStats(column, *found.T)


def _counted(text: str, words: HashedWords, max_run: Sequence[float]) -> list[int]:
    lines = [line for line in text.split("\n") if line]
    return [
        len(text),
        len(words),
        int((words.ends - words.starts).sum()),
        int(are_letters(code_points(text)).sum()),
        text.count(" ") + text.count("\n"),
        sum(map(text.count, ("#", *ELLIPSES))),
        len(lines),
        sum(line.startswith(BULLETS) for line in lines),
        sum(line.endswith(ELLIPSES) for line in lines),
        _repeated(lines),
        _repeated(text.split("\n\n")),
        _repeated_run(words, [share * len(text) for share in max_run]),
    ]


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of each character, as ngrams.c has them."""
    found = letter_table().astype(np.uint8)
    ellipses = [sign for sign in ELLIPSES if len(sign) == 1]
    bullets = [sign for sign in BULLETS if len(sign) == 1]
    before_space = [sign[0] for sign in BULLETS if len(sign) == 2]
    counted = ["\n", ".", "#", *ellipses]
    for place, signs in enumerate((counted, ellipses, bullets, before_space, " "), 1):
        found[[ord(sign) for sign in signs]] |= 1 << place
    return found


def _repeated(parts: list[str]) -> int:
    return sum(map(len, parts)) - sum(map(len, set(parts)))


def _repeated_run(words: HashedWords, limits: Sequence[float]) -> int:
    """Characters in the most frequent 2-, 3- or 4-gram, the first that exceeds its limit."""
    found = [_covered(words, length) for length in (2, 3, 4)]
    return next((size for size, limit in zip(found, limits, strict=True) if size > limit), 0)


def _covered(words: HashedWords, length: int) -> int:
    """Characters covered by the most frequent n-gram of this length; 0 if none repeats."""
    found, first, counts = np.unique(words.ngrams(length), return_index=True, return_counts=True)
    if not len(found) or counts.max() == 1:
        return 0
    begin = first[counts.argmax()]
    return int(counts.max() * (words.ends[begin + length - 1] - words.starts[begin]))


def another_language(s: TextStats, c: CorpusConfig) -> Flags:
    if not c.language:
        return np.zeros(len(s.texts), bool)
    return ~are_in_language(s.texts, c.language)


def word_length(s: TextStats, c: CorpusConfig) -> Flags:
    mean = s.word_characters / np.maximum(s.words, 1)
    return (mean < c.min_word_length) | (mean > c.max_word_length)


def _share(lines: IndexArray, s: TextStats) -> NDArray[np.float64]:
    return np.where(s.lines >= MIN_LINES, lines / np.maximum(s.lines, 1), 0.0)


TOO_SHORT = "too short"  # the first rule, which needs no more than the number of words
# in this order; the first rule that applies is counted
FILTER_RULES: dict[str, Callable[[TextStats, CorpusConfig], Flags]] = {
    "too long": lambda s, c: (s.words > c.max_words) & (c.max_words > 0),
    "another language": another_language,
    "length of words": word_length,
    "symbols": lambda s, c: s.symbols > c.max_symbols * s.words,
    "few letters": lambda s, c: s.letters < c.min_letters * (s.characters - s.spaces),
    "bullets": lambda s, c: _share(s.bullets, s) > c.max_bullets,
    "ellipses": lambda s, c: _share(s.ellipses, s) > c.max_ellipses,
    "repeated lines": lambda s, c: s.repeated_lines > c.max_repeated_lines * s.characters,
    "repeated paragraphs": lambda s, c: s.repeated_paragraphs > c.max_repeated_lines * s.characters,
    "repeated words": lambda s, c: s.repeated_run > 0,
}


def broken_rules(texts: HashedTexts, config: CorpusConfig) -> Reasons:
    """The first rule that each text breaks, or ""."""
    is_long = texts.lasts - texts.firsts >= config.min_words
    found = np.where(is_long, "", TOO_SHORT).astype(object)
    if is_long.any():
        stats = text_stats(texts.where(is_long), config.max_run)
        for name, rule in reversed(FILTER_RULES.items()):
            found[np.flatnonzero(is_long)[rule(stats, config)]] = name
    return found
