"""Constrained decoding: allowed tokens, banned words, a regular expression, a list of choices.

A `Constraint` is shared; each request has its own `ConstraintState`. V vocabulary.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference.generation.json_schema import json_schema_regex
from malmoi.inference.generation.regex import (
    EMPTY,
    MAX_CODE_POINT,
    NOTHING,
    Derivatives,
    Regex,
    parse_regex,
)
from malmoi.inference.generation.token_bytes import all_token_bytes, token_trie
from malmoi.system.limits import MAX_CHOICE_CHARACTERS, MAX_CHOICES, MAX_SIZE, check_whole_number
from malmoi.tokenizer import Tokenizer

REMEMBERED = 64  # cached masks per pattern: each may list the whole vocabulary
MIN_CODE_POINT = {2: 0x80, 3: 0x800, 4: 0x10000}  # by encoded length in bytes


class ConstraintState(Protocol):
    """One text's progress through a constraint."""

    def allowed(self, vocab: int) -> Tensor:
        """A mask of the tokens that may come next: bool [V]."""
        ...

    def push(self, token: int) -> None:
        """Advances by a selected token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing more can follow, so that the text ends here."""
        ...


class Constraint(Protocol):
    def new_state(self) -> ConstraintState: ...


class AllowedTokens:
    """Allows only these tokens, or those returned by a function of the tokens generated so far."""

    def __init__(self, tokens: Iterable[int] | Callable[[list[int]], Iterable[int]]) -> None:
        fixed = () if callable(tokens) else tuple(tokens)
        self.rule = tokens if callable(tokens) else lambda _: fixed

    def new_state(self) -> ConstraintState:
        return _AllowedState(self.rule)


class _AllowedState:
    finished = False

    def __init__(self, rule: Callable[[list[int]], Iterable[int]]) -> None:
        self.rule = rule
        self.written = list[int]()

    def allowed(self, vocab: int) -> Tensor:
        mask = _mask(self.rule(list(self.written)), vocab)
        return _require_some(mask, "none of the allowed tokens is in the vocabulary")

    def push(self, token: int) -> None:
        self.written.append(token)


