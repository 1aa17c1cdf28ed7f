"""Constrained decoding: allowed tokens, banned words, a regular expression, a list of choices.

V vocabulary.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from operator import itemgetter
from threading import Lock
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference.generation.json_schema import json_schema_regex
from malmoi.inference.generation.regex import (
    EMPTY,
    MAX_CODE_POINT,
    NOTHING,
    UNREACHABLE,
    Derivatives,
    Regex,
    parse_regex,
)
from malmoi.inference.generation.token_bytes import TokenMatrix, all_token_bytes, token_matrix
from malmoi.system.limits import MAX_CHOICE_CHARACTERS, MAX_CHOICES, MAX_SIZE, check_whole_number
from malmoi.tokenizer import Tokenizer

REMEMBERED = 64  # cached walks per pattern: each may list the whole vocabulary
MAX_POSITIONS = 1 << 14  # a kilobyte each
UNKNOWN, DEAD = -1, -2  # transitions not yet found, and not allowed
MIN_CODE_POINT = {2: 0x80, 3: 0x800, 4: 0x10000}  # by encoded length in bytes


class Walk(NamedTuple):
    """The tokens that may follow a position."""

    tokens: NDArray[np.int32]
    rest: NDArray[np.int64]  # bytes of the shortest completion after each


class Constraint(ABC):
    """A constraint on the generated text; each request advances its own copy, `new_state()`."""

    @property
    def finished(self) -> bool:
        """Whether nothing more can follow, so that the text ends here."""
        return False

    def new_state(self, limit: int) -> "Constraint":
        """For a text of at most `limit` tokens."""
        return copy(self)

    @abstractmethod
    def allowed(self, vocab: int) -> Tensor:
        """A mask of the tokens that may come next: bool [V]."""

    @abstractmethod
    def push(self, token: int) -> None:
        """Advances by a selected token."""


class AllowedTokens(Constraint):
    """Allows only these tokens, or those returned by a function of the tokens generated so far."""

    def __init__(self, tokens: Iterable[int] | Callable[[list[int]], Iterable[int]]) -> None:
        fixed = () if callable(tokens) else tuple(tokens)
        self.rule = tokens if callable(tokens) else lambda _: fixed
        self.written: tuple[int, ...] = ()

    def allowed(self, vocab: int) -> Tensor:
        mask = _mask(self.rule(list(self.written)), vocab)
        return _require_some(mask, "none of the allowed tokens is in the vocabulary")

    def push(self, token: int) -> None:
        self.written += (token,)


class BannedWords(Constraint):
    """Forbids words anywhere in the text, however they are tokenized."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer) -> None:
        if not all(words):
            raise UsageError("A banned word must be a text of at least one character.")
        self.words = [word.encode() for word in words]
        self.token_bytes = all_token_bytes(tokenizer)
        self.longest = max(map(len, self.words), default=0)
        self.whole = [
            i for i, text in enumerate(self.token_bytes) if any(word in text for word in self.words)
        ]
        self.tail = b""
        self.finishing = lru_cache(maxsize=1024)(self._finishing)

    def _finishing(self, rest: bytes) -> list[int]:
        """Tokens that start with the rest of a banned word."""
        return [i for i, text in enumerate(self.token_bytes) if text.startswith(rest)]

    def allowed(self, vocab: int) -> Tensor:
        wrong = set(self.whole)
        for word in self.words:
            for size in range(1, len(word)):
                if self.tail.endswith(word[:size]):
                    wrong.update(self.finishing(word[size:]))
        return _require_some(~_mask(wrong, vocab), "every token would write a banned word")

    def push(self, token: int) -> None:
        written = self.token_bytes[token] if token < len(self.token_bytes) else b""
        self.tail = (self.tail + written)[-self.longest :]


