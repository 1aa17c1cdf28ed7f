"""Tokens, as vLLM's server answers."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from malmoi.errors import require_that
from malmoi.server.api.chat import conversation_of
from malmoi.server.api.requests import ApiRequest, ChatRequest, Message, Tokens, example, field
from malmoi.server.api.tools import Tool
from malmoi.server.executor import served_model

router = APIRouter()


class TokenizeRequest(ApiRequest, json_schema_extra=example(prompt="The state of")):
    """A text or a conversation to split into tokens."""

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1000)
    tools: list[Tool] = Field([], max_length=128)
    add_special_tokens: bool = field(True, "Those around a text, such as [CLS].")
    return_token_strs: bool = field(False, "Return the tokens as texts too.")


class DetokenizeRequest(ApiRequest, json_schema_extra=example(tokens=[1, 2, 3])):
    """Tokens to join."""

    tokens: Tokens


@router.post("/tokenize", tags=["Other servers"])
async def tokenize(ask: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The tokens of a text, or of a conversation as the model reads it, as vLLM answers."""
    served = served_model(request, ask)
    tokenizer = served.model.tokenizer
    require_that(
        (ask.prompt is None) != (ask.messages is None), "Send either a prompt or messages."
    )

    def encode() -> list[int]:
        if ask.messages is not None:
            chat = ChatRequest(messages=ask.messages, tools=ask.tools)
            return conversation_of(chat, served).tokens
        return tokenizer.encode(ask.prompt or "", specials=ask.add_special_tokens).tokens

    tokens = await asyncio.to_thread(encode)
    names = [tokenizer.token(id) for id in tokens] if ask.return_token_strs else None
    most = served.model.config.context
    return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": names}


@router.post("/detokenize", tags=["Other servers"])
async def detokenize(ask: DetokenizeRequest, request: Request) -> dict[str, str]:
    """The text of some tokens, special ones included, as vLLM answers."""
    decode = served_model(request, ask).model.tokenizer.decode
    return {"prompt": await asyncio.to_thread(decode, ask.tokens, skip_specials=False)}
