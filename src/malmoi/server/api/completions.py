"""POST /v1/completions, and the code shared with chat; streams of server-sent events."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from time import time
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from malmoi.errors import require_that
from malmoi.inference.engine import GenerationJob, TextChunk, join_chunks
from malmoi.server.api.requests import CompletionRequest, GenerationFields
from malmoi.server.api.responses import CompletionChoice, CompletionResponse, LogprobRecorder, Usage
from malmoi.server.error_replies import ClientGone, api_error, log
from malmoi.server.executor import GenerationStream, IndexedChunk, served_model, unless_disconnected
from malmoi.server.middleware import replay
from malmoi.server.model_registry import ServedModel

DONE_EVENT = b"data: [DONE]\n\n"
EVENT_SCHEMA = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole response, or with `stream` its parts as events, each JSON.",
        "content": {"text/event-stream": {"schema": EVENT_SCHEMA}},
    }
}
MARK = "\ufdd0"  # a noncharacter, which JSON does not escape and no field contains
Events = AsyncIterator[Sequence[BaseModel | bytes]]  # bytes: an event as it is sent
router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses=STREAM_RESPONSES,
    tags=["OpenAI"],
)
async def completions(ask: CompletionRequest, request: Request) -> Any:
    """Generates continuations of one or more prompts; with `stream`, as server-sent events.

    A text ends at the end of the model's context at the latest.
    """
    served = served_model(request, ask)
    require_that(
        ask.limit != 0 or ask.echo,
        "max_tokens is 0 and echo is false, so there is nothing to return.",
    )
    return await respond(request, ask, served, _jobs, CompletionReply)


def check_length(requested: int, request: Request) -> None:
    """Refuses more tokens than the server generates for one request."""
    require_that(
        requested <= (limit := request.app.state.settings.max_tokens),
        "max_tokens is {requested}, and this server's limit per request is {limit}.",
        requested=requested,
        limit=limit,
    )


def _jobs(ask: CompletionRequest, served: ServedModel) -> list[GenerationJob]:
    """One job for each continuation of each prompt."""
    engine = served.writer
    named = 0 if ask.logprobs is None else max(ask.logprobs, 1)
    limit = 16 if ask.limit is None else max(ask.limit, 1)
    options: dict[str, Any] = ask.settings() | {"max_new_tokens": limit}
    prompts: Sequence[Any] = prompts_of(ask.prompt)
    if ask.n > 1:  # encoded once
        prompts = [engine.job(prompt, **options).prompt for prompt in prompts]
    return [
        engine.job(prompt, logprobs=named, echo=ask.echo, seed=seed, **options)
        for prompt in prompts
        for seed in ask.seeds
    ]


def prompts_of(given: Any) -> list[str] | list[list[int]]:
    """The prompts as a list of texts or of token lists, from any of the accepted forms."""
    alone = isinstance(given, str) or isinstance(given[0], int)
    return [given] if alone else list(given)


class GenerationReply(ABC):
    """Turns the chunks of the jobs into OpenAI's response bodies."""

    prefix: str  # of the response's id

    def __init__(self, ask: Any, served: ServedModel, jobs: Sequence[GenerationJob]) -> None:
        self.ask = ask
        self.served = served
        self.jobs = jobs
        self.head: dict[str, Any] = dict(
            id=f"{self.prefix}-{uuid4().hex}", created=int(time()), model=served.name
        )
        self.written = 0
        self.begun = [False] * len(jobs)
        # of an event with text alone; serialising it for every token takes most of a server's time
        self.around_text: dict[int, list[bytes]] = {}

    def opening(self) -> list[Any]:
        """Events to send before the first chunk."""
        return []

    @abstractmethod
    def events(self, chunks: Sequence[IndexedChunk]) -> list[Any]:
        """These chunks as events."""

    @abstractmethod
    def whole(self, written: Sequence[Sequence[TextChunk]]) -> Any:
        """The response of a request that is not streamed, from all chunks of each job."""

    @abstractmethod
    def body(self, choices: list[Any], usage: Usage | None = None) -> Any:
        """One response object with these choices."""

    def text_event(self, index: int, text: str, choice: Callable[[str], Any]) -> bytes:
        """An event with this text and nothing else; `choice` builds its choice from a text."""
        if index not in self.around_text:
            self.around_text[index] = _event(self.body([choice(MARK)])).split(_json(MARK))
        return _json(text).join(self.around_text[index])

    def trimmed(self, index: int, text: str) -> str:
        """The text without white space at the beginning of an answer."""
        text = text if self.begun[index] else text.lstrip()
        self.begun[index] = self.begun[index] or bool(text)
        return text

    def is_text(self, chunk: TextChunk) -> bool:
        """Whether the event of a chunk has nothing but its text."""
        options = self.ask.stream_options
        counted = options is not None and options.continuous_usage_stats
        return not (chunk.finish or chunk.logprobs or counted)

    async def stream(self, generation: GenerationStream) -> Events:
        """Events as the text is generated, then the usage on request."""
        options = self.ask.stream_options
        yield self.opening()
        async for chunks in generation.batches():
            events = self.events(chunks)
            if options and options.continuous_usage_stats:
                for event in events:
                    event.usage = self.usage()
            yield events
        if options and options.include_usage:
            yield [self.body([], self.usage())]

    def usage(self) -> Usage:
        read = sum(len(job.prompt) for job in self.jobs[:: self.ask.n])
        total = read + self.written
        return Usage(prompt_tokens=read, completion_tokens=self.written, total_tokens=total)


