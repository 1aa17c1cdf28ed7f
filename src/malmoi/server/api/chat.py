"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from malmoi.errors import UsageError
from malmoi.inference.engine import Engine, GenerationJob, TextChunk, join_chunks
from malmoi.inference.prompt import encode_conversation
from malmoi.server.api.completions import GenerationReply, check_length, respond
from malmoi.server.api.events import STREAM_RESPONSES
from malmoi.server.api.limits import served_model
from malmoi.server.api.logprobs import chat_logprobs
from malmoi.server.api.requests import ChatRequest
from malmoi.server.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatResponse,
    ChunkChoice,
    Delta,
    Usage,
)
from malmoi.server.executor import IndexedChunk
from malmoi.server.model_registry import ServedModel

router = APIRouter()


@router.post(
    "/v1/chat/completions", response_model=ChatResponse, responses=STREAM_RESPONSES, tags=["OpenAI"]
)
async def chat_completions(ask: ChatRequest, request: Request) -> Any:
    """Answers in a conversation, using the model's own chat template.

    A model without one continues a plain dialogue: the system message, a blank line, then `User:
    …` and `Assistant: …` lines, up to where the next turn would begin. Leading white space is
    stripped from an answer, which has 256 tokens at most unless another number is given.
    """
    served = served_model(request, ask)
    check_length(ask, request)
    if ask.limit == 0:
        raise UsageError("max_tokens must be 1 or more: an answer needs at least one token.")
    jobs = await asyncio.to_thread(chat_jobs, ask, served.writer)
    return await respond(request, ChatReply(ask, served, jobs))


def chat_jobs(ask: ChatRequest, engine: Engine) -> list[GenerationJob]:
    messages = [message.plain() for message in ask.messages]
    prompt = encode_conversation(engine.model.tokenizer, messages)
    limit = {"max_new_tokens": ask.limit} if ask.limit else {}
    options = prompt.settings(ask.settings() | limit)
    named = max(ask.top_logprobs or 0, 1) if ask.logprobs else 0
    return [
        engine.job(prompt.tokens, logprobs=named, seed=seed, **options) for seed in ask.seeds(ask.n)
    ]


class ChatReply(GenerationReply):
    """Bodies of /v1/chat/completions."""

    prefix = "chatcmpl"

    def __init__(
        self, ask: ChatRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        super().__init__(ask, served, jobs)
        self.begun = [False] * len(jobs)

    def opening(self) -> list[ChatChunk]:
        role = Delta(role="assistant", content="")
        return [self.body([ChunkChoice(index=i, delta=role)]) for i in range(self.ask.n)]

    def events(self, chunks: Sequence[IndexedChunk]) -> list[ChatChunk | bytes]:
        return [
            self.text_event(index, chunk.text, partial(_plain, index))
            if self.begun[index] and self.is_text(chunk)
            else self.body([self._part(index, chunk)])
            for index, chunk in chunks
            if self._is_shown(index, chunk)
        ]

    def whole(self, written: Sequence[Sequence[TextChunk]]) -> ChatResponse:
        answers = [join_chunks(chunks) for chunks in written]
        self.written = sum(len(done.tokens) for done in answers)
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=done.text.lstrip()),
                logprobs=self._logprobs(done.logprobs),
                finish_reason=done.finish,  # type: ignore[arg-type]
            )
            for index, done in enumerate(answers)
        ]
        return ChatResponse(**self.head, choices=choices, usage=self.usage())

    def body(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(**self.head, choices=choices, usage=usage)

    def _is_shown(self, index: int, chunk: TextChunk) -> bool:
        """Whether a chunk has anything to send: leading white space alone has not."""
        self.written += len(chunk.tokens)
        blank = not (chunk.text if self.begun[index] else chunk.text.strip())
        return not blank or chunk.finish is not None or (self.ask.logprobs and bool(chunk.tokens))

    def _part(self, index: int, chunk: TextChunk) -> ChunkChoice:
        text = chunk.text if self.begun[index] else chunk.text.lstrip()
        self.begun[index] = self.begun[index] or bool(text)
        logprobs = self._logprobs(chunk.logprobs) if chunk.tokens else None
        delta = Delta(content=text) if text else Delta()
        return ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=chunk.finish)  # type: ignore[arg-type]

    def _logprobs(self, given: Sequence[Any]) -> ChatLogprobs | None:
        top = self.ask.top_logprobs or 0
        return chat_logprobs(self.served.model.tokenizer, given, top) if self.ask.logprobs else None


def _plain(index: int, text: str) -> ChunkChoice:
    return ChunkChoice(index=index, delta=Delta(content=text))
