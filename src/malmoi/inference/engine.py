"""The engine: requests queue, join the running batch when a slot is free, and leave when done.

    with Engine(model, slots=16) as engine:
        for chunk in engine.submit(engine.job("The state of", max_new_tokens=40)):
            print(chunk.text, end="")

One thread does all the work; the public methods are thread-safe.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Literal, Self, Unpack

from malmoi.errors import MalmoiError, ensure, require_that
from malmoi.inference.generation.batch import DecodeBatch, StepMode
from malmoi.inference.generation.generate import writer_for
from malmoi.inference.generation.keywords import GenerationSettings
from malmoi.inference.generation.options import GenerationConfig
from malmoi.inference.generation.prefix_cache import PREFIX_CACHE_BYTES, PrefixCache
from malmoi.inference.generation.sampling import Logprob, SequenceState, StepOutput, new_sequences
from malmoi.inference.model import Model
from malmoi.system.threads import ThreadTuner, inference_threads
from malmoi.system.untrusted import MAX_SIZE, check_whole_number

Owner = tuple[Hashable, ...]  # (client, request), for fair scheduling
FinishReason = Literal["stop", "length", "cancelled", "error"]
# Preparing a request takes a tenth of it, reading a prompt alone several times it.
GATHER_SECONDS = 0.0005
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

    @property
    def ends_by_tokens(self) -> bool:
        """Whether the engine needs no text to end it, so that a receiver may make the text."""
        return not (self.echo or self.config.stop or self.config.constraint)


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


@dataclass(frozen=True)
class TextChunk:
    """The output since the last chunk; `text` may lag behind `tokens`."""

    text: str
    tokens: tuple[int, ...] = ()
    # one per token if requested; a prompt's first token has none
    logprobs: tuple[Logprob | None, ...] = ()
    finish: FinishReason | None = None  # why the text ended; None before that


class TokenStream:
    """A request and its output, to be read once, from any thread: chunk by chunk, or as a result.

    With `on_chunk`, chunks go to that function instead, in the engine's thread.
    """

    def __init__(
        self,
        job: GenerationJob,
        model: Model,
        capacity: int,
        owner: Owner,
        on_chunk: Callable[[TextChunk], None] | None,
        *,
        text: bool = True,
    ) -> None:
        self.job = job
        self.owners = [owner[: i + 1] for i in range(len(owner))]
        self.sequence = new_sequences(
            [job.prompt], job.config, capacity, logprobs=int(job.logprobs), echo=job.echo
        )[0]
        self.writer = writer_for(model.tokenizer, self.sequence, job.config, text=text)
        self.cancelled = False
        self.admitted = 0.0  # when it left the queue, by perf_counter
        self.error: MalmoiError | None = None  # set if the last chunk's finish reason is "error"
        self._chunks: SimpleQueue[TextChunk] = SimpleQueue()
        self.put = on_chunk or self._chunks.put

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

    # ------------------------------------------------------------------ called by the engine

    def chunk(self, written: StepOutput) -> TextChunk:
        """The text of these tokens, up to its end."""
        text, used = self.writer.push_all(written.tokens, self.sequence.constraint_state)
        finish: FinishReason | None = self.writer.finish if self.writer.done else None
        return TextChunk(text, tuple(written.tokens[:used]), tuple(written.logprobs[:used]), finish)

    def finish(self, how: FinishReason, error: MalmoiError | None = None) -> None:
        self.error = error
        self.put(TextChunk(self.writer.end(), finish=how))


def join_chunks(chunks: Sequence[TextChunk]) -> TextChunk:
    """Joins chunks into one."""
    text = "".join(chunk.text for chunk in chunks)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    logprobs = tuple(one for chunk in chunks for one in chunk.logprobs)
    return TextChunk(text, tokens, logprobs, chunks[-1].finish or "stop")


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
        self.waiting: deque[TokenStream] = deque()
        self.active: dict[SequenceState, TokenStream] = {}
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
        text: bool = True,
    ) -> TokenStream:
        """Queues a job; raises `QueueFull` if too many wait, `UsageError` if it is impossible.

        A free slot goes to the owner that holds the fewest, then to the first in the queue. Without
        `text`, chunks have only tokens: for jobs that end by these.
        """
        self._check(job)
        request = TokenStream(job, self.model, self.capacity, owner, on_chunk, text=text)
        with self.changed:
            ensure(not self.closing, "The engine is closing and takes no more requests.")
            ensure(
                len(self.waiting) < self.queue,
                "{queue} requests are waiting already; try again later.",
                raises=QueueFull,
                queue=self.queue,
            )
            self.waiting.append(request)
            self.changed.notify()
        return request

    def close(self, *, drain: bool = True) -> None:
        """Stops the engine after draining the queue or cancelling the remaining requests."""
        with self.changed:
            self.closing = True
            for request in () if drain else (*self.waiting, *self.active.values()):
                request.cancel()
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
        require_that(
            job.config.n == 1 and job.config.beams == 1 and not job.config.speculate,
            "A job is a single continuation: n, beams and speculate are not supported.",
        )
        require_that(job.prompt, "The prompt of a job needs at least one token.")
        vocab = self.model.config.vocab
        unknown = [token for token in job.prompt if not 0 <= token < vocab]
        require_that(  # on a GPU it would crash the whole batch
            not unknown,
            "The prompt has the token {token}; the vocabulary has {vocab}.",
            token=next(iter(unknown), 0),
            vocab=vocab,
        )
        check_whole_number("logprobs", job.logprobs, 0, vocab)

    # ------------------------------------------------------------------ the engine's own thread

    def _work(self) -> None:
        try:
            self.batch.steps.warm_up()
            while self._admit():
                with inference_threads(self.model.network.device) as threads:
                    self._step(threads)
                    while self.active and self._admit():
                        self._step(threads)
        except BaseException as error:  # so that no caller waits forever
            failure = MalmoiError("The engine failed: {error}.", error=repr(error))
            with self.changed:
                self.closing = True
                for request in (*self.waiting, *self.active.values()):
                    request.finish("error", failure)
                self.waiting.clear()
            raise

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
                self._gather()
            for request in (*self.active.values(), *self.waiting):
                if request.cancelled:
                    self._leave(request, "cancelled")
                    request.finish("cancelled")
            for request in self._next_requests():
                self.batch.add(request.sequence)
                self.active[request.sequence] = request
                request.admitted = perf_counter()
                self.counts["prompt_tokens"] += len(request.job.prompt)
        return True

    def _gather(self) -> None:
        """Waits until no more requests arrive, so that a burst is read and decoded together."""
        arrived = 0
        while arrived < len(self.waiting) < self.batch.rows:
            arrived = len(self.waiting)
            self.changed.wait(GATHER_SECONDS)

    def _next_requests(self) -> Iterator[TokenStream]:
        """Waiting requests for the free slots, shared among clients, then a client's requests."""
        active = self.active.values() if self.waiting else ()
        held = Counter(owner for request in active for owner in request.owners)
        while self.waiting and not self.batch.full:
            request = min(
                self.waiting, key=lambda request: [held[owner] for owner in request.owners]
            )
            self.waiting.remove(request)
            held.update(request.owners)
            yield request

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

    def _deliver(self, request: TokenStream, written: StepOutput) -> None:
        first = len(written.sequence.tokens) == len(request.job.prompt) + len(written.tokens)
        if request.job.echo and first:
            text = self.model.tokenizer.decode(request.job.prompt)
            logprobs = (None, *request.sequence.echoed) if request.job.logprobs else ()
            request.put(TextChunk(text, request.job.prompt, logprobs))
        chunk = request.chunk(written)
        self.counts["tokens"] += len(chunk.tokens)
        if chunk.finish is not None:
            self._leave(request, "finished")
        request.put(chunk)

    def _fail(self, request: TokenStream, error: Exception) -> None:
        self._leave(request, "failed")
        if not isinstance(error, MalmoiError):
            error = MalmoiError("The request failed: {error}.", error=repr(error))
        request.finish("error", error)

    def _leave(self, request: TokenStream, how: str) -> None:
        """Takes a request out of the batch or the queue."""
        with self.changed:
            if self.active.pop(request.sequence, None) is not None:
                self.batch.remove(request.sequence)
            else:
                self.waiting.remove(request)
            self.counts[how] += 1
