"""The engine: requests queue, join the running batch when a slot is free, and leave when done.

    with Engine(model, slots=16) as engine:
        for chunk in engine.submit(engine.job("The state of", max_new_tokens=40)):
            print(chunk.text, end="")

One thread does all the work; the public methods are thread-safe.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Self, Unpack

from malmoi.errors import MalmoiError, UsageError
from malmoi.inference.generation.batch import DecodeBatch
from malmoi.inference.generation.decode_steps import StepMode
from malmoi.inference.generation.generate import writer_for
from malmoi.inference.generation.generation_config import check_prompt_length
from malmoi.inference.generation.keywords import GenerationSettings
from malmoi.inference.generation.options import GenerationConfig
from malmoi.inference.generation.prefix_cache import PREFIX_CACHE_BYTES, PrefixCache
from malmoi.inference.generation.token_selection import SequenceState, StepOutput, new_sequences
from malmoi.inference.model import Model
from malmoi.inference.stream import FinishReason, TextChunk, TokenStream
from malmoi.system.limits import MAX_SIZE, check_whole_number
from malmoi.system.threads import ThreadTuner, inference_threads

Owner = tuple[Hashable, ...]  # (client, request), for fair scheduling


COUNTERS = ("tokens", "prompt_tokens", "finished", "cancelled", "failed")


class QueueFull(MalmoiError):
    """The queue is full: try again later."""


@dataclass(frozen=True)
class GenerationJob:
    """One continuation of one prompt; n samples are n jobs with seeds s, s + 1, …"""

    prompt: tuple[int, ...]
    config: GenerationConfig
    logprobs: int = 0  # how many of the most likely tokens to return with each generated one
    # return the prompt first, with its log-probabilities if requested
    echo: bool = False


@dataclass(frozen=True)
class EngineStats:
    """Counters and gauges of an engine."""

    running: int
    waiting: int
    slots: int
    cache_usage: float  # share of the KV cache that holds tokens
    tokens: int  # generated so far
    prompt_tokens: int  # of the prompts admitted so far
    prefix_tokens: int  # of those, loaded from the prefix cache instead of being read
    finished: int
    cancelled: int
    failed: int


class _ActiveRequest:
    """A request in the queue or in the batch."""

    def __init__(
        self, job: GenerationJob, model: Model, capacity: int, stream: TokenStream, owner: Owner
    ) -> None:
        self.job = job
        self.stream = stream
        self.owners = [owner[: i + 1] for i in range(len(owner))]
        self.sequence = new_sequences(
            [job.prompt], job.config, capacity, logprobs=int(job.logprobs), echo=job.echo
        )[0]
        self.writer = writer_for(model.tokenizer, self.sequence, job.config)
        self.prompt_text = model.tokenizer.decode(job.prompt) if job.echo else ""

    def echo(self) -> TextChunk:
        logprobs = (None, *self.sequence.echoed) if self.job.logprobs else ()
        return TextChunk(self.prompt_text, self.job.prompt, logprobs)

    def chunk(self, written: StepOutput) -> TextChunk:
        """The text of these tokens, up to its end."""
        text, used = self.writer.push_all(written.tokens, self.sequence.constraint_state)
        finish: FinishReason | None = self.writer.finish if self.writer.done else None
        return TextChunk(text, tuple(written.tokens[:used]), tuple(written.logprobs[:used]), finish)

    def finish(self, how: FinishReason, error: MalmoiError | None = None) -> None:
        self.stream.error = error
        self.stream.put(TextChunk(self.writer.end(), finish=how))


class Engine:
    """Serves jobs from one static cache of `slots` rows of `capacity` tokens (the context)."""

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
        """`queue`: maximum number of waiting jobs; `prefix`: bytes of cached prompts (0: none)."""
        check_whole_number("slots", slots, 1, MAX_SIZE)
        check_whole_number("queue", queue, 1, MAX_SIZE)
        self.model = model
        self.queue = queue
        self.capacity = min(capacity or model.config.context, model.config.max_length)
        self.batch = DecodeBatch(
            model.network,
            slots,
            self.capacity,
            fast_argmax=model.generator.fast_argmax,
            prefixes=PrefixCache(model.network, prefix) if prefix else None,
            mode=mode,
        )
        self.waiting: deque[_ActiveRequest] = deque()
        self.active: dict[SequenceState, _ActiveRequest] = {}
        self.counts: Counter[str] = Counter()
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
        """Builds a job from a text or its tokens and the options of `generate`."""
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
        """Queues a job; raises `QueueFull` if too many wait, `UsageError` if it is impossible.

        A free slot goes to the owner that holds the fewest, then to the first in the queue.
        """
        self._check(job)
        request = _ActiveRequest(job, self.model, self.capacity, TokenStream(on_chunk), owner)
        with self.changed:
            if self.closing:
                raise MalmoiError("The engine is closing and takes no more requests.")
            if len(self.waiting) >= self.queue:
                raise QueueFull(
                    "{queue} requests are waiting already; try again later.", queue=self.queue
                )
            self.waiting.append(request)
            self.changed.notify()
        return request.stream

    def close(self, *, drain: bool = True) -> None:
        """Stops the engine after draining the queue or cancelling the remaining requests."""
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
                cache_usage=sum(one.tokens_read for one in self.active)
                / (self.batch.rows * self.capacity),
                prefix_tokens=self.batch.shared,
                **{name: self.counts[name] for name in COUNTERS},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def _check(self, job: GenerationJob) -> None:
        if job.config.n != 1 or job.config.beams != 1 or job.config.speculate:
            raise UsageError(
                "A job is a single continuation: n, beams and speculate are not supported."
            )
        if not job.prompt:
            raise UsageError("The prompt of a job needs at least one token.")
        check_prompt_length(job.prompt, self.capacity)
        vocab = self.model.config.vocab
        for token in job.prompt:
            if not 0 <= token < vocab:  # on a GPU it would crash the whole batch
                raise UsageError(
                    "The prompt has the token {token}; the vocabulary has {vocab}.",
                    token=token,
                    vocab=vocab,
                )
        check_whole_number("logprobs", job.logprobs, 0, vocab)

    # ------------------------------------------------------------------ the engine's own thread

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # so that no caller waits forever
            self._fail_waiting(MalmoiError("The engine failed: {error}.", error=repr(error)))
            raise

    def _serve(self) -> None:
        while self._admit():
            with inference_threads(self.model.network.device) as threads:
                self._step(threads)
                while self.active and self._admit():
                    self._step(threads)

    def _step(self, threads: ThreadTuner) -> None:
        """Reads a chunk of the prompts and decodes a token of each request."""
        threads.step(len(self.active))
        try:
            for part in (self.batch.prefill, self.batch.step):
                self._deliver_all(part())
        except Exception as error:  # such as out of memory: only the active requests fail
            failure = MalmoiError(
                "The engine could not continue this request: {error}", error=error
            )
            for request in list(self.active.values()):
                self._fail(request, failure)

    def _admit(self) -> bool:
        """Drops cancelled requests and admits waiting ones; blocks while idle. False: closed."""
        with self.changed:
            while not self.waiting and not self.active:
                if self.closing:
                    return False
                self.changed.wait()
            self._drop_cancelled()
            while self.waiting and not self.batch.full:
                request = self._next_request()
                self.batch.add(request.sequence)
                self.active[request.sequence] = request
                request.stream.admitted = perf_counter()
                self.counts["prompt_tokens"] += len(request.job.prompt)
        return True

    def _next_request(self) -> _ActiveRequest:
        """The next waiting request; slots are shared among clients, then a client's requests."""
        held = Counter(owner for request in self.active.values() for owner in request.owners)
        request = min(self.waiting, key=lambda request: [held[owner] for owner in request.owners])
        self.waiting.remove(request)
        return request

    def _drop_cancelled(self) -> None:
        for request in [one for one in self.active.values() if one.stream.cancelled]:
            self._finish(request, "cancelled")
            request.finish("cancelled")
        for request in [one for one in self.waiting if one.stream.cancelled]:
            self.waiting.remove(request)
            self.counts["cancelled"] += 1
            request.finish("cancelled")

    def _deliver_all(self, results: list[StepOutput]) -> None:
        """Delivers new text and removes finished requests; a failure affects only one request."""
        for written in results:
            request = self.active.get(written.sequence)
            if request is None:  # it left while these steps were in flight
                continue
            try:
                self._deliver(request, written)
            except Exception as error:
                written.sequence.error = error
        for request in list(self.active.values()):
            if request.sequence.error is not None:
                self._fail(request, request.sequence.error)

    def _deliver(self, request: _ActiveRequest, written: StepOutput) -> None:
        first = len(written.sequence.tokens) == len(request.job.prompt) + len(written.tokens)
        if request.job.echo and first:
            request.stream.put(request.echo())
        chunk = request.chunk(written)
        self._count("tokens", len(chunk.tokens))
        if chunk.finish is not None:
            self._finish(request, "finished")
        request.stream.put(chunk)

    def _fail(self, request: _ActiveRequest, error: Exception) -> None:
        self._finish(request, "failed")
        if not isinstance(error, MalmoiError):
            error = MalmoiError("The request failed: {error}.", error=repr(error))
        request.finish("error", error)

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

    def _count(self, what: str, number: int) -> None:
        with self.changed:
            self.counts[what] += number
