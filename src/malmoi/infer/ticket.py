"""What a request gets back: pieces as they are written, or everything at its end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

from malmoi.decode.choice import Logprob
from malmoi.errors import MalmoiError

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Piece:
    """What was written since the last piece. `text` is whole characters only, so tokens may come before their text."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob | None, ...] = ()  # one a token where they were asked for; a prompt's first has none
    finish: Finish | None = None  # why the text is over; None while it is not


@dataclass(frozen=True)
class Done:
    """A whole continuation (after its prompt, where that was to be echoed)."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob | None, ...]
    finish: Finish


class Ticket:
    """A request's place in the engine. Read it once, from any thread: as pieces, or as a result.

    With `hear`, pieces go there instead, in the engine's thread: an event loop waits for nobody.
    """

    def __init__(self, hear: Callable[[Piece], None] | None = None) -> None:
        self.cancelled = False
        self.error: MalmoiError | None = None  # what went wrong, where the last piece says "error"
        self._pieces: SimpleQueue[Piece] = SimpleQueue()
        self._hear = hear or self._pieces.put

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come; the last one says why the text is over."""
        while True:
            piece = self._pieces.get()
            yield piece
            if piece.finish is not None:
                return

    def cancel(self) -> None:
        """Gives the place up; the engine frees it before its next step."""
        self.cancelled = True

    def result(self) -> Done:
        """Waits for the end. A request that failed raises its error."""
        pieces = list(self)
        if self.error is not None:
            raise self.error
        return joined(pieces)

    def put(self, piece: Piece) -> None:
        """For the engine: hands a piece over."""
        self._hear(piece)


def joined(pieces: Sequence[Piece]) -> Done:
    """All that was written, in one."""
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    said = tuple(one for piece in pieces for one in piece.logprobs)
    return Done(text, tokens, said, pieces[-1].finish or "stop")
