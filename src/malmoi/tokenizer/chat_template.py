"""Chat templates, rendered as transformers renders them.

A template is an untrusted program, so it runs in jinja2's sandbox, in a limited process, and sees
only plain data.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from malmoi.errors import MalmoiError, UsageError
from malmoi.system.confined import Refused, render_template
from malmoi.system.limits import MAX_TEMPLATE_CHARACTERS, shown
from malmoi.tokenizer.core import Tokenizer
from malmoi.tokenizer.guard import conversation_tokens

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
    marks = tokenizer.specials
    if marks.eos is None:
        raise UsageError(
            "This model's tokenizer has no end-of-text token, so an answer could not end."
        )
    opened = tokenizer.encode("a").tokens[0] == marks.bos
    template = ("{{ bos_token }}" if opened else "") + DEFAULT_TEMPLATE
    settings = {"chat_template": template, "eos_token": tokenizer.token(marks.eos)}
    return Tokenizer(tokenizer._rust, tokenizer.settings | settings)


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> str | None:
    """The tokenizer's chat template; of several the "default", or with tools the "tool_use"."""
    given = tokenizer.chat_template
    # tokenizer_config.json stores several as [{"name": …, "template": …}]
    if isinstance(given, list):
        given = {
            str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)
        }
    found = given
    if isinstance(given, dict):
        found = (given.get("tool_use") if tools else None) or given.get("default")
    if not found:
        return None
    if not isinstance(found, str) or len(found) > MAX_TEMPLATE_CHARACTERS:
        raise MalmoiError(
            "The chat template that came with the tokenizer must be a text of at most "
            "{most:,} characters, not {found}.",
            most=MAX_TEMPLATE_CHARACTERS,
            found=shown(found),
        )
    return found


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
    return conversation_tokens(
        tokenizer, chat, lambda given: _rendered(tokenizer, given, reply=reply)
    )


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
    if find_spec("jinja2") is None:
        raise MalmoiError("A chat template needs jinja2: pip install jinja2.")
    try:
        return render_template(template, tokens | asked | chat)
    except Refused as error:
        if error.line is not None:
            raise MalmoiError(
                "The chat template is invalid: {error} (line {line}).", error=error, line=error.line
            ) from None
        raise UsageError(
            "The chat template rejects these messages: {error}.", error=error
        ) from None


def plain_dialogue(messages: Messages, *, reply: bool = True, end: str = "") -> str:
    """A plain dialogue, for models without a chat template; `end` follows each answer."""
    turns = []
    for message in messages:
        role = message["role"]
        opening = "" if role == "system" else f"{role.capitalize()}: "
        closing = {"system": "\n\n", "assistant": f"{end}\n"}.get(role, "\n")
        turns.append(opening + _text_of(message) + closing)
    return "".join(turns) + ("Assistant:" if reply else "")


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
    if (
        isinstance(messages, str | bytes | Mapping)
        or not isinstance(messages, Sequence)
        or not messages
    ):
        raise UsageError(
            'A conversation is a list of messages such as {"role": "user", "content": "Hello"}.'
        )
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(
                'Message {at} has no role; write {{"role": "user", "content": …}}, not '
                "{message!r:.60}.",
                at=at,
                message=message,
            )
        if not isinstance(message.get("content"), str | list | None):
            raise UsageError(
                "The content of message {at} must be a text, not {content!r:.60}.",
                at=at,
                content=message["content"],
            )
    plain: list[dict[str, Any]] = _plain([dict(message) for message in messages])
    return plain


def _plain(value: Any) -> Any:
    """Keeps only JSON types, so that there are no methods a template might call."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(
            "A message must be plain data, as in JSON: {error}.", error=error
        ) from None
