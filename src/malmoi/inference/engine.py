"""The engine: requests queue, join a running batch when a slot is free, and leave when they are
done.

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

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference.generation.batch import DecodeBatch
from malmoi.inference.generation.config import GenerationConfig, check_prompt_length, requests
from malmoi.inference.generation.constraints import Constraint
from malmoi.inference.generation.detokenize import TextWriter, detokenizer
from malmoi.inference.generation.prefix_cache import PREFIX_CACHE_BYTES, PrefixCache
from malmoi.inference.generation.steps import StepMode
from malmoi.inference.generation.token_selection import SequenceState, StepOutput
from malmoi.inference.model import GenerationSettings, Model
from malmoi.inference.stream import CompletedText, FinishReason, TextChunk, TokenStream

__all__ = [
    "CompletedText",
    "Engine",
    "EngineStats",
    "GenerationJob",
    "QueueFull",
    "TextChunk",
    "TokenStream",
]


Owner = tuple[Hashable, ...]  # who asks, from the outermost inwards: a client, a request of it


class QueueFull(MalmoiError):
    """The queue is full: try again later."""


@dataclass(frozen=True)
class GenerationJob:
    """One continuation of one prompt. Several samples of a prompt are several jobs, with seeds
    s, s + 1, …
    """

    prompt: tuple[int, ...]
    config: GenerationConfig
    logprobs: int = 0  # how many likely tokens to name beside each that is written
    # the prompt comes first, with its own log-probabilities where those are asked for
    echo: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True)
class EngineStats:
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


class _ActiveRequest:
    """A request that the engine is serving."""

    def __init__(
        self, job: GenerationJob, model: Model, capacity: int, stream: TokenStream, owner: Owner
    ) -> None:
        self.job = job
        self.stream = stream
        self.owners = [owner[: i + 1] for i in range(len(owner))]
        constraint = job.constraint or job.config.constraint
        request = requests([job.prompt], job.config, capacity)[0]
        state = constraint.new_state() if constraint is not None else None
        self.sequence = SequenceState(
            request, job.config.sampling, state, int(job.logprobs), job.echo
        )
        self.writer = TextWriter(
            detokenizer(model.tokenizer, job.prompt),
            job.config.stop,
            job.config.end_tokens,
            request.limit,
        )
        self.prompt_text = model.tokenizer.decode(job.prompt) if job.echo else ""

    def echo(self) -> TextChunk:
        said = (None, *self.sequence.echoed) if self.job.logprobs else ()
        return TextChunk(self.prompt_text, self.job.prompt, said)

    def chunk(self, written: StepOutput) -> TextChunk:
        """What these tokens let out, up to the end of the text."""
        text = ""
        used = 0
        for token in written.tokens:
            text = text + self.writer.push(token)
            used = used + 1
            if (
                self.sequence.constraint_state is not None
                and self.sequence.constraint_state.finished
            ):
                text += self.writer.end()
            if self.writer.done:
                break
        finish: FinishReason | None = self.writer.finish if self.writer.done else None
        return TextChunk(text, tuple(written.tokens[:used]), tuple(written.logprobs[:used]), finish)

    def finish(self, how: FinishReason, error: MalmoiError | None = None) -> None:
        self.stream.error = error
        self.stream.put(TextChunk(self.writer.end(), finish=how))


class Engine:
    """Serves jobs over one static cache of `slots` rows, each of `capacity` tokens (the model's
    context).
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 16,
        capacity: int | None = None,
        queue: int = 256,
        prefix: int = PREFIX_CACHE_BYTES,
        mode: StepMode | None = None,
    ) -> None:
        """`queue` jobs may wait; `prefix` bytes are kept of prompts read before (0: none);
        `mode`: see `Cohort`.
        """
        for name, value in (("slots", slots), ("queue", queue)):
            if value < 1:
                raise UsageError(f"{name} must be 1 or more, not {value}.")
        self.model = model
        self.queue = queue
        self.capacity = min(capacity or model.config.context, model.config.context)
        prefixes = PrefixCache(model.network, prefix) if prefix else None
        fast_argmax = model.generator.fast_argmax
        self.batch = DecodeBatch(
            model.network,
            slots,
            self.capacity,
            fast_argmax=fast_argmax,
            prefixes=prefixes,
            mode=mode,
        )
        self.waiting: deque[_ActiveRequest] = deque()
        self.active: dict[SequenceState, _ActiveRequest] = {}
        self.counts = dict.fromkeys(
            ("tokens", "prompt_tokens", "finished", "cancelled", "failed"), 0
        )
        self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="malmoi-engine", daemon=True)
        self.thread.start()

    def job(
        self,
        prompt: str | Sequence[int],
        *,
        logprobs: int = 0,
        echo: bool = False,
        **options: Unpack[GenerationSettings],
    ) -> GenerationJob:
        """A job from a text (or its tokens) and the settings of `generate`; it ends where this
        model's texts end.
        """
        tokens = self.model._prompts([prompt])[0] if isinstance(prompt, str) else prompt
        return GenerationJob(
            tuple(tokens), self.model._generation_config(**options), logprobs, echo
        )

    def submit(
        self,
        job: GenerationJob,
        on_chunk: Callable[[TextChunk], None] | None = None,
        *,
        owner: Owner = (),
    ) -> TokenStream:
        """Takes a job in, or refuses it at once: `Busy` where too many wait, `UsageError` where it
        cannot be done.

        A free slot goes to the owner that holds the fewest; among equals, to whoever came first.
        """
        self._check(job)
        request = _ActiveRequest(job, self.model, self.capacity, TokenStream(on_chunk), owner)
        with self.changed:
            if self.closing:
                raise MalmoiError("The engine is closing and takes no more requests.")
            if len(self.waiting) >= self.queue:
                raise QueueFull(f"{self.queue} requests are waiting already; try again later.")
            self.waiting.append(request)
            self.changed.notify()
        return request.stream

    def close(self, *, drain: bool = True) -> None:
        """Stops: after everything taken in is done, or with the rest cancelled."""
        with self.changed:
            self.closing = True
            for request in () if drain else (*self.waiting, *self.active.values()):
                request.stream.cancel()
            self.changed.notify()
        self.thread.join()

    def stats(self) -> EngineStats:
        with self.changed:
            return EngineStats(
                running=len(self.active),
                waiting=len(self.waiting),
                slots=self.batch.rows,
                prefix_tokens=self.batch.shared,
                **self.counts,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _check(self, job: GenerationJob) -> None:
        if job.config.n != 1 or job.config.beams != 1 or job.config.speculate:
            raise UsageError(
                "A job is one continuation: submit one for each sample, without beams and "
                "speculate."
            )
        if not job.prompt:
            raise UsageError("The prompt of a job needs at least one token.")
        check_prompt_length(job.prompt, self.capacity)
        wrong = next(
            (token for token in job.prompt if not 0 <= token < self.model.config.vocab), None
        )
        if wrong is not None:  # on a GPU such a token would take everyone down
            raise UsageError(
                f"The prompt has the token {wrong}, and the vocabulary ends at "
                f"{self.model.config.vocab}."
            )
        if not 0 <= job.logprobs <= self.model.config.vocab:
            raise UsageError(
                f"logprobs must be between 0 and the vocabulary's size, not {job.logprobs}."
            )

    # ------------------------------------------------------------------ the engine's own thread

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # nothing can be done any more, but nobody waits for ever
            self._fail_waiting(MalmoiError(f"The engine broke down: {error!r}."))
            raise

    def _serve(self) -> None:
        while self._admit():
            try:
                for part in (self.batch.prefill, self.batch.step):
                    self._deliver_all(part())
            # out of memory, a broken weight: those inside are told, the engine goes on
            except Exception as error:
                self._fail_all(
                    MalmoiError(f"The engine could not go on with this request: {error}")
                )

    def _admit(self) -> bool:
        """Lets cancelled requests go and waiting ones in; waits where there is nobody. False:
        all is over.
        """
        with self.changed:
            while not self.waiting and not self.active:
                if self.closing:
                    return False
                self.changed.wait()
            self._drop_cancelled()
            while self.waiting and not self.batch.full:
                request = self._next_guest()
                self.batch.add(request.sequence)
                self.active[request.sequence] = request
                self.counts["prompt_tokens"] += len(request.job.prompt)
        return True

    def _next_guest(self) -> _ActiveRequest:
        """One with many jobs does not keep the others out: the clients share the slots, and a
        client's requests.
        """
        held = Counter(owner for request in self.active.values() for owner in request.owners)
        request = min(self.waiting, key=lambda request: [held[owner] for owner in request.owners])
        self.waiting.remove(request)
        return request

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.active.values() if request.stream.cancelled]:
            self._finish(request, "cancelled")
            request.finish("cancelled")
        for request in [request for request in self.waiting if request.stream.cancelled]:
            self.waiting.remove(request)
            self.counts["cancelled"] += 1
            request.finish("cancelled")

    def _deliver_all(self, results: list[StepOutput]) -> None:
        """Gives everyone what was written for them; who is over leaves. One guest's failure is
        its own.
        """
        for written in results:
            request = self.active.get(written.sequence)
            if request is None:  # steps that were under way when it left
                continue
            try:
                self._deliver(request, written)
            except Exception as error:
                written.sequence.error = error
        for request in [
            request for request in self.active.values() if request.sequence.error is not None
        ]:
            self._fail(request, request.sequence.error)

    def _deliver(self, request: _ActiveRequest, written: StepOutput) -> None:
        if request.job.echo and len(written.sequence.tokens) == len(request.job.prompt) + len(
            written.tokens
        ):
            request.stream.put(request.echo())
        piece = request.chunk(written)
        self._count("tokens", len(piece.tokens))
        if piece.finish is not None:
            self._finish(request, "finished")
        request.stream.put(piece)

    def _fail(self, request: _ActiveRequest, error: Exception | None) -> None:
        self._finish(request, "failed")
        request.finish(
            "error",
            error
            if isinstance(error, MalmoiError)
            else MalmoiError(f"The request failed: {error!r}."),
        )

    def _finish(self, request: _ActiveRequest, how: str) -> None:
        self.batch.remove(request.sequence)
        with self.changed:
            del self.active[request.sequence]
            self.counts[how] += 1

    def _fail_waiting(self, error: MalmoiError) -> None:
        with self.changed:
            self.closing = True
            for request in (*self.waiting, *self.active.values()):
                request.finish("error", error)
            self.waiting.clear()

    def _fail_all(self, error: MalmoiError) -> None:
        for request in list(self.active.values()):
            self._fail(request, error)

    def _count(self, what: str, number: int) -> None:
        with self.changed:
            self.counts[what] += number