class BannedWords:
    """Forbids words anywhere in the text, however they are tokenized."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer) -> None:
        if not all(words):
            raise UsageError("A banned word must be a text of at least one character.")
        self.words = [word.encode() for word in words]
        self.spelled = all_token_bytes(tokenizer)
        self.longest = max(map(len, self.words), default=0)
        self.whole = [
            i for i, text in enumerate(self.spelled) if any(word in text for word in self.words)
        ]

    def new_state(self) -> ConstraintState:
        return _BannedState(self)

    @lru_cache(maxsize=1024)  # noqa: B019  # lives as long as the token bytes
    def finishing(self, rest: bytes) -> list[int]:
        """Tokens that start with the rest of a banned word."""
        return [i for i, text in enumerate(self.spelled) if text.startswith(rest)]


class _BannedState:
    finished = False

    def __init__(self, banned: BannedWords) -> None:
        self.banned = banned
        self.tail = b""

    def allowed(self, vocab: int) -> Tensor:
        wrong = set(self.banned.whole)
        for word in self.banned.words:
            for size in range(1, len(word)):
                if self.tail.endswith(word[:size]):
                    wrong.update(self.banned.finishing(word[size:]))
        return _require_some(~_mask(wrong, vocab), "every token would write a banned word")

    def push(self, token: int) -> None:
        spelled = self.banned.spelled[token] if token < len(self.banned.spelled) else b""
        self.tail = (self.tail + spelled)[-self.banned.longest :]


class RegexConstraint:
    """Makes the whole text match a regular expression; a token of `ends` may end a full match."""

    def __init__(self, regex: str | Regex, tokenizer: Tokenizer, ends: Iterable[int] = ()) -> None:
        self.regex = parse_regex(regex) if isinstance(regex, str) else regex
        self.tokenizer = tokenizer
        self.ends = tuple(ends)
        self.derivatives = Derivatives()
        self.masks: OrderedDict[tuple[Regex, bytes], list[int]] = OrderedDict()

    def new_state(self) -> ConstraintState:
        return _RegexState(self)

    def tokens(self, regex: Regex, begun: bytes) -> list[int]:
        """The possible next tokens, given the remaining expression and an incomplete character."""
        if (regex, begun) not in self.masks:
            self.masks[regex, begun] = self._follow(regex, begun)
            if len(self.masks) > REMEMBERED:
                self.masks.popitem(last=False)
        return self.masks[regex, begun]

    def _follow(self, regex: Regex, begun: bytes) -> list[int]:
        """Collects tokens by walking the vocabulary's trie as far as the expression allows."""
        self.derivatives.begin()
        found: list[int] = []
        waiting = [(token_trie(self.tokenizer), regex, begun)]
        while waiting:
            node, regex, begun = waiting.pop()
            for byte, child in node.children.items():
                left, rest = self.advance(regex, begun, byte)
                if left is not NOTHING:
                    found += child.tokens
                    waiting.append((child, left, rest))
        return found

    def advance(self, regex: Regex, begun: bytes, byte: int) -> tuple[Regex, bytes]:
        """The remaining expression after a byte, and the bytes of an incomplete character."""
        text = begun + bytes((byte,))
        size = _length(text[0])
        if size == 0 or (len(text) > 1 and not 0x80 <= byte < 0xC0):
            return NOTHING, b""
        if len(text) < size:
            low, high = _reach(text, size)
            alive = any(
                first <= high and low <= last for first, last in self.derivatives.firsts(regex)
            )
            return (regex if alive else NOTHING), text
        try:
            return self.derivatives.after(regex, ord(text.decode())), b""
        except UnicodeDecodeError:
            return NOTHING, b""


class _RegexState:
    def __init__(self, pattern: RegexConstraint) -> None:
        self.pattern = pattern
        self.regex = pattern.regex
        self.begun = b""

    @property
    def finished(self) -> bool:
        return self.regex is EMPTY

    def allowed(self, vocab: int) -> Tensor:
        ends = self.pattern.ends if self.regex.complete and not self.begun else ()
        tokens = [*self.pattern.tokens(self.regex, self.begun), *ends]
        return _require_some(_mask(tokens, vocab), "no token can continue the pattern")

    def push(self, token: int) -> None:
        if token not in self.pattern.ends:
            for byte in all_token_bytes(self.pattern.tokenizer)[token]:
                self.regex, self.begun = self.pattern.advance(self.regex, self.begun, byte)


class Choices:
    """Allows exactly one of these texts.

    Where one text is a prefix of another, a token of `ends` may end it. Texts are sorted, so that
    those with a common prefix form a range.
    """

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
        self.tokenizer = tokenizer
        self.ends = tuple(ends)

    def new_state(self) -> ConstraintState:
        return _ChoicesWalk(self)

    def after(self, at: "_Range", byte: int) -> "_Range":
        """The part of a range that continues with this byte."""
        key = itemgetter(at.depth)
        # a text that ends here has no next byte
        first = at.first + (len(self.texts[at.first]) == at.depth)
        low = bisect_left(self.texts, byte, first, at.end, key=key)
        return _Range(low, bisect_right(self.texts, byte, low, at.end, key=key), at.depth + 1)

    def tokens(self, at: "_Range") -> list[int]:
        """Collects tokens by walking the vocabulary's trie as far as a text allows."""
        found: list[int] = []
        waiting = [(token_trie(self.tokenizer), at)]
        while waiting:
            node, at = waiting.pop()
            for byte, child in node.children.items():
                left = self.after(at, byte)
                if left.first < left.end:
                    found += child.tokens
                    waiting.append((child, left))
        return found


