"""Continuous batching over one static KV cache: a request takes a free row until it is done.

The rows in use are always the first ones: when a request leaves, the last one moves into its row,
so that a step is one product over exactly the active requests.

A step takes one token of all rows through the network. Steps read and write fixed tensors, so that
a CUDA graph can repeat them. On a GPU, requests whose next token depends only on the logits run
several steps ahead, and their tokens are read while the next ones are computed: the GPU never waits
for Python. S rows, B rows of a pass, D width, V vocabulary.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from malmoi.inference.generation.prefix_cache import BLOCK_TOKENS, PrefixCache
from malmoi.inference.generation.sampling import (
    BatchSampler,
    SequenceState,
    StepOutput,
    TokenSelector,
    logprobs_with_top,
)
from malmoi.kernels.cuda_graphs import GraphPool, bucket_rows, bucket_width
from malmoi.kernels.decode_step import MAX_FUSED_ROWS, fused_step
from malmoi.kernels.fast_argmax import FastArgmax
from malmoi.kernels.kv_slots import (
    FusedSlotView,
    KVSlots,
    SlotView,
    common_prefix_length,
    has_decode_kernel,
    prefill_rows,
)
from malmoi.model import Network
from malmoi.system.machine import per_device, this_machine
from malmoi.tokenizer.padding import MAX_ROWS

if TYPE_CHECKING:
    from malmoi.kernels.triton_step import FusedStep

# prompt tokens between two decoding steps, so that a long prompt does not stall other requests
PREFILL_CHUNK_TOKENS = {"cpu": 128, "cuda": 4096}
MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # tokens of one prompt in a pass
SINGLE_PASS_ROWS = 4  # multiplies the chunk while nothing is being decoded
STEPS_AHEAD = 8  # steps submitted together

# plain: one step at a time. captured: fixed shapes, CUDA graphs on a GPU, several steps ahead.
StepMode = Literal["plain", "captured"]


@dataclass(frozen=True)
class InFlightSteps:
    """Submitted steps: their sequences with the rows they had, and their tokens [steps, S]."""

    sequences: list[tuple[SequenceState, int]]
    tokens: Tensor
    ready: torch.cuda.Event | None

    def collect(self) -> list[StepOutput]:
        """Waits for these steps and returns their tokens."""
        if self.ready is not None:
            self.ready.synchronize()
        columns = self.tokens.t().tolist()
        for sequence, row in self.sequences:
            sequence.tokens += columns[row]
        return [StepOutput(sequence, columns[row], []) for sequence, row in self.sequences]


class DecodeSteps:
    """The state of all rows, and the step that advances them."""

    @torch.inference_mode()
    def __init__(
        self, network: Network, slots: KVSlots, selector: TokenSelector, mode: StepMode
    ) -> None:
        self.network = network
        self.slots = slots
        self.selector = selector
        self.captured = mode != "plain"
        self.kernel = self.captured and has_decode_kernel(network, slots.device)
        self.gpu_fused = gpu_fused_step(network, slots) if self.captured else None
        fusible = slots.device.type == "cpu" and not self.captured and not slots.rings
        self.fused = fused_step(network.trunk, slots.keys, slots.values) if fusible else None
        self.rows = len(slots.numbers)
        self.device = slots.device
        # each row's newest token, not yet read by the network
        self.last = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.at = torch.zeros_like(self.last)  # the token's position
        self.decoding = torch.zeros_like(self.last, dtype=torch.bool)  # rows that are generating
        # (rows, width): one step of the first rows, whose tokens see the first `width` places
        self.run = GraphPool(self._pass, (self.last, self.at)).run if self.captured else self._pass

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records the graphs of every number of rows, where their shapes depend on it alone."""
        if self.kernel and self.device.type == "cuda":
            for rows in {bucket_rows(used, self.rows) for used in range(1, self.rows + 1)}:
                self.run(rows, self.slots.capacity)

    def start(self, sequences: Sequence[SequenceState]) -> None:
        """Marks these sequences as having read their prompts."""
        rows = self._numbers([sequence.row for sequence in sequences])
        self.at[rows] = self._numbers([sequence.tokens_read for sequence in sequences])
        self.decoding[rows] = True

    def move(self, source: int, target: int) -> None:
        for state in (self.last, self.at, self.decoding):
            state[target] = state[source]

    def run_one(self, sequences: Sequence[SequenceState], used: int) -> list[StepOutput]:
        """Runs one step of the first `used` rows."""
        longest = max(sequence.tokens_read for sequence in sequences)
        found = self.run(*self._shape(used, longest + 1))
        for sequence in sequences:
            sequence.tokens_read += 1
        rows = self._numbers([sequence.row for sequence in sequences])
        choose = self.selector.select_from_logits if self.captured else self.selector.select
        written = choose(sequences, found[rows])
        self.feed(written)
        return written

    def feed(self, written: Sequence[StepOutput]) -> None:
        """Makes the selected tokens the next input."""
        rows = self._numbers([one.sequence.row for one in written])
        self.last[rows] = self._numbers([one.tokens[-1] for one in written])

    def submit(
        self, sequences: Sequence[SequenceState], used: int, most: int = STEPS_AHEAD
    ) -> InFlightSteps:
        """Submits several steps without waiting for any of them."""
        count = min(most, max(sequence.tokens_left for sequence in sequences))
        shape = self._shape(used, max(sequence.tokens_read for sequence in sequences) + count)
        dice = BatchSampler(sequences, count, self.device)
        out = self.last.new_empty(count, self.rows)
        for step in range(count):
            logits = self.run(*shape)
            dice.sample(step, logits, self.last)
            out[step] = self.last
        for sequence in sequences:
            sequence.tokens_read += count
        rows = [(sequence, sequence.row) for sequence in sequences]
        if self.device.type != "cuda":
            return InFlightSteps(rows, out, None)
        landing = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        landing.copy_(out, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return InFlightSteps(rows, landing, landed)

    def _shape(self, used: int, width: int) -> tuple[int, int]:
        if self.captured:
            most = self.slots.capacity
            return bucket_rows(used, self.rows), most if self.kernel else bucket_width(width, most)
        return used, min(width, self.slots.capacity)

    def _pass(self, rows: int, width: int) -> Tensor:
        """Runs one token of each of the first rows through the network; idle rows store no key.

        Returns logits, and makes the best the next tokens, or if nothing is captured hidden states.
        """
        live = self.decoding[:rows]
        at = self.at[:rows]
        # a finished row keeps running until the submitted steps end
        positions = at.clamp(max=self.slots.capacity - 1)
        if self.gpu_fused is not None and rows <= self.gpu_fused.most_rows:
            found = self.gpu_fused(self.last[:rows], positions, live)
        else:
            found = self._hidden(rows, width, positions, live)
            if self.captured:
                # a GPU may write them by columns, whose argmax takes longer than a copy
                found = self.network.read("lm", found).contiguous()
        if self.captured:
            self.last[:rows] = found.argmax(-1)
        at += live
        return found

    def _hidden(self, rows: int, width: int, positions: Tensor, live: Tensor) -> Tensor:
        if self.fused is not None and rows <= MAX_FUSED_ROWS:
            return self.fused(self.last[:rows], positions, live)
        view = FusedSlotView(self.slots, rows) if self.kernel else None
        hidden: Tensor = self.network.trunk(
            self.last[:rows, None],
            keep=live[:, None],
            positions=positions[:, None],
            cache=view or SlotView(self.slots, rows, width),
        )
        return hidden[:, -1]

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def gpu_fused_step(network: Network, slots: KVSlots) -> "FusedStep | None":
    """Logits in few kernels; None: torch's modules."""
    if not this_machine().fused or not has_decode_kernel(network, slots.device):
        return None
    from malmoi.kernels.triton_step import FusedStep, supports

    return FusedStep(network, slots) if supports(network) else None


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
            if sequence.decoding or self._waits_for_prefix(sequence, readers):
                continue
            longest = max(longest, min(len(sequence.unread), chunk, self.max_prefill_tokens))
            if readers and (len(readers) + 1) * longest > chunk:
                break
            readers.append(sequence)
        return readers

    def _waits_for_prefix(self, sequence: SequenceState, readers: Sequence[SequenceState]) -> bool:
        """Loads the cached prefix, unless another request is about to read more of the same.

        The last token is always read, since the prediction needs it.
        """
        if self.prefixes is None or sequence.tokens_read or sequence.echo:
            return False
        prompt = sequence.prompt[:-1]
        shared = max((common_prefix_length(prompt, other.prompt) for other in readers), default=0)
        common = shared // BLOCK_TOKENS * BLOCK_TOKENS
        if common > 0 and common > self.prefixes.cached_length(prompt):
            return True
        sequence.tokens_read = self.prefixes.load(prompt, self.slots, sequence.row)
        self.shared += sequence.tokens_read
        return False

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
