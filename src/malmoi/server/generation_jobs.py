"""All continuations of one request: submitted, streamed and cancelled together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Self

from fastapi import Request

from malmoi.errors import UsageError
from malmoi.inference.engine import GenerationJob
from malmoi.inference.stream import TextChunk, TokenStream
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import ApiError
from malmoi.server.executor import client_of, shutting_down, timed_out
from malmoi.server.model_registry import ServedModel
from malmoi.server.prometheus import BETWEEN_TOKENS, FIRST_TOKEN, QUEUE_TIME, WHOLE_TIME, Metrics

IndexedChunk = tuple[int, TextChunk]  # (index of the job, what it generated)


class GenerationStream:
    """Jobs in an engine, their chunks passed to the event loop. Leaving it cancels the rest."""

    def __init__(
        self, request: Request, served: ServedModel, jobs: Sequence[GenerationJob]
    ) -> None:
        engine = served.writer
        if len(jobs) > engine.queue:
            raise UsageError(
                "{jobs} continuations are above the limit of {queue}.",
                jobs=len(jobs),
                queue=engine.queue,
            )
        self.settings: ServeConfig = request.app.state.settings
        self.metrics: Metrics = request.app.state.metrics
        self.model = served.name
        self.start = perf_counter()
        self.last = [0.0] * len(jobs)  # when each job's newest token arrived
        self.loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.received = deque[tuple[float, int, TextChunk]]()
        self.late = False
        self.alarm = self.loop.call_later(self.settings.timeout, self._time_out)
        self.streams: list[TokenStream] = []
        owner = (client_of(request), id(self))
        try:
            for i, job in enumerate(jobs):
                self.streams.append(engine.submit(job, partial(self._receive, i), owner=owner))
        except Exception:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.alarm.cancel()
        for stream in self.streams:
            stream.cancel()

    async def batches(self) -> AsyncIterator[list[IndexedChunk]]:
        """Chunks that arrived since the last batch, until every job is done; raises any failure."""
        left = len(self.streams)
        while left:
            await self.ready.wait()
            self.ready.clear()
            if self.late:
                raise timed_out(self.settings.timeout)
            some = list(self._taken())
            for index, chunk in some:
                self._check(index, chunk)
            left -= sum(chunk.finish is not None for _, chunk in some)
            yield some

    async def chunks(self) -> list[list[TextChunk]]:
        """All chunks of each job."""
        written: list[list[TextChunk]] = [[] for _ in self.streams]
        async for some in self.batches():
            for index, chunk in some:
                written[index].append(chunk)
        return written

    def _taken(self) -> Iterator[IndexedChunk]:
        while self.received:
            at, index, chunk = self.received.popleft()
            self._observe(at, index, chunk)
            yield index, chunk

    def _observe(self, at: float, index: int, chunk: TextChunk) -> None:
        """Records when a chunk came."""
        observe = self.metrics.observe
        new = len(chunk.tokens)
        if new and self.last[index]:
            observe(BETWEEN_TOKENS, self.model, (at - self.last[index]) / new, new)
        elif new:
            observe(FIRST_TOKEN, self.model, at - self.start)
            observe(QUEUE_TIME, self.model, self.streams[index].admitted - self.start)
        self.last[index] = at if new else self.last[index]
        if chunk.finish is not None and chunk.finish != "cancelled":  # the engine counts those
            observe(WHOLE_TIME, self.model, at - self.start)
            self.metrics.finished[self.model, chunk.finish] += 1

    def _check(self, index: int, chunk: TextChunk) -> None:
        if chunk.finish == "error":
            failed = ApiError(500, "The continuation failed.", code="failed")
            raise self.streams[index].error or failed
        if chunk.finish == "cancelled":
            raise shutting_down()

    # ------------------------------------------------------------------ callbacks

    def _receive(self, index: int, chunk: TextChunk) -> None:
        """In the engine's thread. Only the first chunk wakes the loop, which then takes all."""
        self.received.append((perf_counter(), index, chunk))
        if len(self.received) == 1:
            with suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self.ready.set)

    def _time_out(self) -> None:
        self.late = True
        self.ready.set()