class ByteAutomaton:
    """The positions of a text as numbers, with their transitions by byte, found on demand."""

    def __init__(self, after: Callable[[Any, int], Any], shortest: Callable[[Any], int]) -> None:
        self.after = after
        self.shortest = shortest
        self.lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self.positions: list[Any] = []
        self.numbers: dict[Any, int] = {}
        self.next = np.full((64, 256), UNKNOWN, np.int32)
        self.left = np.zeros(64, np.int64)  # bytes of each position's shortest completion
        self.walks: OrderedDict[Any, Walk] = OrderedDict()

    def walk(self, start: Any, tokens: TokenMatrix) -> Walk:
        """The tokens that may follow a position, and the bytes that each leaves to be written."""
        with self.lock:
            if start not in self.walks:
                if len(self.positions) > MAX_POSITIONS:
                    self._clear()
                self.walks[start] = self._walk(self._number(start), tokens)
                if len(self.walks) > REMEMBERED:
                    self.walks.popitem(last=False)
            return self.walks[start]

    def _walk(self, start: int, tokens: TokenMatrix) -> Walk:
        """Reads a byte of every token at a time, dropping the tokens that are not allowed."""
        rows = np.arange(len(tokens.ids))
        at = np.full(len(rows), start, np.int32)
        found = [(rows[:0], at[:0])]
        for depth in range(tokens.bytes.shape[1]):
            byte = tokens.bytes[rows, depth]
            self._explore(at, byte)
            at = self.next[at, byte]
            rows = rows[at != DEAD]
            at = at[at != DEAD]
            done = tokens.lengths[rows] == depth + 1
            found.append((rows[done], at[done]))
            rows = rows[~done]
            at = at[~done]
            if not len(rows):
                break
        rows, at = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return Walk(tokens.ids[rows], self.left[at])

    def _explore(self, at: NDArray[np.int32], byte: NDArray[np.uint8]) -> None:
        """Fills in the transitions that are needed."""
        unknown = self.next[at, byte] == UNKNOWN
        for key in np.unique(at[unknown].astype(np.int64) * 256 + byte[unknown]).tolist():
            number, value = divmod(key, 256)
            left = self.after(self.positions[number], value)
            target = DEAD if left is None else self._number(left)  # may replace self.next
            self.next[number, value] = target

    def _number(self, at: Any) -> int:
        if at not in self.numbers:
            number = self.numbers[at] = len(self.positions)
            self.positions.append(at)
            if number == len(self.left):
                self.next = np.concatenate((self.next, np.full_like(self.next, UNKNOWN)))
                self.left = np.concatenate((self.left, np.zeros_like(self.left)))
            self.left[number] = self.shortest(at)
        return self.numbers[at]


