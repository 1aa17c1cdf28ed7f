"""Regular expressions by derivatives (Brzozowski 1964): what is left to match after a character is an expression again.

No automaton has to be built before the first token; each state is one when it is first met. An expression that is not
`NOTHING` can always still be completed, so a text that follows it never runs into a dead end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from malmoi.errors import UsageError

LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chars:
    """One character of these ranges of code points; of none: nothing matches."""

    ranges: Ranges


@dataclass(frozen=True)
class Row:
    """One expression after another; of none: the empty text."""

    parts: tuple["Regex", ...]


@dataclass(frozen=True)
class Any:
    """One of several expressions."""

    parts: frozenset["Regex"]


@dataclass(frozen=True)
class Times:
    """An expression from `least` to `most` times; None: without end."""

    part: "Regex"
    least: int
    most: int | None


Regex = Chars | Row | Any | Times
NOTHING, EMPTY = Chars(()), Row(())


def row(*parts: Regex) -> Regex:
    flat: list[Regex] = []
    for part in parts:
        flat += part.parts if isinstance(part, Row) else (part,)
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Row(tuple(flat))


def either(*parts: Regex) -> Regex:
    flat: set[Regex] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, Any) else {part}
    flat.discard(NOTHING)
    return NOTHING if not flat else flat.pop() if len(flat) == 1 else Any(frozenset(flat))


def times(part: Regex, least: int, most: int | None) -> Regex:
    return EMPTY if most == 0 else NOTHING if part == NOTHING and least else Times(part, least, most)


def literal(text: str) -> Regex:
    return row(*(Chars(((ord(c), ord(c)),)) for c in text))


@lru_cache(maxsize=1 << 16)
def complete(regex: Regex) -> bool:
    """Whether the empty text matches: the text so far may end here."""
    match regex:
        case Chars():
            return False
        case Row(parts):
            return all(map(complete, parts))
        case Any(parts):
            return any(map(complete, parts))
        case Times(part, least, _):
            return least == 0 or complete(part)


@lru_cache(maxsize=1 << 18)
def derive(regex: Regex, char: int) -> Regex:
    """What is left to match after a character."""
    match regex:
        case Chars(ranges):
            return EMPTY if any(low <= char <= high for low, high in ranges) else NOTHING
        case Row(()):
            return NOTHING
        case Row((first, *rest)):
            after = row(derive(first, char), *rest)
            return either(after, derive(row(*rest), char)) if complete(first) else after
        case Any(parts):
            return either(*(derive(part, char) for part in parts))
        case Times(part, least, most):
            left = times(part, max(least - 1, 0), None if most is None else most - 1)
            return row(derive(part, char), left)
    return NOTHING


def firsts(regex: Regex) -> Iterator[tuple[int, int]]:
    """The ranges of characters that a match may begin with."""
    match regex:
        case Chars(ranges):
            yield from ranges
        case Row(parts):
            for part in parts:
                yield from firsts(part)
                if not complete(part):
                    return
        case Any(parts):
            for part in parts:
                yield from firsts(part)
        case Times(part, _, _):
            yield from firsts(part)


# ------------------------------------------------------------------ text → expression

CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122), (0xAA, LAST)),
    "s": ((9, 13), (32, 32)),
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(text: str) -> Regex:
    """Reads literals, `.`, [classes], (groups), |, *, +, ?, {m,n}, \\d \\w \\s and escapes; the whole text matches."""
    return _Reader(text).read()


class _Reader:
    """or := row ('|' row)*;  row := (atom repeat*)*;  atom := char | '.' | class | '(' or ')'."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def read(self) -> Regex:
        found = self._or()
        if self.at < len(self.text):
            raise self._wrong(f"{self.text[self.at]!r} is unexpected")
        return found

    def _or(self) -> Regex:
        parts = [self._row()]
        while self._take("|"):
            parts.append(self._row())
        return either(*parts)

    def _row(self) -> Regex:
        parts: list[Regex] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return row(*parts)

    def _repeated(self, part: Regex) -> Regex:
        while self.at < len(self.text) and self.text[self.at] in "*+?{":
            sign = self._next()
            part = times(part, *(REPEATS[sign] if sign in REPEATS else self._counts()))
        return part

    def _counts(self) -> tuple[int, int | None]:
        inside, closed, _ = self.text[self.at :].partition("}")
        least, comma, most = inside.partition(",")
        if not closed or not least.isdigit() or (most and not most.isdigit()):
            raise self._wrong("a count is written {2}, {2,} or {2,5}")
        self.at += len(inside) + 1
        return int(least), int(least) if not comma else int(most) if most else None

    def _atom(self) -> Regex:
        sign = self._next()
        if sign == "(":
            self._take("?:")
            inner = self._or()
            if not self._take(")"):
                raise self._wrong("a closing parenthesis is missing")
            return inner
        if sign == "[":
            return self._class()
        if sign == ".":
            return Chars(_others(((10, 10),)))
        if sign in "*+?{^$":
            raise self._wrong(f"{sign!r} must be written \\{sign}; the whole text matches without ^ and $")
        return Chars(self._escaped() if sign == "\\" else ((ord(sign), ord(sign)),))

    def _class(self) -> Regex:
        negated, ranges = self._take("^"), list[tuple[int, int]]()
        while not self._take("]"):
            low = self._member()
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                low = ((low[0][0], self._member()[-1][1]),)
            ranges += low
        return Chars(_others(tuple(sorted(ranges))) if negated else tuple(ranges))

    def _member(self) -> Ranges:
        sign = self._next()
        return self._escaped() if sign == "\\" else ((ord(sign), ord(sign)),)

    def _escaped(self) -> Ranges:
        sign = self._next()
        if sign.lower() in CLASSES:
            return CLASSES[sign] if sign in CLASSES else _others(CLASSES[sign.lower()])
        if sign.isalnum() and sign not in ESCAPES:
            raise self._wrong(f"\\{sign} is not known here")
        char = ord(ESCAPES.get(sign, sign))
        return ((char, char),)

    def _next(self) -> str:
        if self.at == len(self.text):
            raise self._wrong("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _take(self, sign: str) -> bool:
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"The regular expression {self.text!r} cannot be read at character {self.at}: {what}.")


def _others(ranges: Ranges) -> Ranges:
    """Every code point that is in none of these ranges, which are in order."""
    found, start = [], 0
    for low, high in ranges:
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return (*found, (start, LAST)) if start <= LAST else tuple(found)
