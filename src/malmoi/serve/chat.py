"""POST /v1/chat/completions: an answer in a conversation."""

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request

from malmoi.errors import UsageError
from malmoi.infer.chat import conversation
from malmoi.infer.engine import Done, Engine, Job, Piece
from malmoi.serve.asks import ChatAsk
from malmoi.serve.completions import answered, check_length
from malmoi.serve.names import chat_logprobs
from malmoi.serve.orders import Order
from malmoi.serve.registry import Served
from malmoi.serve.replies import ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, ChunkChoice, Delta, Said, Usage
from malmoi.serve.streams import STREAMED, Events
from malmoi.serve.work import aside, client_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED, tags=["OpenAI"])
async def chat(ask: ChatAsk, request: Request) -> Any:
    """Answers in a conversation, by the model's own chat template.

    A model without one continues a plain dialogue: what the system says, a blank line, then `User: …`,
    `Assistant: …` line by line, up to where the next turn would begin. An answer begins with its first character that
    is not a space, and has 256 tokens at most unless another number is given.
    """
    state = request.app.state
    served: Served = state.registry.get(ask.model)
    check_length(ask, ask.max_completion_tokens or ask.max_tokens or 0, state.settings.max_tokens)
    if ask.max_tokens == 0:
        raise UsageError("max_tokens must be 1 or more: an answer of 0 tokens is none.")
    jobs = await aside(lambda: _jobs(ask, served.writer))
    order = Order(served.writer, jobs, state.settings.timeout, state.metrics, client_of(request))
    return await answered(request, ask, order, _Reply(ask, served, jobs), order.whole)


def _jobs(ask: ChatAsk, engine: Engine) -> list[Job]:
    said = conversation(engine.model.tokenizer, [message.plain() for message in ask.messages])
    most = ask.max_completion_tokens or ask.max_tokens
    wishes = said.wishes(ask.settings() | ({"max_new_tokens": most} if most else {}))
    named = max(ask.top_logprobs or 0, 1) if ask.logprobs else 0
    return [engine.job(said.tokens, logprobs=named, seed=seed, **wishes) for seed in ask.seeds(ask.n)]


class _Reply:
    """What comes of the jobs, as OpenAI tells it."""

    def __init__(self, ask: ChatAsk, served: Served, jobs: Sequence[Job]) -> None:
        self.ask, self.served = ask, served
        self.letter = dict(id=f"chatcmpl-{uuid4().hex}", created=int(time()), model=served.name)
        self.read, self.written = len(jobs[0].prompt), 0
        self.begun = [False] * len(jobs)

    async def events(self, order: Order) -> Events:
        """Who speaks, then what is said as it comes, and the usage at the end where it was asked for."""
        opening = Delta(role="assistant", content="")
        yield [self._chunk([ChunkChoice(index=i, delta=opening)]) for i in range(self.ask.n)]
        async for some in order.batches():
            yield [self._chunk([self._part(index, piece)]) for index, piece in some if self._speaks(index, piece)]
        if self.ask.stream_options and self.ask.stream_options.include_usage:
            yield [self._chunk([], self._usage())]

    def whole(self, answers: Sequence[Done]) -> ChatCompletion:
        self.written = sum(len(done.tokens) for done in answers)
        choices = [
            ChatChoice(
                index=index,
                message=Said(content=done.text.lstrip()),
                logprobs=self._logprobs(done.logprobs),
                finish_reason=done.finish,  # type: ignore[arg-type]
            )
            for index, done in enumerate(answers)
        ]
        return ChatCompletion(**self.letter, choices=choices, usage=self._usage())  # type: ignore[arg-type]

    def _speaks(self, index: int, piece: Piece) -> bool:
        """Whether a piece has anything to tell; the space before an answer has not."""
        self.written += len(piece.tokens)
        blank = not (piece.text if self.begun[index] else piece.text.strip())
        return not blank or piece.finish is not None or (self.ask.logprobs and bool(piece.tokens))

    def _part(self, index: int, piece: Piece) -> ChunkChoice:
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
        return Usage(prompt_tokens=self.read, completion_tokens=self.written, total_tokens=self.read + self.written)
