"""POST /v1/chat/completions."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from malmoi.errors import UsageError
from malmoi.inference.engine import GenerationJob, TextChunk, join_chunks
from malmoi.inference.prompt import Conversation, encode_conversation
from malmoi.messages import msg
from malmoi.server.api.completions import GenerationReply, check_length, respond
from malmoi.server.api.events import STREAM_RESPONSES
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
    chat_logprobs,
)
from malmoi.server.api.tools import (
    CalledFunction,
    CallFormat,
    CallReader,
    ToolCall,
    ToolCallPart,
    call_format,
)
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import IndexedChunk, require_characters, served_model
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
    jobs = await asyncio.to_thread(chat_jobs, ask, served)
    reply = ToolReply if ask.callable_tools else ChatReply
    return await respond(request, reply(ask, served, jobs))


def chat_jobs(ask: ChatRequest, served: ServedModel) -> list[GenerationJob]:
    engine = served.writer
    limit = {"max_new_tokens": ask.limit} if ask.limit else {}
    given = ask.settings() | call_grammar(ask, served) | limit
    prompt = conversation_of(ask, served)
    options = prompt.settings(given)
    named = max(ask.top_logprobs or 0, 1) if ask.logprobs else 0
    return [
        engine.job(prompt.tokens, logprobs=named, seed=seed, **options) for seed in ask.seeds(ask.n)
    ]


def call_grammar(ask: ChatRequest, served: ServedModel) -> dict[str, Any]:
    """The setting that lets the answer call tools; refuses what this model cannot do."""
    form = _checked_format(ask, served)
    if form is None or not ask.callable_tools:
        return {}
    if clash := next(iter(ask.constraints()), None):
        raise UsageError(
            "{constraints} cannot be combined: choose one.", constraints=f"tools and {clash}"
        )
    try:
        grammar = form.grammar(
            ask.callable_tools, forced=ask.must_call, several=ask.parallel_tool_calls
        )
        served.model._generation_config(grammar=grammar)  # compiled, and kept for the jobs
    except UsageError as error:
        sentence = msg("tools: {error}", error=error)
        raise ApiError(400, sentence, param="tools", code="invalid_value") from None
    return {"grammar": grammar}


def _checked_format(ask: ChatRequest, served: ServedModel) -> CallFormat | None:
    """How this model writes calls; refuses tools that it cannot be given."""
    tools = ask.callable_tools
    form = call_format(served.model.tokenizer)
    if form is None and (tools or any(message.uses_tools for message in ask.messages)):
        field = "tools" if tools else "messages"
        raise ApiError(
            400,
            "{field}: the model {name!r} has no chat template with tools, so it cannot call them; "
            "for JSON of a schema use response_format.",
            param=field,
            code="tools_not_offered",
            field=field,
            name=served.name,
        )
    if ask.must_call and not tools:
        sentence = "tool_choice asks for a function that tools does not have."
        raise ApiError(400, sentence, param="tool_choice", code="invalid_value")
    return form


def conversation_of(ask: ChatRequest, served: ServedModel) -> Conversation:
    """The messages and tools as the model's chat template writes them."""
    values: dict[str, Any] = {}
    if ask.callable_tools:
        values["tools"] = [tool.model_dump(exclude_none=True) for tool in ask.tools]
        require_characters(served, "tools", len(json.dumps(values)))
    if ask.reasoning_effort is not None:
        values["reasoning_effort"] = ask.reasoning_effort
    messages = [message.plain() for message in ask.messages]
    return encode_conversation(served.model.tokenizer, messages, **values)


class ChatReply(GenerationReply):
    """Bodies of /v1/chat/completions."""

    prefix = "chatcmpl"

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
                message=self.message(index, done),
                logprobs=self._logprobs(done.logprobs),
                finish_reason=self.finish(index, done),
            )
            for index, done in enumerate(answers)
        ]
        return ChatResponse(**self.head, choices=choices, usage=self.usage())

    def message(self, index: int, done: TextChunk) -> AssistantMessage:
        return AssistantMessage(content=done.text.lstrip())

    def finish(self, index: int, chunk: TextChunk) -> Any:
        return chunk.finish

    def body(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(**self.head, choices=choices, usage=usage)

    def _is_shown(self, index: int, chunk: TextChunk) -> bool:
        """Whether a chunk has anything to send: leading white space alone has not."""
        self.written += len(chunk.tokens)
        blank = not (chunk.text if self.begun[index] else chunk.text.strip())
        return not blank or chunk.finish is not None or (self.ask.logprobs and bool(chunk.tokens))

    def _part(self, index: int, chunk: TextChunk) -> ChunkChoice:
        text = self.trimmed(index, chunk.text)
        logprobs = self._logprobs(chunk.logprobs) if chunk.tokens else None
        delta = Delta(content=text) if text else Delta()
        return ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=chunk.finish)  # type: ignore[arg-type]

    def _logprobs(self, given: Sequence[Any]) -> ChatLogprobs | None:
        top = self.ask.top_logprobs or 0
        return chat_logprobs(self.served.model.tokenizer, given, top) if self.ask.logprobs else None


class ToolReply(ChatReply):
    """Answers that may call tools."""

    def __init__(
        self, ask: ChatRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        super().__init__(ask, served, jobs)
        form = call_format(served.model.tokenizer)
        assert form is not None  # `call_grammar` refuses the others
        self.readers = [CallReader(form) for _ in jobs]

    def events(self, chunks: Sequence[IndexedChunk]) -> list[ChatChunk | bytes]:
        choices = (choice for index, chunk in chunks for choice in self._choices(index, chunk))
        return [self.body([choice]) for choice in choices]

    def message(self, index: int, done: TextChunk) -> AssistantMessage:
        text = ""
        calls: dict[int, ToolCall] = {}
        for part in self.readers[index].read(done.text, last=True):
            if isinstance(part, str):
                text += part
                continue
            call = calls.setdefault(part.index, ToolCall(id=part.id, function=CalledFunction()))
            call.function.name = call.function.name or part.function.name
            call.function.arguments += part.function.arguments
        content = text.lstrip() or (None if calls else "")
        return AssistantMessage(content=content, tool_calls=list(calls.values()) or None)

    def finish(self, index: int, chunk: TextChunk) -> Any:
        return (
            "tool_calls" if chunk.finish == "stop" and self.readers[index].count else chunk.finish
        )

    def _choices(self, index: int, chunk: TextChunk) -> Iterator[ChunkChoice]:
        self.written += len(chunk.tokens)
        for part in self.readers[index].read(chunk.text, last=chunk.finish is not None):
            if isinstance(part, ToolCallPart):
                yield ChunkChoice(index=index, delta=Delta(tool_calls=[part]))
            elif text := self.trimmed(index, part):
                yield ChunkChoice(index=index, delta=Delta(content=text))
        logprobs = self._logprobs(chunk.logprobs) if chunk.tokens else None
        finish = self.finish(index, chunk)
        if logprobs or finish:
            yield ChunkChoice(index=index, delta=Delta(), logprobs=logprobs, finish_reason=finish)


def _plain(index: int, text: str) -> ChunkChoice:
    return ChunkChoice(index=index, delta=Delta(content=text))