Fields = TypeVar("Fields", bound=GenerationFields)


async def respond(
    request: Request,
    ask: Fields,
    served: ServedModel,
    jobs_of: Callable[[Fields, ServedModel], list[GenerationJob]],
    reply_type: Callable[[Fields, ServedModel, list[GenerationJob]], GenerationReply],
) -> Any:
    """The response: a stream of events, or one body at the end unless the client disconnects."""
    forward: ASGIApp | None = request.app.state.forward
    if forward is not None and (served.engine is None or ask.constrained):
        return Forwarded(forward, await request.body())
    check_length(ask.limit or 0, request)
    require_that(ask.stream_options is None or ask.stream, "stream_options needs stream: true.")
    jobs = await asyncio.to_thread(jobs_of, ask, served)
    reply = reply_type(ask, served, jobs)
    generation = GenerationStream(request, served, jobs)
    if ask.stream:
        return EventStream(generation, reply.stream(generation))
    with generation:
        return reply.whole(await unless_disconnected(request.receive, generation.chunks()))


class CompletionReply(GenerationReply):
    """Bodies of /v1/completions."""

    prefix = "cmpl"

    def __init__(
        self, ask: CompletionRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        super().__init__(ask, served, jobs)
        self.records = [
            LogprobRecorder(served.model.tokenizer, job, ask.logprobs or 0) for job in jobs
        ]
        self.echoed = [not ask.echo] * len(jobs)

    def events(self, chunks: Sequence[IndexedChunk]) -> list[CompletionResponse | bytes]:
        found: list[CompletionResponse | bytes] = []
        for index, chunk in chunks:
            shown = self._shown(index, chunk)
            if shown.text and self.is_text(shown):
                found.append(self.text_event(index, shown.text, partial(_plain, index)))
            elif shown.text or shown.finish or (shown.tokens and self.ask.logprobs is not None):
                found.append(self.body([self._choice(index, [shown])]))
        return found

    def whole(self, written: Sequence[Sequence[TextChunk]]) -> CompletionResponse:
        choices = [
            self._choice(index, [self._shown(index, chunk) for chunk in chunks])
            for index, chunks in enumerate(written)
        ]
        return self.body(choices, self.usage())

    def body(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> CompletionResponse:
        return CompletionResponse(**self.head, choices=choices, usage=usage)

    def _shown(self, index: int, chunk: TextChunk) -> TextChunk:
        """Counts new tokens; with max_tokens=0 one token is generated but not returned."""
        new = self.echoed[index]
        self.echoed[index] = True
        if new and self.ask.limit == 0:
            return TextChunk("", finish=chunk.finish and "length")
        self.written += len(chunk.tokens) if new else 0
        return chunk

    def _choice(self, index: int, chunks: Sequence[TextChunk]) -> CompletionChoice:
        done = join_chunks(chunks)
        named = self.records[index].add(chunks) if self.ask.logprobs is not None else None
        finish = done.finish if chunks[-1].finish else None
        return CompletionChoice(index=index, text=done.text, logprobs=named, finish_reason=finish)  # type: ignore[arg-type]


def _plain(index: int, text: str) -> CompletionChoice:
    return CompletionChoice(index=index, text=text)


# ------------------------------------------------------------------ streams


class EventStream(Response):
    """Sends the events of a generation; a client that disconnects cancels it."""

    media_type = "text/event-stream"
    sent_headers: ClassVar = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

    def __init__(self, generation: GenerationStream, events: Events) -> None:
        super().__init__(headers=self.sent_headers)
        del self.headers["content-length"]
        self.generation = generation
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.generation:
            try:
                settings = self.generation.settings
                async with asyncio.timeout(settings.timeout + settings.stall_timeout):
                    await unless_disconnected(receive, self._send_all(send))
            except (TimeoutError, ClientGone):
                return  # a client that does not read cannot be sent an error

    async def _send_all(self, send: Send) -> None:
        await self.generation.begun()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for some in self.events:
                await _send(send, b"".join(map(_event, some)))
        except Exception as error:
            log(error)
            await _send(send, b"data: " + _json(api_error(error).body()) + b"\n\n")
        await send({"type": "http.response.body", "body": DONE_EVENT})


class Forwarded(Response):
    """The answer of another app."""

    def __init__(self, app: ASGIApp, body: bytes) -> None:
        super().__init__()
        self.app = app
        self.asked = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, replay(self.asked, receive), send)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _event(body: BaseModel | bytes) -> bytes:
    """A body as an event, named by its type if it has one."""
    if isinstance(body, bytes):
        return body
    kind = getattr(body, "type", "")
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {body.model_dump_json()}\n\n".encode()


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
