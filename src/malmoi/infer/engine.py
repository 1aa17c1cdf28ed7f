"""Many requests at once: they queue, join a running batch when there is a place, and leave it when they are over.

    with Engine(model, slots=16) as engine:
        for piece in engine.submit(engine.job("The state of", max_new_tokens=40)):
            print(piece.text, end="")

One thread does all the work; everything that users call may be called from any thread.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

from malmoi.decode.choice import Seat, Written
from malmoi.decode.cohort import Cohort
from malmoi.decode.constrain import Constraint
from malmoi.decode.prefix import BUDGET, Prefixes
from malmoi.decode.steps import Mode
from malmoi.decode.stream import Writer, detokenizer
from malmoi.decode.wish import Wish, check_room, requests
from malmoi.errors import MalmoiError, UsageError
from malmoi.infer.model import Model, Wishes
from malmoi.infer.ticket import Done, Finish, Piece, Ticket

__all__ = ["Busy", "Done", "Engine", "Job", "Piece", "Stats", "Ticket"]


Owner = tuple[Hashable, ...]  # who asks, from the outermost inwards: a client, a request of it


class Busy(MalmoiError):
    """The queue is full: try again later."""


@dataclass(frozen=True)
class Job:
    """One continuation of one prompt. Several samples of a prompt are several jobs, with seeds s, s + 1, …"""

    prompt: tuple[int, ...]
    wish: Wish
    logprobs: int = 0  # how many likely tokens to name beside each that is written
    echo: bool = False  # the prompt comes first, with its own log-probabilities where those are asked for
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Stats:
    """How an engine is doing."""

    running: int
    waiting: int
    slots: int
    tokens: int  # written so far
    prompt_tokens: int  # of the prompts taken in so far
    prefix_tokens: int  # of those, the ones that were known from other prompts and not read again
    finished: int
    cancelled: int
    failed: int


class _Guest:
    """A job on its way through the engine."""

    def __init__(self, job: Job, model: Model, capacity: int, ticket: Ticket, owner: Owner) -> None:
        self.job, self.ticket = job, ticket
        self.owners = [owner[: i + 1] for i in range(len(owner))]
        constraint = job.constraint or job.wish.constraint
        request = requests([job.prompt], job.wish, capacity)[0]
        walk = constraint.walk() if constraint is not None else None
        self.seat = Seat(request, job.wish.sampling, walk, int(job.logprobs), job.echo)
        self.writer = Writer(detokenizer(model.tokenizer, job.prompt), job.wish.stop, job.wish.ends, request.limit)
        self.prompt_text = model.tokenizer.decode(job.prompt) if job.echo else ""

    def echo(self) -> Piece:
        said = (None, *self.seat.echoed) if self.job.logprobs else ()
        return Piece(self.prompt_text, self.job.prompt, said)

    def piece(self, written: Written) -> Piece:
        """What these tokens let out, up to the end of the text."""
        text, used = "", 0
        for token in written.tokens:
            text, used = text + self.writer.push(token), used + 1
            if self.seat.walk is not None and self.seat.walk.over:
                text += self.writer.end()
            if self.writer.done:
                break
        finish: Finish | None = self.writer.finish if self.writer.done else None
        return Piece(text, tuple(written.tokens[:used]), tuple(written.logprobs[:used]), finish)

    def finish(self, how: Finish, error: MalmoiError | None = None) -> None:
        self.ticket.error = error
        self.ticket.put(Piece(self.writer.end(), finish=how))


class Engine:
    """Serves jobs over one static cache of `slots` rows, each of `capacity` tokens (the model's context)."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 16,
        capacity: int | None = None,
        queue: int = 256,
        prefix: int = BUDGET,
        mode: Mode | None = None,
    ) -> None:
        """`queue` jobs may wait; `prefix` bytes are kept of prompts read before (0: none); `mode`: see `Cohort`."""
        for name, value in (("slots", slots), ("queue", queue)):
            if value < 1:
                raise UsageError(f"{name} must be 1 or more, not {value}.")
        self.model, self.queue = model, queue
        self.capacity = min(capacity or model.config.context, model.config.context)
        prefixes = Prefixes(model.network, prefix) if prefix else None
        screen = model.speaker.screen
        self.cohort = Cohort(model.network, slots, self.capacity, screen=screen, prefixes=prefixes, mode=mode)
        self.waiting: deque[_Guest] = deque()
        self.guests: dict[Seat, _Guest] = {}
        self.counts = dict.fromkeys(("tokens", "prompt_tokens", "finished", "cancelled", "failed"), 0)
        self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="malmoi-engine", daemon=True)
        self.thread.start()

    def job(
        self, prompt: str | Sequence[int], *, logprobs: int = 0, echo: bool = False, **wishes: Unpack[Wishes]
    ) -> Job:
        """A job from a text (or its tokens) and the settings of `generate`; it ends where this model's texts end."""
        tokens = self.model._prompts([prompt])[0] if isinstance(prompt, str) else prompt
        return Job(tuple(tokens), self.model._wish(**wishes), logprobs, echo)

    def submit(self, job: Job, hear: Callable[[Piece], None] | None = None, *, owner: Owner = ()) -> Ticket:
        """Takes a job in, or refuses it at once: `Busy` where too many wait, `UsageError` where it cannot be done.

        A free slot goes to the owner that holds the fewest; among equals, to whoever came first.
        """
        self._check(job)
        guest = _Guest(job, self.model, self.capacity, Ticket(hear), owner)
        with self.changed:
            if self.closing:
                raise MalmoiError("The engine is closing and takes no more requests.")
            if len(self.waiting) >= self.queue:
                raise Busy(f"{self.queue} requests are waiting already; try again later.")
            self.waiting.append(guest)
            self.changed.notify()
        return guest.ticket

    def close(self, *, drain: bool = True) -> None:
        """Stops: after everything taken in is done, or with the rest cancelled."""
        with self.changed:
            self.closing = True
            for guest in () if drain else (*self.waiting, *self.guests.values()):
                guest.ticket.cancel()
            self.changed.notify()
        self.thread.join()

    def stats(self) -> Stats:
        with self.changed:
            return Stats(
                running=len(self.guests),
                waiting=len(self.waiting),
                slots=self.cohort.rows,
                prefix_tokens=self.cohort.shared,
                **self.counts,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def _check(self, job: Job) -> None:
        if job.wish.n != 1 or job.wish.beams != 1 or job.wish.speculate:
            raise UsageError("A job is one continuation: submit one for each sample, without beams and speculate.")
        if not job.prompt:
            raise UsageError("The prompt of a job needs at least one token.")
        check_room(job.prompt, self.capacity)
        wrong = next((token for token in job.prompt if not 0 <= token < self.model.config.vocab), None)
        if wrong is not None:  # on a GPU such a token would take everyone down
            raise UsageError(f"The prompt has the token {wrong}, and the vocabulary ends at {self.model.config.vocab}.")
        if not 0 <= job.logprobs <= self.model.config.vocab:
            raise UsageError(f"logprobs must be between 0 and the vocabulary's size, not {job.logprobs}.")

    # ------------------------------------------------------------------ the engine's own thread

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # nothing can be done any more, but nobody waits for ever
            self._abandon(MalmoiError(f"The engine broke down: {error!r}."))
            raise

    def _serve(self) -> None:
        while self._welcome():
            try:
                for part in (self.cohort.read, self.cohort.step):
                    self._hand_over(part())
            except Exception as error:  # out of memory, a broken weight: those inside are told, the engine goes on
                self._evacuate(MalmoiError(f"The engine could not go on with this request: {error}"))

    def _welcome(self) -> bool:
        """Lets cancelled requests go and waiting ones in; waits where there is nobody. False: all is over."""
        with self.changed:
            while not self.waiting and not self.guests:
                if self.closing:
                    return False
                self.changed.wait()
            self._let_go()
            while self.waiting and not self.cohort.full:
                guest = self._next_guest()
                self.cohort.join(guest.seat)
                self.guests[guest.seat] = guest
                self.counts["prompt_tokens"] += len(guest.job.prompt)
        return True

    def _next_guest(self) -> _Guest:
        """One with many jobs does not keep the others out: the clients share the slots, and a client's requests."""
        held = Counter(owner for guest in self.guests.values() for owner in guest.owners)
        guest = min(self.waiting, key=lambda guest: [held[owner] for owner in guest.owners])
        self.waiting.remove(guest)
        return guest

    def _let_go(self) -> None:
        for guest in [guest for guest in self.guests.values() if guest.ticket.cancelled]:
            self._leave(guest, "cancelled")
            guest.finish("cancelled")
        for guest in [guest for guest in self.waiting if guest.ticket.cancelled]:
            self.waiting.remove(guest)
            self.counts["cancelled"] += 1
            guest.finish("cancelled")

    def _hand_over(self, results: list[Written]) -> None:
        """Gives everyone what was written for them; who is over leaves. One guest's failure is its own."""
        for written in results:
            guest = self.guests.get(written.seat)
            if guest is None:  # steps that were under way when it left
                continue
            try:
                self._deliver(guest, written)
            except Exception as error:
                written.seat.error = error
        for guest in [guest for guest in self.guests.values() if guest.seat.error is not None]:
            self._fail(guest, guest.seat.error)

    def _deliver(self, guest: _Guest, written: Written) -> None:
        if guest.job.echo and len(written.seat.tokens) == len(guest.job.prompt) + len(written.tokens):
            guest.ticket.put(guest.echo())
        piece = guest.piece(written)
        self._count("tokens", len(piece.tokens))
        if piece.finish is not None:
            self._leave(guest, "finished")
        guest.ticket.put(piece)

    def _fail(self, guest: _Guest, error: Exception | None) -> None:
        self._leave(guest, "failed")
        guest.finish(
            "error", error if isinstance(error, MalmoiError) else MalmoiError(f"The request failed: {error!r}.")
        )

    def _leave(self, guest: _Guest, how: str) -> None:
        self.cohort.leave(guest.seat)
        with self.changed:
            del self.guests[guest.seat]
            self.counts[how] += 1

    def _abandon(self, error: MalmoiError) -> None:
        with self.changed:
            self.closing = True
            for guest in (*self.waiting, *self.guests.values()):
                guest.finish("error", error)
            self.waiting.clear()

    def _evacuate(self, error: MalmoiError) -> None:
        for guest in list(self.guests.values()):
            self._fail(guest, error)

    def _count(self, what: str, number: int) -> None:
        with self.changed:
            self.counts[what] += number
