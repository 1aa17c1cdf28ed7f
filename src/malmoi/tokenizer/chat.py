"""Conversations as text: the chat template that a model was trained with, rendered as transformers renders it.

A template is a program from whoever made the model, so it runs in jinja2's sandbox and sees plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from malmoi.errors import MalmoiError, UsageError
from malmoi.tokenizer.core import Tokenizer

Messages = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "…"}, …
# A language model that was never taught to talk continues a dialogue as it would stand in a book.
PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOPS = ("\nUser:", "\nAssistant:")  # where a plain model begins to write the next turn itself


def template_of(tokenizer: Tokenizer, name: str = "default") -> str | None:
    """The tokenizer's chat template; of several, the one of this name."""
    given = tokenizer.chat_template
    if isinstance(given, list):  # as tokenizer_config.json keeps several: [{"name": …, "template": …}]
        given = {str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)}
    return given.get(name) if isinstance(given, dict) else given


def render(tokenizer: Tokenizer, messages: Messages, *, reply: bool = True, **values: Any) -> str:
    """A conversation as the model reads it, up to where its answer begins (unless `reply` is false).

    `values` are whatever else the template asks for (tools, documents…). Without a template, `PLAIN` is used.
    """
    template = template_of(tokenizer) or PLAIN
    roles = {role: id for role, id in vars(tokenizer.specials).items() if id is not None}
    tokens = {f"{role}_token": tokenizer.token(id) for role, id in roles.items()}
    asked = {"messages": checked(messages), "add_generation_prompt": reply, "tools": None, "documents": None}
    jinja = _jinja()
    try:
        return str(_compiled(template).render(**tokens, **(asked | _plain(values))))
    except jinja.exceptions.TemplateSyntaxError as error:
        raise MalmoiError(f"The chat template is not one: {error.message} (line {error.lineno}).") from None
    except Exception as error:  # the template is a program; whatever fails in it failed for these messages
        raise UsageError(f"The chat template refuses these messages: {error}.") from None


def checked(messages: Messages) -> list[dict[str, Any]]:
    """The messages as plain data, or what is wrong with them."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError('A conversation is a list of messages such as {"role": "user", "content": "Hello"}.')
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f'Message {at} has no role; write {{"role": "user", "content": …}}, not {message!r:.60}.')
        if not isinstance(message.get("content"), str | list | None):
            raise UsageError(f"The content of message {at} must be a text, not {message['content']!r:.60}.")
    plain: list[dict[str, Any]] = _plain([dict(message) for message in messages])
    return plain


def _plain(value: Any) -> Any:
    """Only what JSON has: no object whose methods a template might call."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"A message must be plain data, as in JSON: {error}.") from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _environment() -> Any:
    """jinja2 as transformers sets it up, so that the same template gives the same text."""
    jinja = _jinja()
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}…{% endgeneration %} marks what a model wrote; here it is only text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise jinja.exceptions.TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda format: datetime.now().strftime(format)}
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _jinja() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MalmoiError("A chat template needs jinja2: pip install jinja2.") from error
    return jinja2
