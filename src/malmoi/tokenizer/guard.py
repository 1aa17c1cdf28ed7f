"""Separates a chat template's control tokens from those in messages.

A template is a program that writes text, and a message may contain `<|im_end|>`, whole or in parts
that the template joins. So the conversation is rendered a second time with a mark, a character that
no text has, wherever in the messages the name of a control token could start or continue. Names
that are still whole come from the template.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from malmoi.errors import UsageError
from malmoi.tokenizer.control import names_pattern
from malmoi.tokenizer.core import Tokenizer

# Unicode noncharacters, reserved for internal use
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
WORD = re.compile(r"\w+")
COMPARED = ("role", "type", "name")  # keys that templates compare rather than print
Render = Callable[[Any], str]


def conversation_tokens(tokenizer: Tokenizer, chat: Any, render: Render) -> list[int]:
    """The tokens of `render(chat)`: control tokens only where the template wrote them.

    `chat` is all untrusted input, as JSON. If no message contains a control token's name, these are
    the tokens that transformers gives for the rendered text.
    """
    text = render(chat)
    guard = Guard(tokenizer, chat, text)
    marked = guard.protect(chat)
    if marked == chat:
        return tokenizer.encode(text, specials=False, parse_special=True).tokens
    parsed = tokenizer.encode(text, specials=False, parse_special=True).tokens
    try:
        theirs = guard.parts(render(marked))
    # a template that searches messages for its own markers may fail on marked messages
    except UsageError:
        if guard.is_named_in(chat):
            raise
        return parsed
    if guard.is_innocent(chat, guard.parts(text), theirs, parsed):
        return parsed
    return tokenizer.encode_parts(theirs).tokens


class Guard:
    """Marks messages so that they contain no complete name of a control token."""

    def __init__(self, tokenizer: Tokenizer, chat: Any, text: str) -> None:
        self.ids = tokenizer.control_tokens
        self.control = tokenizer.control_ids
        self.names = names_pattern(self.ids)
        seen = text + json.dumps(chat, ensure_ascii=False)
        self.mark = next((mark for mark in MARKS if mark not in seen), None)
        self.firsts = re.compile("|".join({re.escape(name[0]) for name in self.ids}) or r"(?!)")
        self.rests = {name[at:] for name in self.ids for at in range(1, len(name))}
        self.longest = max(map(len, self.rests), default=0)
        if self.mark is None:
            raise UsageError(
                "These messages contain every one of Unicode's 32 noncharacters; remove one."
            )

    def protect(self, value: Any, key: str = "") -> Any:
        """A JSON value with marks in its strings."""
        if isinstance(value, str):
            if key in COMPARED and self._is_word(value):
                return value
            return (str(self.mark) if self._completes(value) else "") + self._broken(value)
        if isinstance(value, list):
            return [self.protect(one) for one in value]
        if isinstance(value, dict):
            marked = ((name if self._is_word(name) else self._broken(name), name) for name in value)
            return {new: self.protect(value[name], name) for new, name in marked}
        return value

    def _is_word(self, text: str) -> bool:
        """Whether this is a plain word, which a template may put between `<|` and `|>`."""
        return bool(WORD.fullmatch(text)) and not (self.names and self.names.search(text))

    def _broken(self, text: str) -> str:
        """The text with a mark after every possible start of a name."""
        return self.firsts.sub(lambda found: f"{found[0]}{self.mark}", text)

    def _completes(self, text: str) -> bool:
        """Whether a name started elsewhere could continue or end here."""
        if any(text[:size] in self.rests for size in range(1, min(len(text), self.longest) + 1)):
            return True
        return 0 < len(text) < self.longest and any(rest.startswith(text) for rest in self.rests)

    def parts(self, text: str) -> list[str | int]:
        """Alternates text and control tokens, with the marks removed."""
        found: list[str | int] = []
        at = 0
        for name in self.names.finditer(text) if self.names else ():
            found += [text[at : name.start()].replace(str(self.mark), ""), self.ids[name[0]]]
            at = name.end()
        return [*found, text[at:].replace(str(self.mark), "")]

    def is_innocent(
        self, chat: Any, parts: list[str | int], theirs: list[str | int], parsed: list[int]
    ) -> bool:
        """Whether every control token of the plain rendering was written by the template.

        A template that inspects messages (for `</think>`, say) may render marked ones differently.
        Then the control tokens must still be the same, and none may be named in the messages.
        """
        wanted = self._control(theirs)
        found = self._control(parts)
        if not wanted == found == [token for token in parsed if token in self.control]:
            return False
        return parts == theirs or not self.is_named_in(chat)

    def is_named_in(self, chat: Any) -> bool:
        """Whether any text of the messages contains a control token's name."""
        return self.names is not None and any(map(self.names.search, texts_in(chat)))

    def _control(self, parts: list[str | int]) -> list[int]:
        return [part for part in parts if isinstance(part, int) and part in self.control]


def texts_in(value: Any) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(value, dict):
        return [text for key, one in value.items() for text in (key, *texts_in(one))]
    if isinstance(value, list):
        return [text for one in value for text in texts_in(one)]
    return [value] if isinstance(value, str) else []
