"""Endpoints as other servers have them: vLLM's tokens, and vectors of text-embeddings-inference."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError

from malmoi.errors import UsageError
from malmoi.inference.engine import GenerationJob, TextChunk, join_chunks
from malmoi.inference.prompt import MAX_REPLY_TOKENS
from malmoi.server.api.chat import chat_jobs, conversation_of
from malmoi.server.api.completions import GenerationReply, respond
from malmoi.server.api.events import Events, LineStream
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
from malmoi.server.api.responses import AssistantMessage, Usage
from malmoi.server.api.tools import Tool
from malmoi.server.executor import GenerationStream, IndexedChunk, served_model
from malmoi.server.model_registry import ServedModel
from malmoi.tokenizer.chat_template import template_of

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


# ------------------------------------------------------------------ Ollama

LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer, or with `stream` its parts, a line of JSON each.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}
OPTION_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# options that say how Ollama runs a model, not what it answers
RUNTIME_OPTIONS = {
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
    *("low_vram", "f16_kv", "use_mmap", "use_mlock", "vocab_only", "logits_all"),
}


class OllamaRequest(ApiRequest):
    """The fields of both endpoints."""

    stream: bool = Field(default=True, description="Lines of JSON.")
    format: Literal["", "json"] | dict[str, Any] = Field(
        default="", description="JSON, or a schema."
    )
    options: dict[str, Any] = Field({}, description="temperature, num_predict, seed, stop, …")

    def as_chat(self, messages: Sequence[Message]) -> ChatRequest:
        """The same for OpenAI's API, whose errors name an option that is unknown or wrong."""
        given = {OPTION_NAMES.get(name, name): value for name, value in self.options.items()}
        fields = {name: value for name, value in given.items() if name not in RUNTIME_OPTIONS}
        if fields.get("max_tokens") in (-1, -2):  # no limit but the server's
            del fields["max_tokens"]
        if self.format:
            named = {} if self.format == "json" else {"schema": self.format}
            fields["response_format"] = {"type": "json_object", **named}
        fields |= {"messages": list(messages), "stream": self.stream, "n": 1}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            wrong = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(wrong, body=fields) from None


class OllamaChatRequest(
    OllamaRequest, json_schema_extra=example(messages=[{"role": "user", "content": "Hello!"}])
):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1, max_length=1000)


class OllamaGenerateRequest(OllamaRequest, json_schema_extra=example(prompt="The state of")):
    """A prompt to answer, or without a chat template to continue."""

    prompt: str
    system: str = Field(default="", description="A system message before the prompt.")
    raw: bool = Field(default=False, description="Continue the prompt as it is.")


class OllamaAnswer(BaseModel):
    """An answer or a part of it; the last part counts the tokens."""

    model: str
    created_at: datetime
    message: AssistantMessage | None = None
    response: str | None = None
    done: bool = False
    done_reason: str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None


class OllamaReply(GenerationReply):
    """Bodies of /api/chat."""

    prefix = "ollama"
    stream_class = LineStream

    async def stream(self, generation: GenerationStream) -> Events:
        seen: list[TextChunk] = []
        async for chunks in generation.batches():
            seen += [chunk for _, chunk in chunks]
            yield self.events(chunks)
        yield [_line(self._last("", seen))]

    def events(self, chunks: Sequence[IndexedChunk]) -> list[bytes]:
        return [_line(self.body([chunk.text])) for _, chunk in chunks if chunk.text]

    def whole(self, written: Sequence[Sequence[TextChunk]]) -> OllamaAnswer:
        return self._last(join_chunks(written[0]).text, written[0])

    def body(self, choices: list[str], usage: Usage | None = None) -> OllamaAnswer:
        message = AssistantMessage(content=self.trimmed(0, choices[0]))
        return OllamaAnswer(model=self.served.name, created_at=datetime.now(UTC), message=message)

    def _last(self, text: str, chunks: Sequence[TextChunk]) -> OllamaAnswer:
        done = join_chunks(chunks)
        self.written = len(done.tokens)
        usage = self.usage()
        return self.body([text]).model_copy(
            update={
                "done": True,
                "done_reason": done.finish,
                "prompt_eval_count": usage.prompt_tokens,
                "eval_count": usage.completion_tokens,
            }
        )


class OllamaTextReply(OllamaReply):
    """Bodies of /api/generate."""

    def body(self, choices: list[str], usage: Usage | None = None) -> OllamaAnswer:
        return OllamaAnswer(
            model=self.served.name, created_at=datetime.now(UTC), response=choices[0]
        )


def _line(answer: OllamaAnswer) -> bytes:
    return answer.model_dump_json(exclude_none=True).encode() + b"\n"


answers = partial(
    router.post,
    response_model=OllamaAnswer,
    response_model_exclude_none=True,
    responses=LINES,
    tags=["Ollama"],
)


@answers("/api/chat")
async def ollama_chat(ask: OllamaChatRequest, request: Request) -> Any:
    """Answers in a conversation, as /v1/chat/completions does."""
    served = served_model(request, ask)
    return await respond(request, ask.as_chat(ask.messages), served, chat_jobs, OllamaReply)


@answers("/api/generate")
async def ollama_generate(ask: OllamaGenerateRequest, request: Request) -> Any:
    """Answers a prompt through the model's chat template; without one, continues it."""
    served = served_model(request, ask)
    system = [Message(role="system", content=ask.system)] if ask.system else []
    chat = ask.as_chat([*system, Message(role="user", content=ask.prompt)])
    plain = ask.raw or template_of(served.model.tokenizer) is None
    jobs_of = _plain_jobs if plain else chat_jobs
    return await respond(request, chat, served, jobs_of, OllamaTextReply)


def _plain_jobs(chat: ChatRequest, served: ServedModel) -> list[GenerationJob]:
    text = str(chat.messages[-1].content)
    options: dict[str, Any] = chat.settings()
    options["max_new_tokens"] = chat.limit or MAX_REPLY_TOKENS
    return [served.writer.job(text, seed=chat.seed, **options)]


@router.get("/api/tags", tags=["Ollama"])
async def ollama_tags(request: Request) -> dict[str, list[dict[str, Any]]]:
    """The models that generate text."""
    began = datetime.fromtimestamp(request.app.state.metrics.start, UTC)
    models = [
        {
            "name": one.name,
            "model": one.name,
            "modified_at": began,
            "size": sum(part.nbytes for part in one.model.network.parameters()),
        }
        for one in request.app.state.registry
        if one.engine is not None
    ]
    return {"models": models}
