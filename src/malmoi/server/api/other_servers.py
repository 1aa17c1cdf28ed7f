"""Endpoints as other servers have them: vLLM's tokens, and vectors of text-embeddings-inference."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from malmoi.errors import UsageError
from malmoi.server.api.chat import conversation_of
from malmoi.server.api.predictions import embeddings_endpoint
from malmoi.server.api.requests import (
    ApiRequest,
    ChatRequest,
    EmbeddingInput,
    EmbeddingRequest,
    Message,
    Tokens,
    example,
)
from malmoi.server.api.tools import Tool
from malmoi.server.executor import served_model

router = APIRouter()


class TokenizeRequest(ApiRequest, json_schema_extra=example(prompt="The state of")):
    """A text or a conversation to split into tokens."""

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1000)
    tools: list[Tool] = Field([], max_length=128)
    add_special_tokens: bool = Field(
        default=True, description="Those around a text, such as [CLS]."
    )
    return_token_strs: bool = Field(default=False, description="Return the tokens as texts too.")


class DetokenizeRequest(ApiRequest, json_schema_extra=example(tokens=[1, 2, 3])):
    """Tokens to join."""

    tokens: Tokens


class EmbedRequest(ApiRequest, json_schema_extra=example(inputs=["a text", "another"])):
    """Texts to embed, as text-embeddings-inference takes them."""

    long_texts = frozenset({"inputs"})

    inputs: EmbeddingInput
    normalize: bool = True
    truncate: bool = False


@router.post("/tokenize", tags=["Other servers"])
async def tokenize(ask: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The tokens of a text, or of a conversation as the model reads it, as vLLM answers."""
    served = served_model(request, ask)
    tokenizer = served.model.tokenizer
    if (ask.prompt is None) == (ask.messages is None):
        raise UsageError("Send either a prompt or messages.")

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


@router.post("/embed", response_model=list[list[float]], tags=["Other servers"])
async def embed(ask: EmbedRequest, request: Request) -> Any:
    """A vector for each text, as text-embeddings-inference answers."""
    given = EmbeddingRequest(
        model=ask.model, input=ask.inputs, normalize=ask.normalize, truncate=ask.truncate
    )
    found = await embeddings_endpoint(given, request)
    return [one.embedding for one in found.data]
