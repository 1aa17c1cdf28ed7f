"""POST /v1/chat/completions: an answer in a conversation."""

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request

from malmoi.errors import UsageError
from malmoi.inference.conversation import encode_conversation
from malmoi.inference.engine import Engine, GenerationJob
from malmoi.inference.stream import CompletedText, TextChunk
from malmoi.server.api.completions import check_length, respond
from malmoi.server.api.events import STREAM_RESPONSES, Events
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
from malmoi.server.background import client_of, run_in_thread
from malmoi.server.generation import GenerationStream
from malmoi.server.registry import ServedModel

router = APIRouter()


@router.post(
    "/v1/chat/completions", response_model=ChatResponse, responses=STREAM_RESPONSES, tags=["OpenAI"]
)
async def chat_completions(ask: ChatRequest, request: Request) -> Any:
    """Answers in a conversation, by the model's own chat template.

    A model without one continues a plain dialogue: what the system says, a blank line, then `User:
    …`, `Assistant: …` line by line, up to where the next turn would begin. An answer begins with
    its first character that is not a space, and has 256 tokens at most unless another number is
    given.
    """
    state = request.app.state
    served: ServedModel = state.registry.get(ask.model)
    check_length(ask, ask.max_completion_tokens or ask.max_tokens or 0, state.settings.max_tokens)
    if ask.max_tokens == 0:
        raise UsageError("max_tokens must be 1 or more: an answer of 0 tokens is none.")
    jobs = await run_in_thread(lambda: _jobs(ask, served.writer))
    order = GenerationStream(
        served.writer, jobs, state.settings.timeout, state.metrics, client_of(request)
    )
    return await respond(request, ask, order, _Reply(ask, served, jobs), order.whole)


def _jobs(ask: ChatRequest, engine: Engine) -> list[GenerationJob]:
    said = encode_conversation(
        engine.model.tokenizer, [message.plain() for message in ask.messages]
    )
    most = ask.max_completion_tokens or ask.max_tokens
    options = said.settings(ask.settings() | ({"max_new_tokens": most} if most else {}))
    named = max(ask.top_logprobs or 0, 1) if ask.logprobs else 0
    return [
        engine.job(said.tokens, logprobs=named, seed=seed, **options) for seed in ask.seeds(ask.n)
    ]


class _Reply:
    """What comes of the jobs, as OpenAI tells it."""

    def __init__(
        self, ask: ChatRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        self.ask = ask
        self.served = served
        self.letter = dict(id=f"chatcmpl-{uuid4().hex}", created=int(time()), model=served.name)
        self.read = len(jobs[0].prompt)
        self.written = 0
        self.begun = [False] * len(jobs)

    async def events(self, order: GenerationStream) -> Events:
        """Who speaks, then what is said as it comes, and the usage at the end where it was asked
        for.
        """
        opening = Delta(role="assistant", content="")
        yield [self._chunk([ChunkChoice(index=i, delta=opening)]) for i in range(self.ask.n)]
        async for some in order.batches():
            yield [
                self._chunk([self._part(index, piece)])
                for index, piece in some
                if self._speaks(index, piece)
            ]
        if self.ask.stream_options and self.ask.stream_options.include_usage:
            yield [self._chunk([], self._usage())]

    def whole(self, answers: Sequence[CompletedText]) -> ChatResponse:
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
        return ChatResponse(**self.letter, choices=choices, usage=self._usage())  # type: ignore[arg-type]

    def _speaks(self, index: int, piece: TextChunk) -> bool:
        """Whether a piece has anything to tell; the space before an answer has not."""
        self.written += len(piece.tokens)
        blank = not (piece.text if self.begun[index] else piece.text.strip())
        return not blank or piece.finish is not None or (self.ask.logprobs and bool(piece.tokens))

    def _part(self, index: int, piece: TextChunk) -> ChunkChoice:
        text = piece.text if self.begun[index] else piece.text.lstrip()
        self.begun[index] = self.begun[index] or bool(text)
        said = self._logprobs(piece.logprobs) if piece.tokens else None
        delta = Delta(content=text) if text else Delta()
        return ChunkChoice(index=index, delta=delta, logprobs=said, finish_reason=piece.finish)  # type: ignore[arg-type]

    def _logprobs(self, said: Sequence[Any]) -> ChatLogprobs | None:
        top = self.ask.top_logprobs or 0
        return chat_logprobs(self.served.model.tokenizer, said, top) if self.ask.logprobs else None

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(**self.letter, choices=choices, usage=usage)  # type: ignore[arg-type]

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.read,
            completion_tokens=self.written,
            total_tokens=self.read + self.written,
        )