class _TextConstraint(Constraint):
    """Walks through the text byte by byte; a token of `ends` may end a complete one.

    Its position is an immutable value; `after` gives the next one, or None where a byte is not
    allowed. Close to the limit of tokens only those are allowed after which the text can still be
    completed, counting a token for each byte.
    """

    reason: str  # why there may be no next token

    def __init__(self, start: Any, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        self.at = start
        self.tokenizer = tokenizer
        self.ends = tuple(ends)
        self.left = MAX_SIZE  # tokens that may still be written
        self.automaton = ByteAutomaton(self.after, self.shortest)

    def new_state(self, limit: int) -> Constraint:
        state = copy(self)
        state.left = limit
        return state

    @abstractmethod
    def after(self, at: Any, byte: int) -> Any:
        """The position after one more byte."""

    @abstractmethod
    def shortest(self, at: Any) -> int:
        """Bytes of a completion from a position; the next byte of it leaves one fewer."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the text may end here."""

    def allowed(self, vocab: int) -> Tensor:
        tokens, rest = self.automaton.walk(self.at, token_matrix(self.tokenizer))
        fits = rest < self.left
        mask = _mask(self.ends if self.complete else (), vocab)
        chosen = tokens[fits] if fits.any() else tokens
        mask[torch.from_numpy(chosen[chosen < vocab]).long()] = True
        return _require_some(mask, self.reason)

    def push(self, token: int) -> None:
        self.left -= 1
        if token not in self.ends:
            for byte in all_token_bytes(self.tokenizer)[token]:
                self.at = self.after(self.at, byte)


class RegexConstraint(_TextConstraint):
    """Makes the whole text match a regular expression.

    Its position is the remaining expression and the bytes of an incomplete character.
    """

    at: tuple[Regex, bytes]
    reason = "no token can continue the pattern"

    def __init__(self, regex: str | Regex, tokenizer: Tokenizer, ends: Iterable[int] = ()) -> None:
        start = parse_regex(regex) if isinstance(regex, str) else regex
        self.derivatives = Derivatives()
        super().__init__((start, b""), tokenizer, ends)

    @property
    def finished(self) -> bool:
        return self.at[0] is EMPTY

    @property
    def complete(self) -> bool:
        regex, begun = self.at
        return regex.complete and not begun

    def allowed(self, vocab: int) -> Tensor:
        self.derivatives.begin()
        return super().allowed(vocab)

    def shortest(self, at: tuple[Regex, bytes]) -> int:
        regex, begun = at
        return UNREACHABLE if begun else regex.shortest

    def after(self, at: tuple[Regex, bytes], byte: int) -> tuple[Regex, bytes] | None:
        regex, begun = at
        text = begun + bytes((byte,))
        size = _length(text[0])
        if size == 0 or (len(text) > 1 and not 0x80 <= byte < 0xC0):
            return None
        if len(text) < size:
            low, high = _reach(text, size)
            firsts = self.derivatives.firsts(regex)
            alive = any(first <= high and low <= last for first, last in firsts)
            return (regex, text) if alive else None
        try:
            left = self.derivatives.after(regex, ord(text.decode()))
        except UnicodeDecodeError:
            return None
        return None if left is NOTHING else (left, b"")


class _Range(NamedTuple):
    """The texts from `first` to before `end`, whose first `depth` bytes are equal."""

    first: int
    end: int
    depth: int


class Choices(_TextConstraint):
    """Allows exactly one of these texts.

    Texts are sorted, so that those with a common prefix form a range.
    """

    at: _Range
    reason = "no token can continue any of the choices"

    def __init__(
        self, texts: Sequence[str], tokenizer: Tokenizer, ends: Iterable[int] = ()
    ) -> None:
        listed = not isinstance(texts, str) and len(texts) > 0
        if not listed or not all(isinstance(text, str) and text for text in texts):
            raise UsageError("choices must be a list of texts of at least one character each.")
        if len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_CHOICE_CHARACTERS:
            raise UsageError(
                f"choices has {len(texts):,} texts of {sum(map(len, texts)):,} characters; the "
                f"limits are {MAX_CHOICES:,} and {MAX_CHOICE_CHARACTERS:,}."
            )
        self.texts = sorted({text.encode() for text in texts})
        super().__init__(_Range(0, len(self.texts), 0), tokenizer, ends)

    @property
    def finished(self) -> bool:
        return self.at.end - self.at.first == 1 and self.complete

    @property
    def complete(self) -> bool:
        return len(self.texts[self.at.first]) == self.at.depth

    def shortest(self, at: _Range) -> int:
        return len(self.texts[at.first]) - at.depth  # of the first text, which stays the first

    def after(self, at: _Range, byte: int) -> _Range | None:
        key = itemgetter(at.depth)
        # a text that ends here has no next byte
        first = at.first + (len(self.texts[at.first]) == at.depth)
        low = bisect_left(self.texts, byte, first, at.end, key=key)
        high = bisect_right(self.texts, byte, low, at.end, key=key)
        return _Range(low, high, at.depth + 1) if low < high else None


class MinTokens(Constraint):
    """Requires at least this many tokens before one of `ends`."""

    def __init__(self, least: int, ends: Iterable[int]) -> None:
        self.left = check_whole_number("min_tokens", least, 0, MAX_SIZE)
        self.ends = tuple(ends)

    def allowed(self, vocab: int) -> Tensor:
        return ~_mask(self.ends if self.left > 0 else (), vocab)

    def push(self, token: int) -> None:
        self.left -= 1


class AllConstraints(Constraint):
    """The conjunction of several constraints."""

    def __init__(self, parts: Iterable[Constraint]) -> None:
        self.parts = list(parts)

    def new_state(self, limit: int) -> Constraint:
        return AllConstraints(part.new_state(limit) for part in self.parts)

    @property
    def finished(self) -> bool:
        return any(part.finished for part in self.parts)

    def allowed(self, vocab: int) -> Tensor:
        masks = torch.stack([part.allowed(vocab) for part in self.parts])
        return _require_some(masks.all(0), "the constraints exclude each other")

    def push(self, token: int) -> None:
        for part in self.parts:
            part.push(token)


class ConstraintOptions(TypedDict, total=False):
    """The options of `generate` that constrain the text."""

    choices: Sequence[str]  # one of these
    regex: str  # the whole text must match
    json_schema: Mapping[str, Any] | Literal[True]  # JSON of this schema; True: any object
    # token ids, or a function of the tokens generated so far
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]]
    banned: Sequence[str]  # words that must not appear
    min_tokens: int  # at least this many before the end


