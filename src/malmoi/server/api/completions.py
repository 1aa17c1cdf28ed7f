"""POST /v1/completions: texts go on."""

from collections.abc import Awaitable, Callable, Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request

from malmoi.errors import UsageError
from malmoi.inference.engine import Engine, GenerationJob
from malmoi.inference.stream import TextChunk, join_chunks
from malmoi.server.api.events import STREAM_RESPONSES, Events, EventStream
from malmoi.server.api.logprobs import LogprobRecorder
from malmoi.server.api.requests import CompletionRequest, GenerationFields
from malmoi.server.api.responses import CompletionChoice, CompletionResponse, Usage
from malmoi.server.background import client_of, run_in_thread, unless_disconnected
from malmoi.server.generation import GenerationStream
from malmoi.server.registry import ServedModel

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses=STREAM_RESPONSES,
    tags=["OpenAI"],
)
async def completions(ask: CompletionRequest, request: Request) -> Any:
    """Continues a prompt, or each of several; as server-sent events where `stream` is true.

    A text ends with the model's context at the latest. `best_of` ranks by the mean log-probability
    of a token.
    """
    state = request.app.state
    served: ServedModel = state.registry.get(ask.model)
    _check(ask, state.settings.max_tokens)
    jobs = await run_in_thread(lambda: _jobs(ask, served.writer))
    order = GenerationStream(
        served.writer, jobs, state.settings.timeout, state.metrics, client_of(request)
    )
    return await respond(request, ask, order, _Reply(ask, served, jobs), order.pieces)


async def respond(
    request: Request,
    ask: GenerationFields,
    order: GenerationStream,
    reply: Any,
    written: Callable[[], Awaitable[Any]],
) -> Any:
    """The reply to an order: events while it is written, or all of it at its end, unless the
    client has gone.
    """
    if ask.stream:
        return EventStream(order, reply.events(order))
    with order:
        return reply.whole(await unless_disconnected(request.receive, written()))


def check_length(ask: GenerationFields, most: int, limit: int) -> None:
    """Refuses more tokens than the server writes for one request."""
    if most > limit:
        raise UsageError(
            f"max_tokens is {most}, and this server writes {limit} at most for one request."
        )
    if ask.stream_options is not None and not ask.stream:
        raise UsageError("stream_options goes with stream: true.")


def _check(ask: CompletionRequest, limit: int) -> None:
    check_length(ask, ask.max_tokens or 0, limit)
    if ask.max_tokens == 0 and not ask.echo:
        raise UsageError("max_tokens is 0 and echo is false, so there is nothing to say.")
    if ask.best_of is not None and (ask.best_of < ask.n or (ask.stream and ask.best_of > ask.n)):
        raise UsageError(
            "best_of must be n or more, and goes without stream: all must be written to be "
            "compared."
        )


def _jobs(ask: CompletionRequest, engine: Engine) -> list[GenerationJob]:
    """One for each continuation of each prompt."""
    compared = ask.best_of is not None and ask.best_of > ask.n
    named = 0 if ask.logprobs is None and not compared else max(ask.logprobs or 0, 1)
    most = 16 if ask.max_tokens is None else max(ask.max_tokens, 1)
    options: dict[str, Any] = ask.settings() | {"max_new_tokens": most}
    prompts = [
        engine.job(prompt, logprobs=named, echo=ask.echo, **options)
        for prompt in prompts_of(ask.prompt)
    ]
    return [
        engine.job(one.prompt, logprobs=named, echo=ask.echo, seed=seed, **options)
        for one in prompts
        for seed in ask.seeds(ask.best_of or ask.n)
    ]


def prompts_of(given: Any) -> list[str] | list[list[int]]:
    """A list of texts or of tokens, from all that a prompt may be."""
    alone = isinstance(given, str) or isinstance(given[0], int)
    return [given] if alone else list(given)


class _Reply:
    """What comes of the jobs, as OpenAI tells it."""

    def __init__(
        self, ask: CompletionRequest, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        self.ask = ask
        self.served = served
        self.jobs = jobs
        self.letter = dict(id=f"cmpl-{uuid4().hex}", created=int(time()), model=served.name)
        tokenizer = served.model.tokenizer
        self.records = [LogprobRecorder(tokenizer, job, ask.logprobs or 0) for job in jobs]
        self.written = 0

    async def events(self, order: GenerationStream) -> Events:
        """Chunks as they come, and the usage at the end where it was asked for."""
        echoed = [not self.ask.echo] * len(self.jobs)
        async for some in order.batches():
            chunks = []
            for index, piece in some:
                shown, echoed[index] = self._shown(piece, echoed[index]), True
                if shown.text or shown.finish or (shown.tokens and self.ask.logprobs is not None):
                    chunks.append(self._completion([self._choice(index, index, [shown])]))
            yield chunks
        if self.ask.stream_options and self.ask.stream_options.include_usage:
            yield [self._completion([], self._usage())]

    def whole(self, written: Sequence[Sequence[TextChunk]]) -> CompletionResponse:
        shown = [
            [self._shown(piece, not self.ask.echo or at > 0) for at, piece in enumerate(pieces)]
            for pieces in written
        ]
        chosen = self._chosen(shown)
        choices = [self._choice(at, index, shown[index]) for at, index in enumerate(chosen)]
        return self._completion(choices, self._usage())

    def _shown(self, piece: TextChunk, new: bool) -> TextChunk:
        """Counts what is new; where nothing was to be written, one token was, and is not shown."""
        if new and self.ask.max_tokens == 0:
            return TextChunk("", finish=piece.finish and "length")
        self.written += len(piece.tokens) if new else 0
        return piece

    def _chosen(self, written: Sequence[Sequence[TextChunk]]) -> list[int]:
        """Of each prompt's continuations the n likeliest, by the mean log-probability of a
        token.
        """
        of_each = self.ask.best_of or self.ask.n
        if of_each == self.ask.n:
            return list(range(len(written)))
        ranked = [
            sorted(range(start, start + of_each), key=lambda i: -_mean(written[i]))
            for start in range(0, len(written), of_each)
        ]
        return [i for some in ranked for i in some[: self.ask.n]]

    def _choice(self, at: int, index: int, pieces: Sequence[TextChunk]) -> CompletionChoice:
        done = join_chunks(pieces)
        named = self.records[index].add(pieces) if self.ask.logprobs is not None else None
        finish = done.finish if pieces[-1].finish else None
        return CompletionChoice(index=at, text=done.text, logprobs=named, finish_reason=finish)  # type: ignore[arg-type]

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> CompletionResponse:
        return CompletionResponse(**self.letter, choices=choices, usage=usage)  # type: ignore[arg-type]

    def _usage(self) -> Usage:
        read = sum(len(job.prompt) for job in self.jobs[:: self.ask.best_of or self.ask.n])
        return Usage(
            prompt_tokens=read, completion_tokens=self.written, total_tokens=read + self.written
        )


def _mean(pieces: Sequence[TextChunk]) -> float:
    values = [one.logprob for piece in pieces for one in piece.logprobs if one is not None]
    return sum(values) / max(len(values), 1)
