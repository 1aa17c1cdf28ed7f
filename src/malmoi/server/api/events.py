"""Streams: server-sent events, which end with [DONE], after an error too; lines of JSON."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from malmoi.server.error_replies import ApiError, api_error, log
from malmoi.server.executor import GenerationStream, unless_disconnected

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
            except TimeoutError:
                return  # a client that does not read cannot be sent an error
            except ApiError as error:
                if error.code != "gone":
                    raise

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for some in self.events:
                await _send(send, b"".join(map(_event, some)))
        except Exception as error:
            log(error)
            await _send(send, sse_event(json.dumps(api_error(error).body(), ensure_ascii=False)))
        await send({"type": "http.response.body", "body": DONE_EVENT})


def sse_event(data: str) -> bytes:
    return b"data: " + data.encode() + b"\n\n"


class TextEvent:
    """An event in which only the text changes; `body` has `MARK` there.

    It is serialised once: doing so for every token takes most of the server's time.
    """

    def __init__(self, body: BaseModel) -> None:
        self.before, self.after = _event(body).split(json.dumps(MARK, ensure_ascii=False).encode())

    def __call__(self, text: str) -> bytes:
        return self.before + json.dumps(text, ensure_ascii=False).encode() + self.after


def _event(body: BaseModel | bytes) -> bytes:
    """A body as an event, named by its type if it has one."""
    if isinstance(body, bytes):
        return body
    kind = getattr(body, "type", "")
    return (f"event: {kind}\n".encode() if kind else b"") + sse_event(body.model_dump_json())


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
