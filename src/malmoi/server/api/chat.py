"""POST /v1/chat/completions."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from malmoi.errors import UsageError, require_that
from malmoi.inference.engine import GenerationJob, TextChunk, join_chunks
from malmoi.inference.prompt import Conversation, encode_conversation
from malmoi.messages import msg
from malmoi.server.api.completions import STREAM_RESPONSES, GenerationReply, respond
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
from malmoi.server.error_replies import ApiError, refuse_unless
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
    require_that(
        ask.limit != 0, "max_tokens must be 1 or more: an answer needs at least one token."
    )
    return await respond(request, ask, served, chat_jobs, ChatReply)


def chat_jobs(ask: ChatRequest, served: ServedModel) -> list[GenerationJob]:
    engine = served.writer
    limit = {"max_new_tokens": ask.limit} if ask.limit else {}
    given = ask.settings() | call_grammar(ask, served) | limit
    prompt = conversation_of(ask, served)
    options = prompt.settings(given)
    named = max(ask.top_logprobs or 0, 1) if ask.logprobs else 0
    return [engine.job(prompt.tokens, logprobs=named, seed=seed, **options) for seed in ask.seeds]


def call_grammar(ask: ChatRequest, served: ServedModel) -> dict[str, Any]:
    """The setting that lets the answer call tools; refuses what this model cannot do."""
    form = _checked_format(ask, served)
    if form is None or not ask.callable_tools:
        return {}
    clash = next(iter(ask.constraints()), None)
    require_that(
        clash is None,
        "{constraints} cannot be combined: choose one.",
        constraints=f"tools and {clash}",
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
    field = "tools" if tools else "messages"
    refuse_unless(
        form or not (tools or any(message.uses_tools for message in ask.messages)),
        400,
        "{field}: the model {name!r} has no chat template with tools, so it cannot call them; "
        "for JSON of a schema use response_format.",
        param=field,
        code="tools_not_offered",
        field=field,
        name=served.name,
    )
    refuse_unless(
        tools or not ask.must_call,
        400,
        "tool_choice asks for a function that tools does not have.",
        param="tool_choice",
        code="invalid_value",
    )
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
    """Bodies of /v1/chat/completions, in which calls of tools are apart from the text."""

    prefix = "chatcmpl"

    def __init__(
        self, ask: ChatRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        super().__init__(ask, served, jobs)
        form = call_format(served.model.tokenizer) if ask.callable_tools else None
        self.readers = [None if form is None else CallReader(form) for _ in jobs]

    def opening(self) -> list[ChatChunk]:
        role = Delta(role="assistant", content="")
        return [self.body([ChunkChoice(index=i, delta=role)]) for i in range(self.ask.n)]

    def events(self, chunks: Sequence[IndexedChunk]) -> list[ChatChunk | bytes]:
        found: list[ChatChunk | bytes] = []
        for index, chunk in chunks:
            self.written += len(chunk.tokens)
            plain = self.begun[index] and self.readers[index] is None
            if plain and chunk.text and self.is_text(chunk):
                found.append(self.text_event(index, chunk.text, partial(_plain, index)))
            else:
                found += [self.body([choice]) for choice in self._choices(index, chunk)]
        return found

    def whole(self, written: Sequence[Sequence[TextChunk]]) -> ChatResponse:
        answers = [join_chunks(chunks) for chunks in written]
        self.written = sum(len(done.tokens) for done in answers)
        choices = [
            ChatChoice(
                index=index,
                message=self._message(index, done),
                logprobs=self._logprobs(done.logprobs),
                finish_reason=self._finish(index, done),
            )
            for index, done in enumerate(answers)
        ]
        return ChatResponse(**self.head, choices=choices, usage=self.usage())

    def body(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(**self.head, choices=choices, usage=usage)

    def _parts(self, index: int, chunk: TextChunk) -> Iterator[str | ToolCallPart]:
        """Text and parts of calls."""
        if (reader := self.readers[index]) is None:
            yield chunk.text
        else:
            yield from reader.read(chunk.text, last=chunk.finish is not None)

    def _finish(self, index: int, chunk: TextChunk) -> Any:
        reader = self.readers[index]
        return "tool_calls" if reader and reader.count and chunk.finish == "stop" else chunk.finish

    def _message(self, index: int, done: TextChunk) -> AssistantMessage:
        text = ""
        calls: dict[int, ToolCall] = {}
        for part in self._parts(index, done):
            if isinstance(part, str):
                text += part
                continue
            call = calls.setdefault(part.index, ToolCall(id=part.id, function=CalledFunction()))
            call.function.name = call.function.name or part.function.name
            call.function.arguments += part.function.arguments
        content = text.lstrip() or (None if calls else "")
        return AssistantMessage(content=content, tool_calls=list(calls.values()) or None)

    def _choices(self, index: int, chunk: TextChunk) -> list[ChunkChoice]:
        """What a chunk adds; nothing for leading white space alone."""
        deltas = []
        for part in self._parts(index, chunk):
            if isinstance(part, ToolCallPart):
                deltas.append(Delta(tool_calls=[part]))
            elif text := self.trimmed(index, part):
                deltas.append(Delta(content=text))
        logprobs = self._logprobs(chunk.logprobs) if chunk.tokens else None
        finish = self._finish(index, chunk)
        if not deltas and (logprobs or finish):
            deltas = [Delta()]
        choices = [ChunkChoice(index=index, delta=delta) for delta in deltas]
        if choices:
            choices[-1].logprobs = logprobs
            choices[-1].finish_reason = finish
        return choices

    def _logprobs(self, given: Sequence[Any]) -> ChatLogprobs | None:
        top = self.ask.top_logprobs or 0
        return chat_logprobs(self.served.model.tokenizer, given, top) if self.ask.logprobs else None


def _plain(index: int, text: str) -> ChunkChoice:
    return ChunkChoice(index=index, delta=Delta(content=text))
