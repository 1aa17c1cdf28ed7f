"""Translates the English messages of the source into the user's language, from one catalogue.

`ko.toml` is keyed by the English sentence as in the source, with {0}, {1}… for an f-string's
values; the values are translated too, so that sentences can be nested.
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


def language(environ: Mapping[str, str] = os.environ) -> str:
    """MALMOI_LANG, else the locale: "ko" or "en"."""
    names = ("MALMOI_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environ[name] for name in names if environ.get(name)), "en")
    return chosen[:2].lower() if chosen[:2].lower() in LANGUAGES else "en"


def translate(text: str) -> str:
    """The text in the user's language; unchanged if the catalogue lacks it."""
    return _translated(text) if language() == "ko" else text


def plural(count: float, noun: str) -> str:
    """Formats a count with its noun: 1 step, 2 steps, 1,000 steps, 1.67 minutes."""
    shown = f"{count:,.0f}" if count == int(count) or count >= 1000 else f"{count:.3g}"
    return f"{shown} {noun}{'s' if count != 1 else ''}"


@cache
def catalogue() -> dict[str, str]:
    """English templates with their Korean translations."""
    found = tomllib.loads((files("malmoi.system") / "ko.toml").read_text("utf-8"))
    return {english: korean for part in found.values() for english, korean in part.items()}


@cache
def _templates() -> list[tuple[re.Pattern[str], list[str], str]]:
    """Sentences with placeholders, those with the most literal text first."""
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
    """Fills in the values: a clause is translated too, a single word is kept as a name."""

    def value(place: re.Match[str]) -> str:
        found = values[place[1]]
        clause = _clause(found)
        return ", ".join(map(_clause, found.split(", "))) if clause == found else clause

    return PLACE.sub(value, korean)


def _clause(text: str) -> str:
    return _translated(text) if " " in text else text
