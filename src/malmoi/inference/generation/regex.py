"""Regular expressions by derivatives (Brzozowski 1964).

The derivative with respect to a character, what is left to match after it, is again an expression:
states are created on demand, without building an automaton in advance. An expression other than
`NOTHING` can always be completed, so there are no dead ends. Equal expressions are one object, so
comparing them is free; the cost of a state is bounded.
"""

from dataclasses import dataclass, field
from typing import Any as Anything
from weakref import WeakValueDictionary

from malmoi.errors import UsageError
from malmoi.system.limits import (
    MAX_REGEX_CHARACTERS,
    MAX_REGEX_NESTING,
    MAX_REGEX_PARTS,
    MAX_REGEX_REPEATS,
    MAX_REGEX_STEPS,
    shown,
)

MAX_CODE_POINT = 0x10FFFF
UNREACHABLE = 1 << 40  # the length of a match of NOTHING
REMEMBERED = 1 << 16  # cached derivatives
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Regex:
    """A regular expression."""

    shortest: int = field(default=0, kw_only=True)  # bytes of its shortest match
    height: int = field(default=0, kw_only=True)  # nesting depth

    @property
    def complete(self) -> bool:
        """Whether it matches the empty text, so that a text may end here."""
        return self.shortest == 0


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Chars(Regex):
    """One character in these ranges of code points; no ranges match nothing."""

    ranges: Ranges


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Empty(Regex):
    """The empty text."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Then(Regex):
    """A concatenation of two expressions."""

    first: Regex
    rest: Regex


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Alternation(Regex):
    """One of several expressions."""

    parts: frozenset[Regex]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Repeat(Regex):
    """An expression repeated `least` to `most` times; None: unbounded."""

    part: Regex
    least: int
    most: int | None


_KNOWN: WeakValueDictionary[tuple[Anything, ...], Regex] = WeakValueDictionary()


def _one(kind: type[Regex], *values: Anything, shortest: int, height: int = 0) -> Regex:
    """The interned expression of this kind with these parts: always the same object."""
    found = _KNOWN.get((kind, *values))
    if found is None:
        found = _KNOWN[(kind, *values)] = kind(*values, shortest=shortest, height=height)
    return found


def chars(ranges: Ranges) -> Regex:
    lowest = min((low for low, _ in ranges), default=None)
    size = UNREACHABLE if lowest is None else len(chr(lowest).encode("utf-8", "surrogatepass"))
    return _one(Chars, ranges, shortest=size)


NOTHING = chars(())
EMPTY = _one(Empty, shortest=0)


def concat(*parts: Regex) -> Regex:
    """Concatenates expressions."""
    rest = EMPTY
    for part in reversed(parts):
        rest = then(part, rest)
    return rest


def then(first: Regex, rest: Regex) -> Regex:
    if first is NOTHING or rest is NOTHING:
        return NOTHING
    heads = []
    while isinstance(first, Then):
        heads.append(first.first)
        first = first.rest
    if first is not EMPTY:
        heads.append(first)
    for head in reversed(heads):
        height = max(head.height, rest.height)
        rest = (
            head
            if rest is EMPTY
            else _one(Then, head, rest, shortest=head.shortest + rest.shortest, height=height)
        )
    return rest


def alternation(*parts: Regex) -> Regex:
    flat: set[Regex] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, Alternation) else {part}
    flat.discard(NOTHING)
    if len(flat) > MAX_REGEX_PARTS:
        limit = f"{MAX_REGEX_PARTS:,} alternatives"
        raise UsageError(f"The regular expression has more than {limit}; make it simpler.")
    if len(flat) < 2:
        return flat.pop() if flat else NOTHING
    shortest = min(part.shortest for part in flat)
    height = 1 + max(part.height for part in flat)
    return _one(Alternation, frozenset(flat), shortest=shortest, height=height)


def repeat(part: Regex, least: int, most: int | None) -> Regex:
    if most == 0 or part is EMPTY:
        return EMPTY
    if part is NOTHING:
        return NOTHING if least else EMPTY
    shortest = least * part.shortest
    return _one(Repeat, part, least, most, shortest=shortest, height=part.height + 1)


def within(regex: Regex, ranges: Ranges) -> Regex:
    """The same expression with characters of these ranges only, and ASCII's alone for \\w."""
    match regex:
        case Chars(ranges=given):
            kept = [
                (max(low, first), min(high, last))
                for low, high in given
                if (low, high) != CLASSES["w"][-1]
                for first, last in ranges
            ]
            return chars(tuple((low, high) for low, high in kept if low <= high))
        case Then():
            row = []
            while isinstance(regex, Then):
                row.append(within(regex.first, ranges))
                regex = regex.rest
            return concat(*row, within(regex, ranges))
        case Alternation(parts=parts):
            return alternation(*(within(part, ranges) for part in parts))
        case Repeat(part=part, least=least, most=most):
            return repeat(within(part, ranges), least, most)
    return regex