CONSTRAINT_SETTINGS = tuple(ConstraintOptions.__annotations__)


def build_constraint(
    tokenizer: Tokenizer, ends: Iterable[int], **options: Unpack[ConstraintOptions]
) -> Constraint:
    """Combines the constraining options of `generate` into one constraint."""
    parts: list[Constraint] = []
    if "choices" in options:
        parts.append(Choices(options["choices"], tokenizer, ends))
    if "regex" in options:
        parts.append(_regex_constraint(parse_regex(options["regex"]), tokenizer, tuple(ends)))
    if "json_schema" in options:
        regex = json_schema_regex(options["json_schema"])
        parts.append(_regex_constraint(regex, tokenizer, tuple(ends)))
    if "allowed" in options:
        parts.append(AllowedTokens(options["allowed"]))
    if "banned" in options:
        words = options["banned"]
        parts.append(BannedWords([words] if isinstance(words, str) else words, tokenizer))
    if "min_tokens" in options:
        parts.append(MinTokens(options["min_tokens"], ends))
    return parts[0] if len(parts) == 1 else AllConstraints(parts)


@lru_cache(maxsize=16)
def _regex_constraint(regex: Regex, tokenizer: Tokenizer, ends: tuple[int, ...]) -> RegexConstraint:
    """Kept, so that the next request with the same expression finds its tokens."""
    return RegexConstraint(regex, tokenizer, ends)


@lru_cache(maxsize=1 << 14)
def _reach(text: bytes, size: int) -> tuple[int, int]:
    """The range of code points whose `size`-byte encoding has this prefix; empty if not UTF-8."""
    value = text[0] & (0x7F >> size)
    for byte in text[1:]:
        value = value << 6 | byte & 0x3F
    left = 6 * (size - len(text))
    low = max(value << left, MIN_CODE_POINT[size])
    high = min((value + 1 << left) - 1, MAX_CODE_POINT)
    surrogates = low >= 0xD800 and high <= 0xDFFF
    return (MAX_CODE_POINT + 1, -1) if surrogates or low > high else (low, high)


def _length(first: int) -> int:
    """The length of a UTF-8 character with this first byte; 0: invalid."""
    if first < 0x80:
        return 1
    if not 0xC2 <= first < 0xF5:
        return 0
    return 2 + (first >= 0xE0) + (first >= 0xF0)


def _mask(tokens: Iterable[int], vocab: int) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[torch.tensor([token for token in tokens if 0 <= token < vocab], dtype=torch.long)] = True
    return mask


def _require_some(mask: Tensor, reason: str) -> Tensor:
    if not mask.any():
        raise MalmoiError(f"The constraint allows nothing: {reason}.")
    return mask
