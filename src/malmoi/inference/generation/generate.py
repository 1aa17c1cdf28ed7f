"""Text generation: tokens by `Decoding`, beam search or prompt lookup, then detokenized."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from malmoi.inference.generation.batch import BatchPool
from malmoi.inference.generation.beam_search import beam_search
from malmoi.inference.generation.detokenize import TextWriter, detokenizer
from malmoi.inference.generation.options import GenerationConfig
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.generation.prompt_lookup import PromptLookup
from malmoi.inference.generation.token_selection import SequenceState, StepOutput, new_sequences
from malmoi.kernels.fast_argmax import FastArgmax
from malmoi.model import Network
from malmoi.system.threads import inference_threads
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.padding import length_batches


class Decoding:
    """A fixed set of requests, decoded together."""

    def __init__(
        self,
        network: Network,
        sequences: Sequence[SequenceState],
        fast_argmax: FastArgmax | None = None,
        pool: BatchPool | None = None,
    ) -> None:
        self.sequences = list(sequences)
        self.number = {sequence: i for i, sequence in enumerate(self.sequences)}
        self.batches = pool or BatchPool()
        # the last token is generated but never read
        capacity = max(len(sequence.prompt) + sequence.limit for sequence in sequences) - 1
        # samples of one prompt share its prefill
        repeated = len({sequence.prompt for sequence in sequences}) < len(sequences)
        prefixes = PrefixCache(network) if repeated else None
        self.batch = self.batches.acquire(network, len(sequences), capacity, fast_argmax, prefixes)
        for sequence in self.sequences:
            self.batch.add(sequence)

    def step(self) -> dict[int, list[int]]:
        """Decodes the next token of every running request; on a GPU, the next few."""
        written: list[StepOutput] = []
        while any(not sequence.decoding for sequence in self.batch.sequences):
            written += self.batch.prefill()
        written = written or self.batch.step()
        for sequence in self.batch.sequences:
            if sequence.error is not None:
                raise sequence.error
        return {
            self.number[one.sequence]: one.tokens
            for one in written
            if one.sequence in self.batch.sequences
        }

    def drop(self, finished: Iterable[int]) -> None:
        """Removes finished requests."""
        for i in finished:
            if self.sequences[i] in self.batch.sequences:
                self.batch.remove(self.sequences[i])

    def close(self) -> None:
        """Returns the batch to the pool."""
        self.batches.release(self.batch)

    @property
    def running(self) -> bool:
        return bool(self.batch.sequences)


@dataclass(frozen=True)
class TextGenerator:
    """A network with an lm head, its tokenizer, and a `FastArgmax` if it pays."""

    network: Network
    tokenizer: Tokenizer
    fast_argmax: FastArgmax | None = None
    batches: BatchPool = field(default_factory=BatchPool)


def stream_texts(
    generator: TextGenerator, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> Iterator[tuple[int, str]]:
    """Yields (continuation, chunk of text): sample j of prompt i is continuation i · n + j."""
    longest = generator.network.config.max_length
    wanted = new_sequences(prompts, config, longest)  # raises right away
    return _write_all(generator, wanted, config)


def _write_all(
    generator: TextGenerator, wanted: Sequence[SequenceState], config: GenerationConfig
) -> Iterator[tuple[int, str]]:
    if config.beams > 1 or config.speculate:
        for i, sequence in enumerate(wanted):
            yield from ((i, text) for text in _write_one(generator, sequence, config))
        return
    for group in length_batches([len(sequence.prompt) + sequence.limit for sequence in wanted]):
        for i, text in _write_group(generator, [wanted[i] for i in group], config):
            yield group[i], text


def _write_group(
    generator: TextGenerator, wanted: Sequence[SequenceState], config: GenerationConfig
) -> Iterator[tuple[int, str]]:
    writers = [writer_for(generator.tokenizer, sequence, config) for sequence in wanted]
    decoding = Decoding(generator.network, wanted, generator.fast_argmax, generator.batches)
    try:
        with inference_threads(generator.network.device) as threads:
            while decoding.running:
                for i, tokens in decoding.step().items():
                    if text := writers[i].push_all(tokens, wanted[i].constraint_state)[0]:
                        yield i, text
                    threads.step(len(tokens))
                decoding.drop(i for i, writer in enumerate(writers) if writer.done)
    finally:
        decoding.close()


def _write_one(
    generator: TextGenerator, sequence: SequenceState, config: GenerationConfig
) -> Iterator[str]:
    """Beam search or prompt lookup for one request, which shares no steps with the others."""
    writer = writer_for(generator.tokenizer, sequence, config)
    network = generator.network
    tokens: Iterable[int] = (
        beam_search(network, sequence.prompt, sequence.limit, config)
        if config.beams > 1
        else PromptLookup(network, sequence.prompt, sequence.limit, generator.fast_argmax)
    )
    for token in tokens:
        if text := writer.push(token):
            yield text
        if writer.done:
            return


def writer_for(
    tokenizer: Tokenizer, sequence: SequenceState, config: GenerationConfig
) -> TextWriter:
    decode = detokenizer(tokenizer, sequence.prompt)
    return TextWriter(decode, config.stop, config.end_tokens, sequence.limit)


def continuations(
    generator: TextGenerator, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> list[list[str]]:
    """Returns `n` continuations of every prompt."""
    texts = [""] * (len(prompts) * config.n)
    for i, text in stream_texts(generator, prompts, config):
        texts[i] += text
    return [texts[i : i + config.n] for i in range(0, len(texts), config.n)]