class Derivatives:
    """Cached derivatives, with a bound on the work for one token."""

    def __init__(self) -> None:
        self._known: dict[tuple[Regex, int], Regex] = {}
        self._firsts: dict[Regex, Ranges] = {}
        self._steps = 0

    def begin(self) -> None:
        """Resets the work budget for the next token."""
        self._steps = 0
        if len(self._known) > REMEMBERED:
            self._known.clear()
            self._firsts.clear()

    def work(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_REGEX_STEPS:
            limit = f"{MAX_REGEX_STEPS:,} steps for one token"
            raise UsageError(f"The regular expression takes more than {limit}; make it simpler.")

    def after(self, regex: Regex, char: int) -> Regex:
        """What is left to match after a character."""
        found = self._known.get((regex, char))
        if found is None:
            found = self._known[regex, char] = self._derive(regex, char)
        self.work(1)
        return found

    def _derive(self, regex: Regex, char: int) -> Regex:
        match regex:
            case Chars(ranges=ranges):
                return EMPTY if _among(char, ranges) else NOTHING
            case Then():
                return self._after_row(regex, char)
            case Alternation(parts=parts):
                self.work(len(parts))
                return alternation(*(self._after_part(part, char) for part in parts))
            case Repeat(part=part, least=least, most=most):
                left = repeat(part, max(least - 1, 0), None if most is None else most - 1)
                return then(self.after(part, char), left)
        return NOTHING

    def _after_part(self, part: Regex, char: int) -> Regex:
        """The derivative of an alternative; most start with a character, which usually differs."""
        if isinstance(part, Then) and isinstance(part.first, Chars):
            return part.rest if _among(char, part.first.ranges) else NOTHING
        return self.after(part, char)

    def _after_row(self, regex: Regex, char: int) -> Regex:
        ways = []
        while isinstance(regex, Then):
            ways.append(then(self.after(regex.first, char), regex.rest))
            if not regex.first.complete:
                return alternation(*ways)
            self.work(1)
            regex = regex.rest
        return alternation(*ways, self.after(regex, char))

    def firsts(self, regex: Regex) -> Ranges:
        """The ranges of characters that a match can start with."""
        if regex not in self._firsts:
            found: set[tuple[int, int]] = set()
            waiting = [regex]
            while waiting:
                self.work(1)
                match waiting.pop():
                    case Chars(ranges=ranges):
                        found.update(ranges)
                    case Then(first=first, rest=rest):
                        waiting += [first, rest] if first.complete else [first]
                    case Alternation(parts=parts):
                        waiting += parts
                    case Repeat(part=part):
                        waiting.append(part)
            self._firsts[regex] = tuple(found)
        return self._firsts[regex]


def _among(char: int, ranges: Ranges) -> bool:
    return any(low <= char <= high for low, high in ranges)


# ------------------------------------------------------------------ parsing

CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122), (0xAA, MAX_CODE_POINT)),
    "s": ((9, 13), (32, 32)),
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_regex(text: str) -> Regex:
    """Parses literals, `.`, [classes], (groups), |, *, +, ?, {m,n}, \\d, \\w, \\s and escapes."""
    if len(text) > MAX_REGEX_CHARACTERS:
        raise UsageError(
            f"The regular expression has {len(text):,} characters, more than "
            f"{MAX_REGEX_CHARACTERS:,}. For one of many texts use choices."
        )
    return _RegexParser(text).parse()


class _RegexParser:
    """or := row ('|' row)*;  row := (atom repeat*)*;  atom := char | '.' | class | '(' or ')'."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> Regex:
        found = self._or()
        if self.at < len(self.text):
            raise self._wrong(f"{self.text[self.at]!r} is unexpected")
        return found

    def _or(self) -> Regex:
        parts = [self._row()]
        while self._take("|"):
            parts.append(self._row())
        return alternation(*parts)

    def _row(self) -> Regex:
        parts: list[Regex] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return concat(*parts)

    def _repeated(self, part: Regex) -> Regex:
        while self.at < len(self.text) and self.text[self.at] in "*+?{":
            sign = self._next()
            part = repeat(part, *(REPEATS[sign] if sign in REPEATS else self._counts()))
            self._check_nesting(part.height)
        return part

    def _check_nesting(self, levels: int) -> None:
        if levels > MAX_REGEX_NESTING:
            raise self._wrong(f"it nests more than {MAX_REGEX_NESTING} levels deep")

    def _counts(self) -> tuple[int, int | None]:
        inside, closed, _ = self.text[self.at :].partition("}")
        least, comma, most = inside.partition(",")
        if not closed or not least.isdecimal() or (most and not most.isdecimal()):
            raise self._wrong("a count is written {2}, {2,} or {2,5}")
        if any(len(n) > 9 or int(n or 0) > MAX_REGEX_REPEATS for n in (least, most)):
            raise self._wrong(f"something is repeated more than {MAX_REGEX_REPEATS:,} times")
        self.at += len(inside) + 1
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None

    def _atom(self) -> Regex:
        sign = self._next()
        if sign == "(":
            self._take("?:")
            self.depth += 1
            self._check_nesting(self.depth)
            inner = self._or()
            self.depth -= 1
            if not self._take(")"):
                raise self._wrong("a closing parenthesis is missing")
            return inner
        if sign == "[":
            return self._class()
        if sign == ".":
            return chars(_others(((10, 10),)))
        if sign in "*+?{^$":
            raise self._wrong(
                f"{sign!r} must be written \\{sign}; the whole text matches without ^ and $"
            )
        return chars(self._escaped() if sign == "\\" else ((ord(sign), ord(sign)),))

    def _class(self) -> Regex:
        negated = self._take("^")
        ranges = list[tuple[int, int]]()
        while not self._take("]"):
            low = self._member()
            ahead = self.text[self.at : self.at + 2]
            if len(ahead) == 2 and ahead[0] == "-" and ahead[1] != "]":
                self.at += 1
                low = ((low[0][0], self._member()[-1][1]),)
            ranges += low
        return chars(_others(tuple(sorted(ranges))) if negated else tuple(ranges))

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
        where = f"{shown(self.text)} is invalid at character {self.at}"
        return UsageError(f"The regular expression {where}: {what}.")


def _others(ranges: Ranges) -> Ranges:
    """The complement of these sorted ranges."""
    found = []
    start = 0
    for low, high in ranges:
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return (*found, (start, MAX_CODE_POINT)) if start <= MAX_CODE_POINT else tuple(found)
