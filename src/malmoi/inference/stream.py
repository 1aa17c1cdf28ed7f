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
    """What was written since the last piece. `text` is whole characters only, so tokens may come
    before their text.
    """

    text: str
    tokens: tuple[int, ...] = ()
    # one a token where they were asked for; a prompt's first has none
    logprobs: tuple[Logprob | None, ...] = ()
    finish: FinishReason | None = None  # why the text is over; None while it is not


@dataclass(frozen=True)
class CompletedText:
    """A whole continuation (after its prompt, where that was to be echoed)."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob | None, ...]
    finish: FinishReason


class TokenStream:
    """A request's output. Read it once, from any thread: chunk by chunk, or as a result.

    With `hear`, pieces go there instead, in the engine's thread: an event loop waits for nobody.
    """

    def __init__(self, on_chunk: Callable[[TextChunk], None] | None = None) -> None:
        self.cancelled = False
        self.error: MalmoiError | None = None  # what went wrong, where the last piece says "error"
        self._pieces: SimpleQueue[TextChunk] = SimpleQueue()
        self._hear = on_chunk or self._pieces.put

    def __iter__(self) -> Iterator[TextChunk]:
        """Pieces as they come; the last one says why the text is over."""
        while True:
            piece = self._pieces.get()
            yield piece
            if piece.finish is not None:
                return

    def cancel(self) -> None:
        """Gives the place up; the engine frees it before its next step."""
        self.cancelled = True

    def result(self) -> CompletedText:
        """Waits for the end. A request that failed raises its error."""
        pieces = list(self)
        if self.error is not None:
            raise self.error
        return join_chunks(pieces)

    def put(self, piece: TextChunk) -> None:
        """For the engine: hands a piece over."""
        self._hear(piece)


def join_chunks(pieces: Sequence[TextChunk]) -> CompletedText:
    """All that was written, in one."""
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    said = tuple(one for piece in pieces for one in piece.logprobs)
    return CompletedText(text, tokens, said, pieces[-1].finish or "stop")
