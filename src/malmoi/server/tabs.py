"""A tab of the studio asks one thing at a time: what it asked before its newest request counts as
given up.

The page also closes those requests, but a proxy between it and the server may not say so.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

HEADER = "x-studio-run"  # "<tab>:<number>": requests of one run have the same number
RUN = re.compile(r"([\w-]{1,64}):(\d{1,15})")


class Tabs:
    """The requests that are being answered, by tab."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[asyncio.Event, int]] = {}

    @contextmanager
    def following(self, header: str, receive: Receive) -> Iterator[Receive]:
        """What a request receives: a disconnection as soon as its tab has asked something newer."""
        found = RUN.fullmatch(header)
        if found is None:
            yield receive
            return
        superseded = asyncio.Event()
        runs = self.runs.setdefault(found[1], {})
        runs[superseded] = int(found[2])
        newest = max(runs.values())
        for other, number in runs.items():
            if number < newest:
                other.set()
        try:
            yield _until(superseded, receive)
        finally:
            del runs[superseded]
            if not runs:
                del self.runs[found[1]]


def _until(superseded: asyncio.Event, receive: Receive) -> Receive:
    async def next_message() -> Message:
        message = asyncio.ensure_future(receive())
        given_up = asyncio.ensure_future(superseded.wait())
        try:
            await asyncio.wait({message, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return await message if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            given_up.cancel()

    return next_message
