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
    """What was generated since the last chunk; `text` may lag behind `tokens`."""

    text: str
    tokens: tuple[int, ...] = ()
    # one a token where they were asked for; a prompt's first has none
    logprobs: tuple[Logprob | None, ...] = ()
    finish: FinishReason | None = None  # why the text is over; None while it is not


class TokenStream:
    """A request's output. Read it once, from any thread: chunk by chunk, or as a result.

    With `on_chunk`, chunks go there instead, in the engine's thread.
    """

    def __init__(self, on_chunk: Callable[[TextChunk], None] | None = None) -> None:
        self.cancelled = False
        self.error: MalmoiError | None = None  # what went wrong, where the last piece says "error"
        self._pieces: SimpleQueue[TextChunk] = SimpleQueue()
        self._hear = on_chunk or self._pieces.put

    def __iter__(self) -> Iterator[TextChunk]:
        """Chunks as they come; the last one has a finish reason."""
        while True:
            piece = self._pieces.get()
            yield piece
            if piece.finish is not None:
                return

    def cancel(self) -> None:
        """The engine frees the row before its next step."""
        self.cancelled = True

    def result(self) -> TextChunk:
        """Waits for the end. A request that failed raises its error."""
        pieces = list(self)
        if self.error is not None:
            raise self.error
        return join_chunks(pieces)

    def put(self, piece: TextChunk) -> None:
        """For the engine."""
        self._hear(piece)


def join_chunks(pieces: Sequence[TextChunk]) -> TextChunk:
    """All chunks as one."""
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    said = tuple(one for piece in pieces for one in piece.logprobs)
    return TextChunk(text, tokens, said, pieces[-1].finish or "stop")
