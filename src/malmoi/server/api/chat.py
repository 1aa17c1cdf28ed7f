"""POST /v1/chat/completions and /v1/responses."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from malmoi.errors import UsageError, require_that
from malmoi.inference.engine import GenerationJob, TextChunk, join_chunks
from malmoi.inference.prompt import Conversation, encode_conversation
from malmoi.messages import msg
from malmoi.server.api.completions import STREAM_RESPONSES, Events, GenerationReply, respond
from malmoi.server.api.requests import (
    ApiRequest,
    ChatRequest,
    Message,
    ResponseFormat,
    example,
    field,
)
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
from malmoi.server.executor import GenerationStream, IndexedChunk, require_characters, served_model
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
    return encode_conversation(
        served.model.tokenizer, [message.plain() for message in ask.messages], **values
    )


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


# ------------------------------------------------------------------ OpenAI's responses


class TextFormat(ResponseFormat, extra="ignore"):  # name, description, strict
    """What the text must be, as `response_format` of the chat endpoint."""


class TextSettings(BaseModel):
    """Settings of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(
    ApiRequest, json_schema_extra=example(input="Hello!", max_output_tokens=16, temperature=0)
):
    """A text or a conversation to answer."""

    input: str | Annotated[list[Message], Field(min_length=1, max_length=1000)]
    instructions: str | None = field(None, "A system message before the input.")
    max_output_tokens: int | None = field(None, "Maximum new tokens.", ge=1)
    temperature: float = field(1.0, "0 is greedy decoding.", ge=0, le=100)
    top_p: float | None = field(None, "Nucleus sampling.", gt=0, le=1)
    stream: bool = field(False, "Server-sent events.")
    text: TextSettings | None = None

    def as_chat(self) -> ChatRequest:
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += self.input
        form = self.text.format if self.text else None
        given = self.model_dump(include={"model", "temperature", "top_p", "stream"})
        given |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        return ChatRequest.model_validate(given | {"response_format": form})


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []


class OutputMessage(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ResponseUsage(BaseModel):
    """Tokens read and generated."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseBody(BaseModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[OutputMessage]
    incomplete_details: dict[str, str] | None = None
    error: None = None
    parallel_tool_calls: bool = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel, extra="allow"):
    """An event of a stream; its other fields follow from its type."""

    type: str
    sequence_number: int


@router.post(
    "/v1/responses", response_model=ResponseBody, responses=STREAM_RESPONSES, tags=["OpenAI"]
)
async def responses_endpoint(ask: ResponseRequest, request: Request) -> Any:
    """Answers a text or a conversation, as the chat endpoint does; nothing is stored."""
    served = served_model(request, ask)
    return await respond(request, ask.as_chat(), served, chat_jobs, ResponseReply)


class ResponseReply(GenerationReply):
    """Bodies of /v1/responses."""

    prefix = "resp"

    def __init__(
        self, ask: ChatRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        super().__init__(ask, served, jobs)
        self.item = self.head["id"].replace("resp", "msg", 1)
        self.chunks: list[TextChunk] = []
        self.text = ""
        self.sent = 0

    def whole(self, written: Sequence[Sequence[TextChunk]]) -> ResponseBody:
        self.chunks = list(written[0])
        self.text = join_chunks(self.chunks).text.lstrip()
        return self._end()

    def body(self, choices: list[Any], usage: Usage | None = None) -> ResponseBody:
        head = {"id": self.head["id"], "created_at": self.head["created"]}
        return ResponseBody(**head, model=self.head["model"], status="in_progress", output=choices)

    async def stream(self, generation: GenerationStream) -> Events:
        part = {"item_id": self.item, "output_index": 0, "content_index": 0}
        yield [
            self._event("created", response=self.body([])),
            self._event("in_progress", response=self.body([])),
            self._event("output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._event("content_part.added", part=OutputText(text=""), **part),
        ]
        async for chunks in generation.batches():
            yield self.events(chunks)
        done = self._end()
        yield [
            self._event("output_text.done", text=self.text, logprobs=[], **part),
            self._event("content_part.done", part=OutputText(text=self.text), **part),
            self._event("output_item.done", output_index=0, item=done.output[0]),
            self._event(done.status, response=done),
        ]

    def events(self, chunks: Sequence[IndexedChunk]) -> list[ResponseEvent]:
        part = {"item_id": self.item, "output_index": 0, "content_index": 0, "logprobs": []}
        found = []
        for _, chunk in chunks:
            self.chunks.append(chunk)
            if text := self.trimmed(0, chunk.text):
                self.text += text
                found.append(self._event("output_text.delta", delta=text, **part))
        return found

    def _end(self) -> ResponseBody:
        done = join_chunks(self.chunks)
        self.written = len(done.tokens)
        usage = self.usage()
        cut = done.finish == "length"
        status: Literal["completed", "incomplete"] = "incomplete" if cut else "completed"
        return self.body([self._message(status, [OutputText(text=self.text)])]).model_copy(
            update={
                "status": status,
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    output_tokens=usage.completion_tokens,
                    total_tokens=usage.total_tokens,
                ),
            }
        )

    def _message(
        self, status: Literal["in_progress", "completed", "incomplete"], content: list[OutputText]
    ) -> OutputMessage:
        return OutputMessage(id=self.item, status=status, content=content)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self.sent += 1
        return ResponseEvent(type=f"response.{kind}", sequence_number=self.sent - 1, **fields)
