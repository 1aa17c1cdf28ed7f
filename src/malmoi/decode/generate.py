"""Continuing prompts: tokens by `Decoding`, beams or drafts, and `write` turns those into text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from malmoi.decode.batch import batches
from malmoi.decode.beam import Search, beam_search
from malmoi.decode.choice import Seat, Written
from malmoi.decode.cohort import Cohorts
from malmoi.decode.constrain import Constraint
from malmoi.decode.fast import Screen
from malmoi.decode.lookup import Lookup
from malmoi.decode.prefix import Prefixes
from malmoi.decode.sample import Sampling
from malmoi.decode.stream import Writer, detokenizer
from malmoi.decode.wish import Request, Wish, requests
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer

__all__ = ["Decoding", "Request", "Speaker", "Wish", "continuations", "requests", "write"]


class Decoding:
    """Requests that were all there from the start, continued together."""

    def __init__(
        self,
        network: Network,
        wanted: Sequence[Request],
        sampling: Sampling,
        screen: Screen | None = None,
        constraint: Constraint | None = None,
        cohorts: Cohorts | None = None,
    ) -> None:
        self.seats = [Seat(request, sampling, constraint.walk() if constraint else None) for request in wanted]
        self.number = {seat: i for i, seat in enumerate(self.seats)}
        self.cohorts = cohorts or Cohorts()
        capacity = max(len(request.prompt) + request.limit for request in wanted) - 1  # the last token is never read
        self.cohort = self.cohorts.take(network, len(wanted), capacity, screen)
        repeated = len({request.prompt for request in wanted}) < len(wanted)  # samples of a prompt read it once
        self.cohort.prefixes = Prefixes(network) if repeated else None
        for seat in self.seats:
            self.cohort.join(seat)

    def step(self) -> dict[int, list[int]]:
        """The next token of every request that still runs; on a GPU the next few."""
        written = self._read() if any(not seat.live for seat in self.cohort.seats) else self.cohort.step()
        for seat in self.cohort.seats:
            if seat.error is not None:
                raise seat.error
        return {self.number[one.seat]: one.tokens for one in written if one.seat in self.cohort.seats}

    def _read(self) -> list[Written]:
        """All prompts, part by part; the first token of each comes when the last is read."""
        first: list[Written] = []
        while any(not seat.live for seat in self.cohort.seats):
            first += self.cohort.read()
        return first

    def drop(self, finished: Iterable[int]) -> None:
        """These requests are over."""
        for i in finished:
            if self.seats[i] in self.cohort.seats:
                self.cohort.leave(self.seats[i])

    def close(self) -> None:
        """Whoever is left goes, and the cohort may serve others."""
        self.cohorts.give(self.cohort)

    @property
    def running(self) -> bool:
        return bool(self.cohort.seats)


@dataclass(frozen=True)
class Speaker:
    """What writes: a network with an lm head, its tokenizer, and a screen where greedy decoding has one."""

    network: Network
    tokenizer: Tokenizer
    screen: Screen | None = None
    cohorts: Cohorts = field(default_factory=Cohorts)


def write(speaker: Speaker, prompts: Sequence[Sequence[int]], wish: Wish) -> Iterator[tuple[int, str]]:
    """Pieces of text as they come, each with the number of its continuation: prompt i's sample j is i · n + j."""
    return _write_all(speaker, requests(prompts, wish, speaker.network.config.context), wish)  # refuses at once


def _write_all(speaker: Speaker, wanted: Sequence[Request], wish: Wish) -> Iterator[tuple[int, str]]:
    if wish.beams > 1 or wish.speculate:
        for i, request in enumerate(wanted):
            yield from ((i, text) for text in _write_one(speaker, request, wish))
        return
    for group in batches([len(request.prompt) + request.limit for request in wanted]):
        for i, text in _write_group(speaker, [wanted[i] for i in group], wish):
            yield group[i], text


def _write_group(speaker: Speaker, wanted: Sequence[Request], wish: Wish) -> Iterator[tuple[int, str]]:
    writers = [_writer(speaker, request, wish) for request in wanted]
    decoding = Decoding(speaker.network, wanted, wish.sampling, speaker.screen, wish.constraint, speaker.cohorts)
    try:
        while decoding.running:
            for i, tokens in decoding.step().items():
                if text := _push(writers[i], tokens, decoding.seats[i]):
                    yield i, text
            decoding.drop(i for i, writer in enumerate(writers) if writer.done)
    finally:
        decoding.close()


def _push(writer: Writer, tokens: Sequence[int], seat: Seat) -> str:
    """The text that these tokens let out, up to its end."""
    text = ""
    for token in tokens:
        text += writer.push(token)
        if seat.walk is not None and seat.walk.over:
            text += writer.end()
        if writer.done:
            break
    return text


def _write_one(speaker: Speaker, request: Request, wish: Wish) -> Iterator[str]:
    """A request that does not share its steps: several beams, or several tokens a step."""
    writer = _writer(speaker, request, wish)
    if wish.beams > 1:
        search = Search(wish.beams, request.limit, wish.ends, wish.length_penalty, wish.early_stopping)
        tokens: Iterable[int] = beam_search(speaker.network, request.prompt, search)
    else:
        tokens = Lookup(speaker.network, request.prompt, request.limit, speaker.screen)
    for token in tokens:
        if text := writer.push(token):
            yield text
        if writer.done:
            return


def _writer(speaker: Speaker, request: Request, wish: Wish) -> Writer:
    return Writer(detokenizer(speaker.tokenizer, request.prompt), wish.stop, wish.ends, request.limit)


def continuations(speaker: Speaker, prompts: Sequence[Sequence[int]], wish: Wish) -> list[list[str]]:
    """The continuations of every prompt, `n` each."""
    texts = [""] * (len(prompts) * wish.n)
    for i, text in write(speaker, prompts, wish):
        texts[i] += text
    return [texts[i : i + wish.n] for i in range(0, len(texts), wish.n)]
