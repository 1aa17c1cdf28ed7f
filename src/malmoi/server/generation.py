"""All continuations of one request: submitted together or not at all, streamed, and cancelled
together.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Self

from malmoi.errors import UsageError
from malmoi.inference.engine import Engine, GenerationJob
from malmoi.inference.stream import CompletedText, TextChunk, TokenStream, join_chunks
from malmoi.server.background import too_late
from malmoi.server.errors import ApiError
from malmoi.server.metrics import Metrics

IndexedChunk = tuple[int, TextChunk]  # which of the jobs, and what it wrote


class GenerationStream:
    """Jobs in an engine, whose pieces come to the event loop. Leaving it gives up what is not
    finished.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[GenerationJob],
        seconds: float,
        metrics: Metrics,
        client: str,
    ) -> None:
        if len(jobs) > engine.queue:
            raise UsageError(
                f"{len(jobs)} continuations are too many at once: {engine.queue} can wait at most."
            )
        self.seconds = seconds
        self.metrics = metrics
        self.start = perf_counter()
        self.loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.heard = deque[IndexedChunk]()
        self.late, self.alarm = False, self.loop.call_later(seconds, self._ring)
        self.streams: list[TokenStream] = []
        try:
            for i, job in enumerate(jobs):
                self.streams.append(
                    engine.submit(job, partial(self._hear, i), owner=(client, id(self)))
                )
        except Exception:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.alarm.cancel()
        for stream in self.streams:
            stream.cancel()

    async def batches(self) -> AsyncIterator[list[IndexedChunk]]:
        """What has come since the last time, until every job is over; what fails is raised."""
        left = len(self.streams)
        while left:
            await self.ready.wait()
            self.ready.clear()
            if self.late:
                raise too_late(self.seconds)
            some = list(self._taken())
            for index, piece in some:
                self._check(index, piece)
            left -= sum(piece.finish is not None for _, piece in some)
            yield some

    async def pieces(self) -> list[list[TextChunk]]:
        """All that each job writes, when all are over."""
        written: list[list[TextChunk]] = [[] for _ in self.streams]
        async for some in self.batches():
            for index, piece in some:
                written[index].append(piece)
        return written

    async def whole(self) -> list[CompletedText]:
        return [join_chunks(some) for some in await self.pieces()]

    def _taken(self) -> Iterator[IndexedChunk]:
        while self.heard:
            yield self.heard.popleft()

    def _check(self, index: int, piece: TextChunk) -> None:
        if self.start and piece.tokens:
            self.metrics.first_token.add(perf_counter() - self.start)
            self.start = 0.0
        if piece.finish == "error":
            raise self.streams[index].error or ApiError(
                500, "The continuation failed.", code="failed"
            )
        if piece.finish == "cancelled":
            raise ApiError(
                503, "The server is stopping and could not finish this.", code="stopping"
            )

    # ------------------------------------------------------------------ called by others

    def _hear(self, index: int, piece: TextChunk) -> None:
        """In the engine's thread. Only the first of several wakes the loop, which takes all that
        it finds.
        """
        self.heard.append((index, piece))
        if len(self.heard) == 1:
            with suppress(RuntimeError):  # a loop that is closed has nobody left to tell
                self.loop.call_soon_threadsafe(self.ready.set)

    def _ring(self) -> None:
        self.late = True
        self.ready.set()
