"""The continuations that one request asks for: taken in together or not at all, heard, and given up together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Self

from malmoi.errors import UsageError
from malmoi.infer.engine import Done, Engine, Job, Piece, Ticket
from malmoi.infer.ticket import joined
from malmoi.serve.errors import ApiError
from malmoi.serve.metrics import Metrics
from malmoi.serve.work import too_late

Heard = tuple[int, Piece]  # which of the jobs, and what it wrote


class Order:
    """Jobs in an engine, whose pieces come to the event loop. Leaving it gives up what is not finished."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], seconds: float, metrics: Metrics, client: str) -> None:
        if len(jobs) > engine.queue:
            raise UsageError(f"{len(jobs)} continuations are too many at once: {engine.queue} can wait at most.")
        self.seconds, self.metrics, self.start = seconds, metrics, perf_counter()
        self.loop, self.ready, self.heard = asyncio.get_running_loop(), asyncio.Event(), deque[Heard]()
        self.late, self.alarm = False, self.loop.call_later(seconds, self._ring)
        self.tickets: list[Ticket] = []
        try:
            for i, job in enumerate(jobs):
                self.tickets.append(engine.submit(job, partial(self._hear, i), owner=(client, id(self))))
        except Exception:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.alarm.cancel()
        for ticket in self.tickets:
            ticket.cancel()

    async def batches(self) -> AsyncIterator[list[Heard]]:
        """What has come since the last time, until every job is over; what fails is raised."""
        left = len(self.tickets)
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

    async def pieces(self) -> list[list[Piece]]:
        """All that each job writes, when all are over."""
        written: list[list[Piece]] = [[] for _ in self.tickets]
        async for some in self.batches():
            for index, piece in some:
                written[index].append(piece)
        return written

    async def whole(self) -> list[Done]:
        return [joined(some) for some in await self.pieces()]

    def _taken(self) -> Iterator[Heard]:
        while self.heard:
            yield self.heard.popleft()

    def _check(self, index: int, piece: Piece) -> None:
        if self.start and piece.tokens:
            self.metrics.first_token.add(perf_counter() - self.start)
            self.start = 0.0
        if piece.finish == "error":
            raise self.tickets[index].error or ApiError(500, "The continuation failed.", code="failed")
        if piece.finish == "cancelled":
            raise ApiError(503, "The server is stopping and could not finish this.", code="stopping")

    # ------------------------------------------------------------------ called by others

    def _hear(self, index: int, piece: Piece) -> None:
        """In the engine's thread. Only the first of several wakes the loop, which takes all that it finds."""
        self.heard.append((index, piece))
        if len(self.heard) == 1:
            with suppress(RuntimeError):  # a loop that is closed has nobody left to tell
                self.loop.call_soon_threadsafe(self.ready.set)

    def _ring(self) -> None:
        self.late = True
        self.ready.set()
