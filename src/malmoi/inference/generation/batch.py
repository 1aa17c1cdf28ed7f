"""Continuous batching over one static KV cache: a request takes a free row until it is done.

The rows in use are always the first ones: when a request leaves, the last one moves into its row,
so that a step is one product over exactly the active requests. S rows, B rows of a pass, D width, V
vocabulary.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from malmoi.inference.generation.decode_steps import (
    STEPS_AHEAD,
    DecodeSteps,
    InFlightSteps,
    StepMode,
)
from malmoi.inference.generation.prefix_cache import BLOCK_TOKENS, PrefixCache
from malmoi.inference.generation.token_selection import (
    SequenceState,
    StepOutput,
    TokenSelector,
    logprobs_with_top,
)
from malmoi.kernels.cuda_graphs import bucket_rows, bucket_width
from malmoi.kernels.fast_argmax import FastArgmax
from malmoi.kernels.kv_slots import KVSlots, common_prefix_length, prefill_rows
from malmoi.model import Network
from malmoi.system.machine import per_device
from malmoi.tokenizer.padding import MAX_ROWS

# prompt tokens between two decoding steps, so that a long prompt does not stall other requests
PREFILL_CHUNK_TOKENS = {"cpu": 128, "cuda": 4096}
MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # tokens of one prompt in a pass
SINGLE_PASS_ROWS = 4  # multiplies the chunk while nothing is being decoded


class DecodeBatch:
    """A network, a KV cache of `rows` rows, and the requests in them."""

    def __init__(
        self,
        network: Network,
        rows: int,
        capacity: int,
        *,
        fast_argmax: FastArgmax | None = None,
        prefixes: PrefixCache | None = None,
        mode: StepMode | None = None,
    ) -> None:
        """`mode`: how steps are run, by default "captured" on a GPU and "plain" elsewhere.

        Without `prefixes` to share, layers with a window keep only that in the cache.
        """
        self.network = network
        self.prefixes = prefixes
        self.rows = rows
        self.device = network.device
        self.chunk_tokens = per_device(PREFILL_CHUNK_TOKENS, self.device.type)
        self.max_prefill_tokens = per_device(MAX_PREFILL_TOKENS, self.device.type)
        tokens = self.max_prefill_tokens if prefixes is None else 0
        self.slots = KVSlots(network, rows, capacity, pass_tokens=tokens)
        self.selector = TokenSelector(network, fast_argmax)
        graphs = self.device.type == "cuda" and not network.config.recurrent
        usual: StepMode = "captured" if graphs else "plain"
        self.steps = DecodeSteps(network, self.slots, self.selector, mode or usual)
        self.in_flight: InFlightSteps | None = None
        self.sequences: list[SequenceState] = []  # the i-th has row i
        self.shared = 0  # prompt tokens loaded from the prefix cache
        self.weights = _places(network)

    # ------------------------------------------------------------------ joining and leaving

    @property
    def full(self) -> bool:
        return len(self.sequences) == self.rows

    @torch.inference_mode()
    def add(self, sequence: SequenceState) -> None:
        """Assigns a request the next row; `prefill` will read its prompt."""
        sequence.row = len(self.sequences)
        self.sequences.append(sequence)

    @torch.inference_mode()
    def remove(self, sequence: SequenceState) -> None:
        """Frees a row immediately; the last request moves into it."""
        mover = self.sequences.pop()
        if mover is not sequence:
            self.slots.copy(mover.row, sequence.row, mover.tokens_read)
            self.steps.move(mover.row, sequence.row)
            self.sequences[sequence.row] = mover
        self.steps.decoding[mover.row] = False
        mover.row = sequence.row

    # ------------------------------------------------------------------ reading prompts

    @torch.inference_mode()
    def prefill(self) -> list[StepOutput]:
        """Reads the next chunk of the prompts; those fully read get their first token."""
        readers = self._next_to_prefill()
        if not readers:
            return []
        size = min(self._chunk() // len(readers), self.max_prefill_tokens)
        parts = [sequence.unread[:size] for sequence in readers]
        rows = [sequence.row for sequence in readers]
        starts = [sequence.tokens_read for sequence in readers]
        hidden = prefill_rows(self.network, self.slots, rows, parts, starts)
        done: list[tuple[SequenceState, Tensor]] = []
        for sequence, part, states in zip(readers, parts, hidden, strict=True):
            self._echo(sequence, states[: len(part)])
            sequence.tokens_read += len(part)
            if not sequence.unread:
                done.append((sequence, states[len(part) - 1]))
        return self._first_tokens(done)

    def _first_tokens(self, ready: list[tuple[SequenceState, Tensor]]) -> list[StepOutput]:
        if not ready:
            return []
        sequences = [sequence for sequence, _ in ready]
        for sequence in sequences:
            sequence.decoding = True
            if self.prefixes is not None:
                self.prefixes.store(sequence.prompt, self.slots, sequence.row)
        written = self.selector.select(sequences, torch.stack([state for _, state in ready]))
        self.steps.start(sequences)
        self.steps.feed(written)
        return written

    def _chunk(self) -> int:
        decoding = any(sequence.decoding for sequence in self.sequences)
        return self.chunk_tokens * (1 if decoding else SINGLE_PASS_ROWS)

    def _next_to_prefill(self) -> list[SequenceState]:
        """The next prompts to read, in order of arrival, as many as fit in a chunk."""
        readers: list[SequenceState] = []
        longest = 0
        chunk = self._chunk()
        for sequence in self.sequences:
            if sequence.decoding or self._should_wait_for_prefix(sequence, readers):
                continue
            self._load_prefix(sequence)
            longest = max(longest, min(len(sequence.unread), chunk, self.max_prefill_tokens))
            if readers and (len(readers) + 1) * longest > chunk:
                break
            readers.append(sequence)
        return readers

    def _should_wait_for_prefix(
        self, sequence: SequenceState, readers: Sequence[SequenceState]
    ) -> bool:
        """Whether another request is about to read the same prefix, which can then be reused."""
        if self.prefixes is None or sequence.tokens_read or sequence.echo:
            return False
        prompt = sequence.prompt[:-1]
        shared = max((common_prefix_length(prompt, other.prompt) for other in readers), default=0)
        common = shared // BLOCK_TOKENS * BLOCK_TOKENS
        return common > 0 and common > self.prefixes.cached_length(prompt)

    def _load_prefix(self, sequence: SequenceState) -> None:
        """Loads the cached prefix; the last token is always read, since the prediction needs it."""
        if self.prefixes is not None and not sequence.tokens_read and not sequence.echo:
            prompt = sequence.prompt[:-1]
            sequence.tokens_read = self.prefixes.load(prompt, self.slots, sequence.row)
            self.shared += sequence.tokens_read

    def _echo(self, sequence: SequenceState, states: Tensor) -> None:
        if sequence.echo and sequence.top:
            start = sequence.tokens_read + 1
            targets = sequence.tokens[start : start + len(states)]
            logits = self.network.read("lm", states[: len(targets)])
            shown = torch.tensor(targets, dtype=torch.long, device=self.device)
            sequence.echoed += logprobs_with_top(logits, shown, sequence.top)

    # ------------------------------------------------------------------ decoding

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Decodes one token per request; on a GPU, returns the tokens of steps submitted before."""
        sequences = [one for one in self.sequences if one.decoding and one.tokens_left > 0]
        before = self.in_flight
        self.in_flight = None
        if sequences and self.steps.captured and all(one.can_run_ahead for one in sequences):
            # one step at a time while prompts wait to be read
            ahead = STEPS_AHEAD if all(one.decoding for one in self.sequences) else 1
            self.in_flight = self.steps.submit(sequences, len(self.sequences), ahead)
            sequences = []
        collected = before.collect() if before is not None else []
        return collected + (self.steps.run_one(sequences, len(self.sequences)) if sequences else [])

    # ------------------------------------------------------------------ reuse

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether it is large enough and the weights are where its graphs expect them."""
        large = self.rows >= rows and self.slots.capacity >= capacity
        return large and self.weights == _places(self.network)

    def clear(self) -> None:
        """Removes all requests."""
        for sequence in reversed(list(self.sequences)):
            self.remove(sequence)
        self.in_flight = None


class BatchPool:
    """Reuses a batch between calls: on a GPU its CUDA graphs are recorded only once."""

    def __init__(self) -> None:
        self.idle: DecodeBatch | None = None
        self.lock = threading.Lock()

    def acquire(
        self,
        network: Network,
        rows: int,
        capacity: int,
        fast_argmax: FastArgmax | None,
        prefixes: PrefixCache | None = None,
    ) -> DecodeBatch:
        with self.lock:
            kept = self.idle
            self.idle = None
        if kept is not None and kept.fits(rows, capacity):
            kept.prefixes = prefixes
            return kept
        if network.device.type == "cuda" and not network.config.recurrent:
            capacity = bucket_width(capacity, network.config.context)
            rows = bucket_rows(rows, MAX_ROWS)
        return DecodeBatch(network, rows, capacity, fast_argmax=fast_argmax, prefixes=prefixes)

    def release(self, batch: DecodeBatch) -> None:
        batch.clear()
        with self.lock:
            self.idle = batch if batch.steps.captured else None


def _places(network: Network) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in network.parameters())
