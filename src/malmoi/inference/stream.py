"""The stream of a request: chunks as they are generated, or the whole text at the end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

from malmoi.errors import MalmoiError
from malmoi.inference.generation.token_selection import Logprob

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TextChunk:
    """The output since the last chunk; `text` may lag behind `tokens`."""

    text: str
    tokens: tuple[int, ...] = ()
    # one per token if requested; a prompt's first token has none
    logprobs: tuple[Logprob | None, ...] = ()
    finish: FinishReason | None = None  # why the text ended; None before that


class TokenStream:
    """A request's output, to be read once, from any thread: chunk by chunk, or as a result.

    With `on_chunk`, chunks go to that function instead, in the engine's thread.
    """

    def __init__(self, on_chunk: Callable[[TextChunk], None] | None = None) -> None:
        self.cancelled = False
        self.admitted = 0.0  # when it left the queue, by perf_counter
        self.error: MalmoiError | None = None  # set if the last chunk's finish reason is "error"
        self._chunks: SimpleQueue[TextChunk] = SimpleQueue()
        self._deliver = on_chunk or self._chunks.put

    def __iter__(self) -> Iterator[TextChunk]:
        """Yields chunks as they arrive; the last one has a finish reason."""
        while True:
            chunk = self._chunks.get()
            yield chunk
            if chunk.finish is not None:
                return

    def cancel(self) -> None:
        """Cancels the request: the engine frees its row before the next step."""
        self.cancelled = True

    def result(self) -> TextChunk:
        """Waits for the end and returns the whole output; raises the error of a failed request."""
        chunks = list(self)
        if self.error is not None:
            raise self.error
        return join_chunks(chunks)

    def put(self, chunk: TextChunk) -> None:
        """Adds a chunk; called by the engine."""
        self._deliver(chunk)


def join_chunks(chunks: Sequence[TextChunk]) -> TextChunk:
    """Joins chunks into one."""
    text = "".join(chunk.text for chunk in chunks)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    logprobs = tuple(one for chunk in chunks for one in chunk.logprobs)
    return TextChunk(text, tokens, logprobs, chunks[-1].finish or "stop")
