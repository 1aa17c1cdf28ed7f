"""The user's language: English sentences of the source, and their translations by one catalogue.

`ko.toml` is keyed by the English sentence as the source has it, with {0}, {1}… where an f-string
has a value; the values themselves are translated too, so that sentences may be nested.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

LANGUAGES = ("en", "ko")
SENTENCE_END = re.compile(r"(?<=[.?!…]) (?=[A-Z])")
PLACE = re.compile(r"\{(\d)\}")


def language() -> str:
    """MALMOI_LANG, else the locale: "ko" or "en"."""
    names = ("MALMOI_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((os.environ[name] for name in names if os.environ.get(name)), "en")
    return chosen[:2].lower() if chosen[:2].lower() in LANGUAGES else "en"


def translate(text: str) -> str:
    """The text in the user's language; what the catalogue does not have stays as it is."""
    return _translated(text) if language() == "ko" else text


@cache
def catalogue() -> dict[str, str]:
    """English templates and their Korean."""
    found = tomllib.loads((files("malmoi.system") / "ko.toml").read_text("utf-8"))
    return {english: korean for part in found.values() for english, korean in part.items()}


@cache
def _templates() -> list[tuple[re.Pattern[str], list[str], str]]:
    """Sentences with values in them, those with the most words of their own first."""
    found = []
    for english, korean in sorted(catalogue().items(), key=lambda item: -len(item[0])):
        parts = PLACE.split(english)
        if len(parts) > 1:
            pattern = "(.*?)".join(re.escape(part) for part in parts[::2])
            found.append((re.compile(pattern, re.DOTALL), parts[1::2], korean))
    return found


def _translated(text: str) -> str:
    if not text.strip():
        return text
    if text in catalogue():
        return catalogue()[text]
    for pattern, places, korean in _templates():
        match = pattern.fullmatch(text)
        if match and not any(SENTENCE_END.search(value) for value in match.groups()):
            return _filled(korean, dict(zip(places, match.groups(), strict=True)))
    sentences = SENTENCE_END.split(text)
    return " ".join(map(_translated, sentences)) if len(sentences) > 1 else text


def _filled(korean: str, values: Mapping[str, str]) -> str:
    """The sentence with its values: a clause is translated too, a single word is a name."""

    def value(place: re.Match[str]) -> str:
        found = values[place[1]]
        return _translated(found) if " " in found else found

    return PLACE.sub(value, korean)
