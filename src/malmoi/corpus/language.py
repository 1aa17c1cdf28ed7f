"""Language detection: by script, and in Latin script by common words."""

from functools import cache

import numpy as np

from malmoi.corpus.ngrams import are_letters, code_points, hash_words
from malmoi.errors import require_known

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


def is_in_language(text: str, language: str) -> bool:
    """Whether most letters are in the language's script and, in Latin, its common words lead."""
    text = text[:MAX_LOOKED_AT_CHARACTERS]
    if _share(text, SCRIPTS.get(language, LATIN)) < MIN_SCRIPT_SHARE:
        return False
    if language in SCRIPTS:
        return True
    found = hash_words(text).hashes
    shares = {name: float(np.isin(found, _common(name)).mean()) for name in COMMON_WORDS}
    return shares[language] >= MIN_COMMON_WORD_SHARE and shares[language] == max(shares.values())


def _share(text: str, ranges: tuple[tuple[int, int], ...]) -> float:
    found = code_points(text)
    found = found[are_letters(found)]
    ours = sum(int(((found >= low) & (found <= high)).sum()) for low, high in ranges)
    return ours / len(found) if len(found) else 0.0


@cache
def _common(language: str) -> np.ndarray:
    return hash_words(COMMON_WORDS[language]).hashes
