"""Translates the English messages of the source into the user's language, from one catalogue.

`ko.toml` is keyed by the English sentence as in the source, with {0}, {1}… for an f-string's
values; the values are translated too, so that sentences can be nested. A particle after a value
is written 은(는), 이(가), 을(를), 과(와), (으)로 or (이)라 and chosen by the value's last sound.
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
# "{0} rows": the value is a number, so that the column of "text = rows" is no count
COUNT = re.compile(r"\{0\} (?!is )(?:[a-z]+ ){0,2}[a-z]+")
HINTED = re.compile(r"\.\{\d\}$")  # "There is no file {0}.{1}"
HINT = r"((?: (?:Did you mean|Known:) .*)?)"
PARTICLE = re.compile(r"은\(는\)|이\(가\)|을\(를\)|과\(와\)|\((?:으|이)\)")
BAD_ROW = re.compile(r"(?:(?!: )[^;])*?:\d+: ")  # file.csv:3: what is wrong
# not read aloud before a particle: quotes, and parentheses with their contents
SILENT = re.compile(r"(?:[\"'`“”‘’\]]|\([^()]*\))+$")


def language(environ: Mapping[str, str] = os.environ) -> str:
    """MALMOI_LANG, else the locale: "ko" or "en"."""
    names = ("MALMOI_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environ[name] for name in names if environ.get(name)), "en")
    return chosen[:2].lower() if chosen[:2].lower() in LANGUAGES else "en"


def translate(text: str, to: str | None = None) -> str:
    """The text in a language, the user's unless given; unchanged if the catalogue lacks it."""
    return _translated(text) if (to or language()) == "ko" else text


def plural(count: float, noun: str) -> str:
    """Formats a count with its noun: 1 step, 2 steps, 1,000 steps, 1.67 minutes."""
    shown = f"{count:,.0f}" if count == int(count) or count >= 1000 else f"{count:.3g}"
    return f"{shown} {noun}{'s' if count != 1 else ''}"


@cache
def catalogue() -> dict[str, str]:
    """English templates with their Korean translations."""
    sections = tomllib.loads((files("malmoi.system") / "ko.toml").read_text("utf-8"))
    return {english: korean for part in sections.values() for english, korean in part.items()}


@cache
def _templates() -> list[tuple[re.Pattern[str], list[str], str]]:
    """Sentences with placeholders, those with the most literal text first."""
    found = []
    by_literals = sorted(catalogue().items(), key=lambda item: -len(PLACE.sub("", item[0])))
    for english, korean in by_literals:
        parts = PLACE.split(english)
        if len(parts) > 1:
            value = r"(.*\d.*?)" if COUNT.fullmatch(english) else "(.*?)"
            pattern = value.join(re.escape(part) for part in parts[::2])
            if HINTED.search(english):  # a file's name has dots too
                pattern = f"{pattern.removesuffix(value)}{HINT}"
            found.append((re.compile(pattern, re.DOTALL), parts[1::2], korean))
    return found


def _translated(text: str) -> str:
    if not text.strip():
        return text
    if text in catalogue():
        return catalogue()[text]
    listed = text.split("; ")
    if not SENTENCE_END.search(text) and all(map(BAD_ROW.match, listed[:-1] or listed)):
        found = "; ".join(map(_problem, listed))
        if found != text:
            return found
    # "where: what is wrong": each part is translated separately
    where, colon, what = text.partition(": ")
    if where in catalogue():
        return f"{catalogue()[where]}{colon}{_clause(what)}"
    for pattern, places, korean in _templates():
        match = pattern.fullmatch(text)
        if match and not any(SENTENCE_END.search(value) for value in match.groups()):
            return _filled(korean, dict(zip(places, match.groups(), strict=True)))
    sentences = SENTENCE_END.split(text)
    if len(sentences) > 1:
        return " ".join(map(_translated, sentences))
    return f"{_clause(where)}{colon}{_clause(what)}" if colon else text


def _problem(text: str) -> str:
    """What is wrong with a row, after its place, which is kept."""
    place = BAD_ROW.match(text)
    where, what = ("", text) if place is None else (place[0], text[place.end() :])
    bare = what.removesuffix(".")
    return f"{where}{_clause(bare)}{what[len(bare) :]}"


def _filled(korean: str, values: Mapping[str, str]) -> str:
    """Fills in the values: a clause is translated too, a single word is kept as a name."""

    def value(place: re.Match[str]) -> str:
        found = values[place[1]]
        clause = _clause(found)
        return ", ".join(map(_clause, found.split(", "))) if clause == found else clause

    return with_particles(PLACE.sub(value, korean))


def with_particles(text: str) -> str:
    """Replaces 이(가) and similar particles by the form that the preceding word needs."""
    done = ""
    for part in re.split(f"({PARTICLE.pattern})", text):
        if PARTICLE.fullmatch(part):
            final = last_sound(done)
            closed = final not in ("", "ㄹ") if part == "(으)" else bool(final)
            after_consonant, _, after_vowel = part.strip("()").partition("(")
            part = after_consonant if closed else after_vowel
        done += part
    return done


def last_sound(text: str) -> str:
    """How a word ends as Koreans read it: "ㄹ", another consonant, or "" for a vowel."""
    word = SILENT.sub("", text)
    last = word[-1:]
    if "가" <= last <= "힣":
        final = (ord(last) - ord("가")) % 28
        return "ㄹ" if final == 8 else "ㅇ" if final else ""
    if last.isdigit():
        return {"1": "ㄹ", "7": "ㄹ", "8": "ㄹ", "0": "ㅇ", "3": "ㅇ", "6": "ㅇ"}.get(last, "")
    # without a vowel a word is spelt: lr is read el-ar
    if re.search(r"(?:l|le|[LR]|(?<![A-Za-z])[b-df-hj-np-tv-z]*r)$", word):
        return "ㄹ"
    return "ㅇ" if re.search(r"(?:[mn]e?|ng|[MN])$", word) else ""


def _clause(text: str) -> str:
    """Translates a part of a sentence if the catalogue has it."""
    if " " not in text:
        return text
    found = _translated(text)
    return _translated(f"{text}.").removesuffix(".") if found == text else found
