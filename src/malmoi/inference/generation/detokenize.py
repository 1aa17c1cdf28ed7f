"""Incremental detokenization: whole characters only, and no part of a stop string.

`generate` joins the stream, so the two always agree.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from malmoi.inference.generation.constraints import Constraint
from malmoi.inference.generation.token_bytes import token_bytes
from malmoi.tokenizer import Tokenizer

# prompt tokens that decide how the first new token is written (its space, its "##")
CONTEXT_TOKENS = 8


class ByteDetokenizer:
    """Byte-level tokens: a character is released with its last byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = token_bytes(tokenizer)
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *tokens: int) -> str:
        return self.utf8.decode(b"".join(map(self.bytes_of, tokens)))


class WindowDetokenizer:
    """Other tokenizers: decodes a small window with and without the new tokens, and takes the rest.

    A text that ends in U+FFFD is held back: a byte-fallback token may still complete its character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.window = list(prompt[-CONTEXT_TOKENS:])
        self.read = len(self.window)  # tokens of the window that have been released

    def push(self, *tokens: int) -> str:
        return "".join(map(self._push, tokens))

    def _push(self, token: int) -> str:
        self.window.append(token)
        shown = self.tokenizer.decode(self.window[: self.read])
        text = self.tokenizer.decode(self.window)
        if len(text) <= len(shown) or text.endswith("\ufffd"):
            return ""
        self.window, self.read = self.window[self.read :], len(self.window) - self.read
        return text[len(shown) :]


@dataclass(frozen=True)
class NoDetokenizer:
    """For tokens whose text is made elsewhere."""

    tokenizer: Tokenizer

    def push(self, *_tokens: int) -> str:
        return ""


Detokenizer = ByteDetokenizer | WindowDetokenizer | NoDetokenizer


def detokenizer(tokenizer: Tokenizer, prompt: Sequence[int]) -> Detokenizer:
    """The incremental detokenizer for the continuation of a prompt."""
    if tokenizer.kind == "byte-bpe":
        return ByteDetokenizer(tokenizer)
    return WindowDetokenizer(tokenizer, prompt)


class StopFilter:
    """Passes text through up to the first stop string, holding back a possible start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        if not self.stops:
            return text
        self.held += text
        at = [(i + len(stop), i) for stop in self.stops if (i := self.held.find(stop)) >= 0]
        if at:
            self.found = True
            # the stop string completed first wins, however the text was tokenized
            self.held = self.held[: min(at)[1]]
            return self.flush()
        longest = min(max(map(len, self.stops)) - 1, len(self.held))
        begun = (
            n
            for n in range(longest, 0, -1)
            if any(stop.startswith(self.held[-n:]) for stop in self.stops)
        )
        upto = len(self.held) - next(begun, 0)
        shown, self.held = self.held[:upto], self.held[upto:]
        return shown

    def flush(self) -> str:
        shown, self.held = self.held, ""
        return shown


class TextWriter:
    """One continuation: takes tokens, returns text, and tracks whether it is finished."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], ends: frozenset[int], limit: int
    ) -> None:
        self.detokenizer = detokenizer
        self.filter = StopFilter(stops)
        self.ends = ends
        self.left = limit
        self.done = limit == 0
        self.ended = False

    def push(self, *tokens: int) -> str:
        """The text released by these tokens; empty while a character or stop string is incomplete.

        Only the last one may end the text.
        """
        self.left -= len(tokens)
        # the network's vocabulary may be padded beyond the tokenizer's
        known = self.detokenizer.tokenizer.vocab_size
        written = [token for token in tokens if token < known and token not in self.ends]
        text = self.filter.push(self.detokenizer.push(*written))
        self.ended = self.filter.found or tokens[-1] in self.ends
        self.done = self.ended or self.left == 0
        return text + self.filter.flush() if self.done else text

    def push_all(self, tokens: Sequence[int], state: Constraint | None) -> tuple[str, int]:
        """The text of these tokens up to its end, and how many tokens that took."""
        text, used = "", 0
        # those of which none ends a text are decoded together, which takes a third of the time
        free = state is None and not self.filter.stops and self.ends.isdisjoint(tokens)
        while used < len(tokens) and not self.done:
            size = min(len(tokens), self.left) if free else 1
            text += self.push(*tokens[used : used + size])
            used += size
            if state is not None and state.finished:
                text += self.end()
        return text, used

    def end(self) -> str:
        """Ends the text and returns the part that was held back."""
        self.ended = self.done = True
        return self.filter.flush()

    @property
    def finish(self) -> Literal["stop", "length"]:
        """ "stop" where the text came to an end, "length" where the limit was reached."""
        return "stop" if self.ended else "length"
