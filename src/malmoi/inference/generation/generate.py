"""Continuing prompts: tokens by `Decoding`, beams or drafts, and `write` turns those into text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from malmoi.inference.generation.batch import BatchPool
from malmoi.inference.generation.beam_search import BeamSettings, beam_search
from malmoi.inference.generation.config import GenerationConfig, GenerationRequest, requests
from malmoi.inference.generation.constraints import Constraint
from malmoi.inference.generation.detokenize import TextWriter, detokenizer
from malmoi.inference.generation.fast_argmax import FastArgmax
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.generation.prompt_lookup import PromptLookup
from malmoi.inference.generation.sampling import Sampling
from malmoi.inference.generation.token_selection import SequenceState, StepOutput
from malmoi.model import Network
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import length_batches

__all__ = [
    "Decoding",
    "GenerationConfig",
    "GenerationRequest",
    "TextGenerator",
    "continuations",
    "requests",
    "stream_texts",
]


class Decoding:
    """Requests that were all there from the start, continued together."""

    def __init__(
        self,
        network: Network,
        wanted: Sequence[GenerationRequest],
        sampling: Sampling,
        fast_argmax: FastArgmax | None = None,
        constraint: Constraint | None = None,
        pool: BatchPool | None = None,
    ) -> None:
        self.sequences = [
            SequenceState(request, sampling, constraint.new_state() if constraint else None)
            for request in wanted
        ]
        self.number = {sequence: i for i, sequence in enumerate(self.sequences)}
        self.batches = pool or BatchPool()
        # the last token is never read
        capacity = max(len(request.prompt) + request.limit for request in wanted) - 1
        self.batch = self.batches.acquire(network, len(wanted), capacity, fast_argmax)
        # samples of a prompt read it once
        repeated = len({request.prompt for request in wanted}) < len(wanted)
        self.batch.prefixes = PrefixCache(network) if repeated else None
        for sequence in self.sequences:
            self.batch.add(sequence)

    def step(self) -> dict[int, list[int]]:
        """The next token of every request that still runs; on a GPU the next few."""
        written = (
            self._prefill()
            if any(not sequence.decoding for sequence in self.batch.sequences)
            else self.batch.step()
        )
        for sequence in self.batch.sequences:
            if sequence.error is not None:
                raise sequence.error
        return {
            self.number[one.sequence]: one.tokens
            for one in written
            if one.sequence in self.batch.sequences
        }

    def _prefill(self) -> list[StepOutput]:
        """All prompts, part by part; the first token of each comes when the last is read."""
        first: list[StepOutput] = []
        while any(not sequence.decoding for sequence in self.batch.sequences):
            first += self.batch.prefill()
        return first

    def drop(self, finished: Iterable[int]) -> None:
        """These requests are over."""
        for i in finished:
            if self.sequences[i] in self.batch.sequences:
                self.batch.remove(self.sequences[i])

    def close(self) -> None:
        """Whoever is left goes, and the cohort may serve others."""
        self.batches.release(self.batch)

    @property
    def running(self) -> bool:
        return bool(self.batch.sequences)


@dataclass(frozen=True)
class TextGenerator:
    """What writes: a network with an lm head, its tokenizer, and a screen where greedy decoding
    has one.
    """

    network: Network
    tokenizer: Tokenizer
    fast_argmax: FastArgmax | None = None
    batches: BatchPool = field(default_factory=BatchPool)


def stream_texts(
    generator: TextGenerator, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> Iterator[tuple[int, str]]:
    """Pieces of text as they come, each with the number of its continuation: prompt i's sample j
    is i · n + j.
    """
    # refuses at once
    return _write_all(
        generator, requests(prompts, config, generator.network.config.context), config
    )


def _write_all(
    generator: TextGenerator, wanted: Sequence[GenerationRequest], config: GenerationConfig
) -> Iterator[tuple[int, str]]:
    if config.beams > 1 or config.speculate:
        for i, request in enumerate(wanted):
            yield from ((i, text) for text in _write_one(generator, request, config))
        return
    for group in length_batches([len(request.prompt) + request.limit for request in wanted]):
        for i, text in _write_group(generator, [wanted[i] for i in group], config):
            yield group[i], text


def _write_group(
    generator: TextGenerator, wanted: Sequence[GenerationRequest], config: GenerationConfig
) -> Iterator[tuple[int, str]]:
    writers = [_writer(generator, request, config) for request in wanted]
    decoding = Decoding(
        generator.network,
        wanted,
        config.sampling,
        generator.fast_argmax,
        config.constraint,
        generator.batches,
    )
    try:
        while decoding.running:
            for i, tokens in decoding.step().items():
                if text := _push(writers[i], tokens, decoding.sequences[i]):
                    yield i, text
            decoding.drop(i for i, writer in enumerate(writers) if writer.done)
    finally:
        decoding.close()


def _push(writer: TextWriter, tokens: Sequence[int], sequence: SequenceState) -> str:
    """The text that these tokens let out, up to its end."""
    text = ""
    for token in tokens:
        text += writer.push(token)
        if sequence.constraint_state is not None and sequence.constraint_state.finished:
            text += writer.end()
        if writer.done:
            break
    return text


def _write_one(
    generator: TextGenerator, request: GenerationRequest, config: GenerationConfig
) -> Iterator[str]:
    """A request that does not share its steps: several beams, or several tokens a step."""
    writer = _writer(generator, request, config)
    if config.beams > 1:
        search = BeamSettings(
            config.beams,
            request.limit,
            config.end_tokens,
            config.length_penalty,
            config.early_stopping,
        )
        tokens: Iterable[int] = beam_search(generator.network, request.prompt, search)
    else:
        tokens = PromptLookup(
            generator.network, request.prompt, request.limit, generator.fast_argmax
        )
    for token in tokens:
        if text := writer.push(token):
            yield text
        if writer.done:
            return


def _writer(
    generator: TextGenerator, request: GenerationRequest, config: GenerationConfig
) -> TextWriter:
    return TextWriter(
        detokenizer(generator.tokenizer, request.prompt),
        config.stop,
        config.end_tokens,
        request.limit,
    )


def continuations(
    generator: TextGenerator, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> list[list[str]]:
    """The continuations of every prompt, `n` each."""
    texts = [""] * (len(prompts) * config.n)
    for i, text in stream_texts(generator, prompts, config):
        texts[i] += text
    return [texts[i : i + config.n] for i in range(0, len(texts), config.n)]
