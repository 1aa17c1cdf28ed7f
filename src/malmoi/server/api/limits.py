"""What one request may ask for: the characters of its texts, and the tokens that a model reads.

A text is refused or cut by its characters before it is tokenized, which takes hundreds of times its
memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from malmoi.inference import Model
from malmoi.messages import msg, plural
from malmoi.server.api.requests import ApiRequest
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import checkpoint
from malmoi.server.model_registry import ServedModel


def served_model(request: Request, ask: ApiRequest) -> ServedModel:
    """The model that a request names; refuses texts that its context cannot hold."""
    served: ServedModel = request.app.state.registry.get(ask.model)
    for name in sorted(ask.model_fields_set - ask.long_texts):
        for characters in _characters(getattr(ask, name)):
            require_characters(served, name, characters)
    return served


def require_characters(served: ServedModel, name: str, characters: int) -> None:
    """Refuses a text with more characters than the model's context can hold."""
    context = served.model.config.context
    # a token has one at least, so that most texts need no further look
    if characters > context and characters > served.max_characters:
        raise ApiError(
            400,
            "{name} has {characters:,} characters, more than this model's context of "
            "{context:,} tokens can hold ({most:,}): shorten it.",
            param=name,
            code="context_length_exceeded",
            name=name,
            characters=characters,
            context=context,
            most=served.max_characters,
        )


def _characters(value: Any) -> Iterator[int]:
    """The characters of each text; the messages of a conversation are read as one."""
    if isinstance(value, str):
        yield len(value)
    elif isinstance(value, BaseModel):
        yield sum(size for _, part in value for size in _characters(part))
    elif isinstance(value, list):
        sizes = [size for part in value for size in _characters(part)]
        yield from [sum(sizes)] if value and isinstance(value[0], BaseModel) else sizes


def beginnings(served: ServedModel, texts: str | Sequence[str]) -> list[str]:
    """As much of one or more texts as their first tokens need, where the rest would be cut off."""
    listed = [texts] if isinstance(texts, str) else texts
    return [text[: served.max_characters] for text in listed]


def check_reading(request: Request, tokens: int, passes: int = 1, characters: int = 0) -> None:
    """Refuses a request that would read too many tokens, each of them `passes` times.

    Texts of few tokens, such as spaces, are work too: as many characters as a body may have.
    """
    settings: ServeConfig = request.app.state.settings
    limits = {"token": settings.max_read_tokens, "character": settings.max_body}
    for count, (what, limit) in zip((tokens, characters), limits.items(), strict=True):
        if count * passes > limit:
            times = msg(" × {passes} passes", passes=passes) if passes > 1 else ""
            raise ApiError(
                400,
                "The model would have to read {total}, above this server's limit of {limit:,} per "
                "request: send it in parts.",
                code="too_many_tokens",
                total=plural(count, what) + times,
                limit=limit,
            )


def count_reading(
    request: Request, model: Model, texts: Iterable[str], *, passes: int = 1, cut: bool = True
) -> int:
    """The tokens of these texts; refuses the request as soon as they are too many.

    Where texts are `cut`, each counts up to the model's context.
    """
    most = model.config.context if cut else request.app.state.settings.max_read_tokens + 1
    tokens = characters = 0
    for text in texts:
        checkpoint()
        characters += len(text)
        check_reading(request, tokens, passes, characters)
        tokens += model.tokenizer.count(text, most)
        check_reading(request, tokens, passes)
    return tokens
