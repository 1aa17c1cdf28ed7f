"""Messages between threads and processes, as many at once as there are: waking a loop is dear."""

import asyncio
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
SIZE_BYTES = 4


class Mailbox(Generic[T]):
    """Items put by any thread, handled together by the event loop that made it."""

    def __init__(self, handle: Callable[[list[T]], object]) -> None:
        self.handle = handle
        self.loop = asyncio.get_running_loop()
        self.items = deque[T]()
        self.due = False

    def put(self, item: T) -> None:
        self.items.append(item)
        if not self.due:
            self.due = True
            with suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self.due = False  # before the items are taken, so that none is left behind
        self.handle([self.items.popleft() for _ in range(len(self.items))])


class Link:
    """One end of a socket to another process of this server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.mailbox = Mailbox[tuple[Any, ...]](self._write)

    def send(self, name: str, *values: Any) -> None:
        """From any thread: calls `on_NAME` of the receiver at the other end."""
        self.mailbox.put((f"on_{name}", *values))

    async def listen(self, receiver: object) -> None:
        """Calls a receiver with what the other end sends, until that is gone."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await self.reader.readexactly(SIZE_BYTES), "little")
                data = await self.reader.readexactly(size)
                for name, *values in pickle.loads(data):  # noqa: S301  # from this very server
                    getattr(receiver, name)(*values)
        self.writer.close()

    def _write(self, messages: list[tuple[Any, ...]]) -> None:
        data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
        with suppress(RuntimeError):  # the other end is gone
            self.writer.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