class _Range(NamedTuple):
    """The texts from `first` to before `end`, whose first `depth` bytes are equal."""

    first: int
    end: int
    depth: int


class _ChoicesWalk:
    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.at = _Range(0, len(choices.texts), 0)

    @property
    def finished(self) -> bool:
        return self.at.end - self.at.first == 1 and self._complete

    @property
    def _complete(self) -> bool:
        return len(self.choices.texts[self.at.first]) == self.at.depth

    def allowed(self, vocab: int) -> Tensor:
        tokens = [*self.choices.tokens(self.at), *(self.choices.ends if self._complete else ())]
        return _require_some(_mask(tokens, vocab), "no token can continue any of the choices")

    def push(self, token: int) -> None:
        if token not in self.choices.ends:
            for byte in all_token_bytes(self.choices.tokenizer)[token]:
                self.at = self.choices.after(self.at, byte)


class MinTokens:
    """Requires at least this many tokens before one of `ends`."""

    def __init__(self, least: int, ends: Iterable[int]) -> None:
        self.least = check_whole_number("min_tokens", least, 0, MAX_SIZE)
        self.ends = tuple(ends)

    def new_state(self) -> ConstraintState:
        return _MinTokensState(self)


class _MinTokensState:
    finished = False

    def __init__(self, wanted: MinTokens) -> None:
        self.wanted = wanted
        self.written = 0

    def allowed(self, vocab: int) -> Tensor:
        return ~_mask(self.wanted.ends if self.written < self.wanted.least else (), vocab)

    def push(self, token: int) -> None:
        self.written += 1


class AllConstraints:
    """The conjunction of several constraints."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self.parts = parts

    def new_state(self) -> ConstraintState:
        return _AllStates([part.new_state() for part in self.parts])


class _AllStates:
    def __init__(self, states: list[ConstraintState]) -> None:
        self.states = states

    @property
    def finished(self) -> bool:
        return any(state.finished for state in self.states)

    def allowed(self, vocab: int) -> Tensor:
        masks = torch.stack([state.allowed(vocab) for state in self.states])
        return _require_some(masks.all(0), "the constraints exclude each other")

    def push(self, token: int) -> None:
        for state in self.states:
            state.push(token)


class ConstraintOptions(TypedDict, total=False):
    """The options of `generate` that constrain the text."""

    choices: Sequence[str]
    regex: str
    json_schema: Mapping[str, Any] | Literal[True]
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]]
    banned: Sequence[str]
    min_tokens: int


CONSTRAINT_SETTINGS = tuple(ConstraintOptions.__annotations__)


def build_constraint(
    tokenizer: Tokenizer, ends: Iterable[int], **options: Unpack[ConstraintOptions]
) -> Constraint:
    """Combines the constraining options of `generate` into one constraint."""
    parts: list[Constraint] = []
    if "choices" in options:
        parts.append(Choices(options["choices"], tokenizer, ends))
    if "regex" in options:
        parts.append(RegexConstraint(options["regex"], tokenizer, ends))
    if "json_schema" in options:
        regex = json_schema_regex(options["json_schema"])
        parts.append(RegexConstraint(regex, tokenizer, ends))
    if "allowed" in options:
        parts.append(AllowedTokens(options["allowed"]))
    if "banned" in options:
        words = options["banned"]
        parts.append(BannedWords([words] if isinstance(words, str) else words, tokenizer))
    if "min_tokens" in options:
        parts.append(MinTokens(options["min_tokens"], ends))
    return parts[0] if len(parts) == 1 else AllConstraints(parts)


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
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _mask(tokens: Iterable[int], vocab: int) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[torch.tensor([token for token in tokens if 0 <= token < vocab], dtype=torch.long)] = True
    return mask


def _require_some(mask: Tensor, reason: str) -> Tensor:
    if not mask.any():
        raise MalmoiError(f"The constraint allows nothing: {reason}.")
    return mask
