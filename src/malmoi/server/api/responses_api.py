"""POST /v1/responses: OpenAI's newer endpoint, for text alone and without stored conversations."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from malmoi.inference.engine import GenerationJob, TextChunk, join_chunks
from malmoi.server.api.chat import chat_jobs
from malmoi.server.api.completions import GenerationReply, check_length, respond
from malmoi.server.api.events import STREAM_RESPONSES, Events
from malmoi.server.api.requests import (
    ApiRequest,
    ChatRequest,
    Message,
    ResponseFormat,
    example,
)
from malmoi.server.api.responses import Usage
from malmoi.server.executor import GenerationStream, IndexedChunk, served_model
from malmoi.server.model_registry import ServedModel

router = APIRouter()


class TextFormat(ResponseFormat):
    """What the text must be, as `response_format` of the chat endpoint."""

    model_config = ConfigDict(extra="ignore")  # name, description, strict


class TextSettings(BaseModel):
    """Settings of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(
    ApiRequest, json_schema_extra=example(input="Hello!", max_output_tokens=16, temperature=0)
):
    """A text or a conversation to answer."""

    input: str | Annotated[list[Message], Field(min_length=1, max_length=1000)]
    instructions: str | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: int | None = Field(default=None, ge=1, description="Maximum new tokens.")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0 is greedy decoding.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling.")
    stream: bool = Field(default=False, description="Server-sent events.")
    text: TextSettings | None = None

    def as_chat(self) -> ChatRequest:
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += self.input
        form = self.text.format if self.text else None
        given: dict[str, Any] = {"model": self.model}
        given |= {"temperature": self.temperature, "top_p": self.top_p}
        given |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        return ChatRequest.model_validate(given | {"stream": self.stream, "response_format": form})


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


class ResponseEvent(BaseModel):
    """An event of a stream; its other fields follow from its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


@router.post(
    "/v1/responses", response_model=ResponseBody, responses=STREAM_RESPONSES, tags=["OpenAI"]
)
async def responses_endpoint(ask: ResponseRequest, request: Request) -> Any:
    """Answers a text or a conversation, as the chat endpoint does; nothing is stored."""
    chat = ask.as_chat()
    served = served_model(request, ask)
    check_length(chat, request)
    jobs = await asyncio.to_thread(chat_jobs, chat, served)
    return await respond(request, ResponseReply(chat, served, jobs))


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
        begun = self._message("in_progress", [])
        yield [
            self._event("created", response=self.body([])),
            self._event("in_progress", response=self.body([])),
            self._event("output_item.added", output_index=0, item=begun),
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
