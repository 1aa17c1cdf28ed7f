"""One message, two languages: templates with named values, translated before they are formatted.

`ko.toml` is keyed by the English template of the source. A particle after a value is written
은(는), 이(가), 을(를), 과(와), (으)로 or (이)라 and chosen by the value's last sound.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, Self

LANGUAGES = ("en", "ko")
PARTICLE = re.compile(r"(은\(는\)|이\(가\)|을\(를\)|과\(와\)|\((?:으|이)\))")
# not read aloud before a particle: quotes, and parentheses with their contents
SILENT = re.compile(r"(?:[\"'`“”‘’\]]|\([^()]*\))+$")


class Message(str):
    """The English text of a template with values, which can still be said in another language.

    Examples:
        >>> msg("There is no file {path}.", path="a.csv")
        'There is no file a.csv.'
    """

    template: str
    values: dict[str, Any]

    def __new__(cls, template: str, /, **values: object) -> Self:
        if isinstance(template, cls) and not values:
            return template
        # an error would keep its frames alive
        kept = {n: cls(str(v)) if isinstance(v, BaseException) else v for n, v in values.items()}
        self = super().__new__(cls, template.format(**kept) if kept else template)
        self.template = template
        self.values = kept
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (self.template,), self.values

    def __str__(self) -> str:
        """The message itself, so that the text of an error remains one."""
        return self

    def __add__(self, other: str) -> "Message":
        return joined("", (self, other))

    def __radd__(self, other: str) -> "Message":
        return joined("", (other, self))


msg = Message


class StatusLog:
    """Logs templates with values, as errors take them, in the name of the module that calls."""

    def info(self, sentence: str, /, **values: object) -> None:
        self._log(logging.INFO, msg(sentence, **values))

    def warning(self, sentence: str, /, **values: object) -> None:
        self._log(logging.WARNING, msg(sentence, **values))

    def _log(self, level: int, text: Message) -> None:
        caller = sys._getframe(2).f_globals["__name__"]
        logging.getLogger(caller).log(level, text, stacklevel=3)


logger = StatusLog()


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Silences what is logged within the context."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def joined(separator: str, parts: Iterable[str]) -> Message:
    """The parts as one message in which each is translated on its own."""
    values = {f"part{number}": part for number, part in enumerate(parts)}
    return Message(
        "{separator}".join(f"{{{name}}}" for name in values), separator=separator, **values
    )


def plural(count: float, noun: str) -> Message:
    """Formats a count with its noun: 1 step, 2 steps, 1,000 steps, 1.67 minutes."""
    shown = f"{count:,.0f}" if count == int(count) or count >= 1000 else f"{count:.3g}"
    return Message(f"{{count}} {noun}{'s' if count != 1 else ''}", count=shown)


def measured(values: Mapping[str, float]) -> Message:
    """Formats metrics with their names: valid loss 3.2, mlm accuracy 0.41."""
    named = ((name.replace("_", " "), f"{value:.4g}") for name, value in values.items())
    return joined(", ", (Message(name + " {value}", value=value) for name, value in named))


def translate(text: str, to: str | None = None) -> str:
    """The text in a language, the user's unless given; unchanged if the catalogue lacks it."""
    if (to or language()) != "ko":
        return text
    if not isinstance(text, Message) or not text.values:
        return catalogue().get(text, text)
    shown = ""
    korean = catalogue().get(text.template, text.template)
    for words, name, spec, conversion in Formatter().parse(korean):
        shown = _with_words(shown, words)
        if name is not None:
            value, _ = Formatter().get_field(name, (), text.values)
            value = translate(value, "ko") if isinstance(value, Message) else value
            shown += format(Formatter().convert_field(value, conversion), spec or "")
    return shown


def language(environ: Mapping[str, str] = os.environ) -> str:
    """MALMOI_LANG, else the locale: "ko" or "en"."""
    names = ("MALMOI_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environ[name] for name in names if environ.get(name)), "en")
    return chosen[:2].lower() if chosen[:2].lower() in LANGUAGES else "en"


@cache
def sections() -> dict[str, dict[str, str]]:
    """The parts of the catalogue."""
    import tomllib  # only where Korean is spoken

    return tomllib.loads((Path(__file__).parent / "system" / "ko.toml").read_text("utf-8"))


@cache
def catalogue() -> dict[str, str]:
    """English templates with their Korean translations."""
    return {english: korean for part in sections().values() for english, korean in part.items()}


def _with_words(text: str, words: str) -> str:
    """The text followed by words whose particles take the form that what is before them needs."""
    for part in PARTICLE.split(words):
        if PARTICLE.fullmatch(part):
            final = last_sound(text)
            closed = final not in ("", "ㄹ") if part == "(으)" else bool(final)
            after_consonant, _, after_vowel = part.strip("()").partition("(")
            part = after_consonant if closed else after_vowel
        text += part
    return text


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
