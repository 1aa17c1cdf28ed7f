"""Chat templates, rendered as transformers renders them.

A template is an untrusted program, so it runs in jinja2's sandbox, in a limited process, and sees
only plain data. It writes text, and a message may contain `<|im_end|>`, whole or in parts that the
template joins. So the conversation is rendered a second time with a mark, a character that no text
has, wherever in the messages the name of a control token could start or continue. Names that are
still whole come from the template.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from malmoi.errors import MalmoiError, UsageError, ensure, explained, require_that, required
from malmoi.system.confined import Refused, render_template
from malmoi.system.untrusted import MAX_TEMPLATE_CHARACTERS, shown
from malmoi.tokenizer.core import Tokenizer
from malmoi.tokenizer.pipeline import names_pattern

Messages = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "…"}, …
# where a model without a template starts writing the next turn itself
PLAIN_STOPS = ("\nUser:", "\nAssistant:")
# given to a model that learns to answer and has no template: the plain dialogue, each answer ended
# by end-of-text. It needs no new token, so that an adapter on an unchanged vocabulary can use it.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with the default chat template if it has none."""
    if template_of(tokenizer) is not None:
        return tokenizer
    end = required(
        tokenizer.specials.eos,
        "This model's tokenizer has no end-of-text token, so an answer could not end.",
    )
    opened = tokenizer.encode("a").tokens[0] == tokenizer.specials.bos
    template = ("{{ bos_token }}" if opened else "") + DEFAULT_TEMPLATE
    settings = {"chat_template": template, "eos_token": tokenizer.token(end)}
    return Tokenizer(tokenizer._rust, tokenizer.settings | settings)


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> str | None:
    """The tokenizer's chat template; of several the "default", or with tools the "tool_use"."""
    found: object = tokenizer.chat_template
    # tokenizer_config.json stores several as [{"name": …, "template": …}]
    if isinstance(found, list):
        found = {
            str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)
        }
    if isinstance(found, dict):
        found = (found.get("tool_use") if tools else None) or found.get("default")
    ensure(
        not found or (isinstance(found, str) and len(found) <= MAX_TEMPLATE_CHARACTERS),
        "The chat template must be a text of at most {most:,} characters, not {found}.",
        most=MAX_TEMPLATE_CHARACTERS,
        found=shown(found),
    )
    return str(found) if found else None


def render_chat(
    tokenizer: Tokenizer, messages: Messages, *, reply: bool = True, **values: Any
) -> str:
    """Renders a conversation as the model reads it, up to its answer (unless `reply` is false).

    `values` are other variables of the template (tools, documents…). Without a template the result
    is a plain dialogue. For tokens use `encode_chat`: in the text, a message that contains
    `<|im_end|>` cannot be told from the template.
    """
    return _rendered(tokenizer, _plain(values) | {"messages": checked(messages)}, reply=reply)


def encode_chat(
    tokenizer: Tokenizer, messages: Messages, *, reply: bool = True, **values: Any
) -> list[int]:
    """The tokens of a conversation: control tokens only from the template, messages as text."""
    chat = _plain(values) | {"messages": checked(messages)}
    return conversation_tokens(tokenizer, chat, partial(_rendered, tokenizer, reply=reply))


def _rendered(tokenizer: Tokenizer, chat: dict[str, Any], *, reply: bool) -> str:
    template = template_of(tokenizer, tools=bool(chat.get("tools")))
    if template is None:
        return plain_dialogue(chat["messages"], reply=reply)
    if template == DEFAULT_TEMPLATE:  # the same text without asking another process
        end = tokenizer.token(tokenizer.specials.eos or 0)
        return plain_dialogue(chat["messages"], reply=reply, end=end)
    roles = {role: id for role, id in vars(tokenizer.specials).items() if id is not None}
    tokens = {f"{role}_token": tokenizer.token(id) for role, id in roles.items()}
    asked = {"add_generation_prompt": reply, "tools": None, "documents": None}
    try:
        return render_template(template, tokens | asked | chat)
    except Refused as error:
        if error.line is None:
            raise UsageError(
                "The chat template rejects these messages: {error}.", error=error
            ) from None
        raise MalmoiError(
            "The chat template is invalid: {error} (line {line}).", error=error, line=error.line
        ) from None


def plain_dialogue(messages: Messages, *, reply: bool = True, end: str = "") -> str:
    """A plain dialogue, for models without a chat template; `end` follows each answer."""
    text = ""
    for message in messages:
        role = message["role"]
        opening = "" if role == "system" else f"{role.capitalize()}: "
        closing = {"system": "\n\n", "assistant": f"{end}\n"}.get(role, "\n")
        text += opening + _text_of(message) + closing
    return text + ("Assistant:" if reply else "")


def _text_of(message: Mapping[str, Any]) -> str:
    """A message's text, which may be given in parts: [{"type": "text", "text": "…"}, …]."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(
        str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content
    )


def checked(messages: Messages) -> list[dict[str, Any]]:
    """The messages as plain data; raises if they are malformed."""
    require_that(
        messages and isinstance(messages, Sequence) and not isinstance(messages, str | bytes),
        'A conversation is a list of messages such as {"role": "user", "content": "Hello"}.',
    )
    for at, message in enumerate(messages):
        require_that(
            isinstance(message, Mapping) and isinstance(message.get("role"), str),
            'Message {at} has no role; write {{"role": "user", "content": …}}, not {one!r:.60}.',
            at=at,
            one=message,
        )
        content = message.get("content")
        require_that(
            isinstance(content, str | list | None),
            "The content of message {at} must be a text, not {content!r:.60}.",
            at=at,
            content=content,
        )
    return list(_plain([dict(message) for message in messages]))


def _plain(value: Any) -> Any:
    """Keeps only JSON types, so that there are no methods a template might call."""
    with explained(
        (TypeError, ValueError),
        "A message must be plain data, as in JSON: {error}.",
        raises=UsageError,
    ):
        return json.loads(json.dumps(value))


# ------------------------------------------------------------------ control tokens

# Unicode noncharacters, reserved for internal use
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
WORD = re.compile(r"\w+")
COMPARED = ("role", "type", "name")  # keys that templates compare rather than print


def conversation_tokens(tokenizer: Tokenizer, chat: Any, render: Callable[[Any], str]) -> list[int]:
    """The tokens of `render(chat)`: control tokens only where the template wrote them.

    `chat` is all untrusted input, as JSON. Without a control token's name in it, these are the
    tokens that transformers gives for the rendered text."""
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
        require_that(
            self.mark, "These messages contain every one of Unicode's 32 noncharacters; remove one."
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
        found = [token for token in parsed if token in self.control]
        alike = self._control(theirs) == self._control(parts) == found
        return alike and (parts == theirs or not self.is_named_in(chat))

    def is_named_in(self, chat: Any) -> bool:
        return self.names is not None and any(map(self.names.search, texts_in(chat)))

    def _control(self, parts: list[str | int]) -> list[int]:
        return [part for part in parts if isinstance(part, int) and part in self.control]


def texts_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, one in value.items() for text in (key, *texts_in(one))]
    if isinstance(value, list):
        return [text for one in value for text in texts_in(one)]
    return [value] if isinstance(value, str) else []
