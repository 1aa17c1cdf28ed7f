"""Constrained decoding: allowed tokens, banned words, a number of tokens; V is the vocabulary."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import lru_cache

import torch
from torch import Tensor

from malmoi.errors import ensure, require_that
from malmoi.inference.generation.token_bytes import all_token_bytes
from malmoi.messages import msg
from malmoi.system.untrusted import MAX_SIZE, check_whole_number
from malmoi.tokenizer import Tokenizer


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
    def allowed(self, scores: Tensor) -> Tensor:
        """A mask of the tokens that may come next, of these scores [V]: bool [V]."""

    @abstractmethod
    def push(self, token: int) -> None:
        """Advances by a selected token."""


class AllowedTokens(Constraint):
    """Allows only these tokens, or those returned by a function of the tokens generated so far."""

    def __init__(self, tokens: Iterable[int] | Callable[[list[int]], Iterable[int]]) -> None:
        fixed = () if callable(tokens) else tuple(tokens)
        self.rule = tokens if callable(tokens) else lambda _: fixed
        self.written: tuple[int, ...] = ()

    def allowed(self, scores: Tensor) -> Tensor:
        mask = _mask(self.rule(list(self.written)), scores)
        return require_some(mask, "none of the allowed tokens is in the vocabulary")

    def push(self, token: int) -> None:
        self.written += (token,)


class BannedWords(Constraint):
    """Forbids words anywhere in the text, however they are tokenized."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer) -> None:
        require_that(all(words), "A banned word must be a text of at least one character.")
        self.words = [word.encode() for word in words]
        self.token_bytes = all_token_bytes(tokenizer)
        self.longest = max(map(len, self.words), default=0)
        self.whole = [
            i for i, text in enumerate(self.token_bytes) if any(word in text for word in self.words)
        ]
        self.tail = b""
        self.finishing = lru_cache(maxsize=1024)(  # tokens that start with the rest of a word
            lambda rest: [i for i, text in enumerate(self.token_bytes) if text.startswith(rest)]
        )

    def allowed(self, scores: Tensor) -> Tensor:
        wrong = set(self.whole)
        for word in self.words:
            for size in range(1, len(word)):
                if self.tail.endswith(word[:size]):
                    wrong.update(self.finishing(word[size:]))
        return require_some(~_mask(wrong, scores), "every token would write a banned word")

    def push(self, token: int) -> None:
        written = self.token_bytes[token] if token < len(self.token_bytes) else b""
        self.tail = (self.tail + written)[-self.longest :]


class MinTokens(Constraint):
    """Requires at least this many tokens before one of `ends`."""

    def __init__(self, least: int, ends: Iterable[int]) -> None:
        self.left = check_whole_number("min_tokens", least, 0, MAX_SIZE)
        self.ends = tuple(ends)

    def allowed(self, scores: Tensor) -> Tensor:
        return ~_mask(self.ends if self.left > 0 else (), scores)

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

    def allowed(self, scores: Tensor) -> Tensor:
        mask = torch.ones(len(scores), dtype=torch.bool)
        for part in self.parts:
            mask &= part.allowed(scores.masked_fill(~mask.to(scores.device), -torch.inf))
        return require_some(mask, "the constraints exclude each other")

    def push(self, token: int) -> None:
        for part in self.parts:
            part.push(token)


def _mask(tokens: Iterable[int], scores: Tensor) -> Tensor:
    vocab = len(scores)
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[torch.tensor([token for token in tokens if 0 <= token < vocab], dtype=torch.long)] = True
    return mask


def require_some(mask: Tensor, reason: str) -> Tensor:
    ensure(mask.any(), "The constraint allows nothing: {reason}.", reason=msg(reason))
    return mask
