"""Continuous batching over one static KV cache: a request takes a free row until it is done.

The rows in use are the first ones: a request that leaves makes room for the next, and the last rows
move up where fewer would do, so that a step is one product over the active requests.

A step takes one token of all rows through the network. Steps read and write fixed tensors, so that
a CUDA graph can repeat them. On a GPU, requests whose next token depends only on the logits run
several steps ahead, and their tokens are read while the next ones are computed: the GPU never waits
for Python. S rows, B rows of a pass, D width, V vocabulary.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from malmoi.inference.generation.prefix_cache import BLOCK_TOKENS, PrefixCache
from malmoi.inference.generation.sampling import (
    BatchSampler,
    SequenceState,
    StepOutput,
    TokenSelector,
    logprobs_with_top,
    sent,
    without_scores,
)
from malmoi.kernels.cuda_graphs import GraphPool, bucket_rows, bucket_width
from malmoi.kernels.decode_step import fused_step
from malmoi.kernels.fast_argmax import FastArgmax
from malmoi.kernels.kv_slots import (
    FusedSlotView,
    KVSlots,
    SlotView,
    common_prefix_length,
    has_decode_kernel,
    prefill_rows,
    read_rows,
)
from malmoi.model import Network
from malmoi.system.machine import per_device, this_machine
from malmoi.tokenizer.padding import MAX_ROWS, pad_to_width

if TYPE_CHECKING:
    from malmoi.kernels.triton_step import FusedStep

# prompt tokens between two decoding steps, so that a long prompt does not stall other requests
PREFILL_CHUNK_TOKENS = {"cpu": 128, "cuda": 4096}
MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}  # tokens of one prompt in a pass
SINGLE_PASS_ROWS = 4  # multiplies the chunk while nothing is being decoded
STEPS_AHEAD = 8  # steps submitted together
IDLE = -1  # in place of a position: the row generates nothing
NO_SCORES = -1  # in place of a token: the model's scores were not numbers

# A pass over prompts is repeated as a CUDA graph if it is short for a GPU and few shapes suffice:
# rows and lengths are powers of two.
GRAPH_FLOPS = 2 * 10**12
MOST_GRAPH_TOKENS = 8192
SHORTEST_PROMPT = 16
LONGEST_PROMPT = 512

# plain: one step at a time. captured: fixed shapes, CUDA graphs on a GPU, several steps ahead.
StepMode = Literal["plain", "captured"]


class InFlightSteps:
    """Submitted steps: their sequences with the rows they had, and their tokens [steps, S]."""

    def __init__(self, sequences: Sequence[SequenceState], tokens: Tensor) -> None:
        self.sequences = [(sequence, sequence.row) for sequence in sequences]
        self.tokens = tokens
        self.landed: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.landed = torch.cuda.Event()
            self.landed.record()

    def collect(self) -> list[StepOutput]:
        """Waits for these steps and returns their tokens; a request without scores fails."""
        if self.landed is not None:
            self.landed.synchronize()
        columns = self.tokens.t().tolist()
        written = []
        for sequence, row in self.sequences:
            if NO_SCORES in columns[row]:
                sequence.error = without_scores()
            else:
                sequence.tokens += columns[row]
                written.append(StepOutput(sequence, columns[row], []))
        return written


class PromptReader:
    """Reads prompts; on a GPU in few shapes, each repeated as a CUDA graph from its second time on.

    A pass over a few short prompts is hundreds of kernels: the host takes 13 ms to launch what an
    H200 runs in one (GPT-2 124M).
    """

    def __init__(self, network: Network, slots: KVSlots, *, captured: bool) -> None:
        self.network = network
        self.slots = slots
        most = GRAPH_FLOPS // (2 * sum(weight.numel() for weight in network.parameters()))
        self.most_tokens = min(most, MOST_GRAPH_TOKENS) if captured else 0  # of a pass, padded
        # rows, first places and lengths, then tokens; all in one copy
        size = 3 * len(slots.numbers) + self.most_tokens
        self.given = torch.zeros(size, dtype=torch.long, device=slots.device)
        self.run = GraphPool(self._pass, (self.given,), plain_runs=1).run

    def read(self, rows: list[int], parts: list[list[int]], starts: list[int]) -> Tensor:
        """The next tokens of some rows at once: hidden states [B, T, D], right-padded."""
        lengths = [len(part) for part in parts]
        count = bucket_rows(len(rows), len(self.slots.numbers))
        longest = max(SHORTEST_PROMPT, 1 << (max(lengths) - 1).bit_length())
        if count * longest > self.most_tokens or longest > LONGEST_PROMPT:
            return prefill_rows(self.network, self.slots, rows, parts, starts)
        where = pad_to_width((rows, starts, lengths), count)
        tokens = np.zeros((count, longest), np.int64)
        tokens[: len(parts)] = pad_to_width(parts, longest)
        given = np.concatenate((where, tokens), axis=None)
        self.given[: len(given)] = sent(torch.from_numpy(given), self.slots.device)
        width = bucket_width(max(map(sum, zip(starts, lengths, strict=True))), self.slots.capacity)
        return self.run(count, longest, width)[: len(parts)]

    def _pass(self, count: int, longest: int, width: int) -> Tensor:
        where, tokens = self.given[: count * (3 + longest)].split((3 * count, count * longest))
        shape = (count, longest)
        return read_rows(self.network, self.slots, where.view(3, -1), tokens.view(shape), width)


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
        self.at = torch.full_like(self.last, IDLE)  # the token's position
        # (rows, width): one step of the first rows, whose tokens see the first `width` places
        self.run = GraphPool(self._pass, (self.last, self.at)).run if self.captured else self._pass

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records the graphs of every number of rows, where their shapes depend on it alone."""
        if self.kernel and self.device.type == "cuda":
            for rows in {bucket_rows(used, self.rows) for used in range(1, self.rows + 1)}:
                self.run(rows, self.slots.capacity)

    def move(self, source: int, target: int) -> None:
        self.last[target] = self.last[source]

    def run_one(self, sequences: Sequence[SequenceState], used: int) -> list[StepOutput]:
        """Runs one step of the first `used` rows."""
        self._place(sequences)
        longest = max(sequence.tokens_read for sequence in sequences)
        found = self.run(*self._shape(used, longest + 1))
        for sequence in sequences:
            sequence.tokens_read += 1
        rows = self._numbers([sequence.row for sequence in sequences])
        choose = self.selector.select_from_logits if self.captured else self.selector.select
        written = choose(sequences, found[rows])
        self.feed(written)
        return written

    def _place(self, sequences: Sequence[SequenceState]) -> None:
        """Says which rows generate, and where they are: all others are idle."""
        at = [IDLE] * self.rows
        for sequence in sequences:
            at[sequence.row] = sequence.tokens_read
        self.at.copy_(self._numbers(at))

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
        self._place(sequences)
        dice = BatchSampler(sequences, count, self.device, [one.row for one in sequences])
        out = self.last.new_empty(count, self.rows)
        for step in range(count):
            dice.sample(step, self.run(*shape), self.last)
            out[step] = self.last
        for sequence in sequences:
            sequence.tokens_read += count
        return InFlightSteps(sequences, out)

    def submit_first(self, sequences: Sequence[SequenceState], states: Tensor) -> InFlightSteps:
        """Selects the first tokens from the last states [M, D] of prompts, without waiting."""
        logits = self.network.read("lm", states)
        chosen = logits.argmax(-1)
        BatchSampler(sequences, 1, self.device, range(len(sequences))).sample(0, logits, chosen)
        rows = self._numbers([sequence.row for sequence in sequences])
        self.last[rows] = chosen
        out = self.last.clone()
        out[rows] = torch.where(logits.amax(-1).isfinite(), chosen, NO_SCORES)
        return InFlightSteps(sequences, out[None])

    def width(self, rows: int) -> int:
        """How many rows a step computes for so many in use."""
        return bucket_rows(rows, self.rows) if self.captured else rows

    def _shape(self, used: int, width: int) -> tuple[int, int]:
        if self.captured:
            most = self.slots.capacity
            return self.width(used), most if self.kernel else bucket_width(width, most)
        return used, min(width, self.slots.capacity)

    def _pass(self, rows: int, width: int) -> Tensor:
        """Runs one token of each of the first rows through the network; idle rows store no key.

        Returns logits, and makes the best the next tokens, or if nothing is captured hidden states.
        """
        at = self.at[:rows]
        live = at >= 0
        # a finished row keeps running until the submitted steps end
        positions = at.clamp(0, self.slots.capacity - 1)
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
        watched = self.network.trunk.is_watched
        if self.fused is not None and rows <= self.fused.most_rows and not watched:
            return self.fused.run(self.last[:rows], positions, live)
        view = FusedSlotView(self.slots, rows) if self.kernel else None
        hidden: Tensor = self.network.trunk(
            self.last[:rows, None],
            keep=live[:, None],
            positions=positions[:, None],
            cache=view or SlotView(self.slots, rows, width),
        )
        return hidden[:, -1]

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return sent(torch.tensor(values, dtype=torch.long), self.device)


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
        self.prompts = PromptReader(network, self.slots, captured=self.steps.captured)
        self.in_flight: list[InFlightSteps] = []
        self.sequences: list[SequenceState] = []  # in order of arrival
        self.shared = 0  # prompt tokens loaded from the prefix cache
        self.weights = _places(network)

    # ------------------------------------------------------------------ joining and leaving

    @property
    def full(self) -> bool:
        return len(self.sequences) == self.rows

    def add(self, sequence: SequenceState) -> None:
        """Assigns a request the first free row; `prefill` will read its prompt."""
        taken = {one.row for one in self.sequences}
        sequence.row = next(row for row in range(self.rows) if row not in taken)
        self.sequences.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Frees a row immediately."""
        self.sequences.remove(sequence)

    def _close_gaps(self) -> int:
        """Moves the last rows into free ones if a step is cheaper then; how many rows it has."""
        by_row = {sequence.row: sequence for sequence in self.sequences}
        free = [row for row in range(len(by_row)) if row not in by_row]
        used = max(by_row, default=-1) + 1
        while self.steps.width(len(by_row)) < self.steps.width(used):
            mover = by_row.pop(used - 1)
            row = free.pop(0)
            self.slots.copy(mover.row, row, mover.tokens_read)
            self.steps.move(mover.row, row)
            mover.row = row
            by_row[row] = mover
            used = max(by_row) + 1
        return used

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
        hidden = self.prompts.read(rows, parts, [sequence.tokens_read for sequence in readers])
        done: list[tuple[SequenceState, Tensor]] = []
        for sequence, part, states in zip(readers, parts, hidden, strict=True):
            self._echo(sequence, states[: len(part)])
            sequence.tokens_read += len(part)
            if not sequence.unread:
                done.append((sequence, states[len(part) - 1]))
        return self._first_tokens(done)

    def _first_tokens(self, ready: list[tuple[SequenceState, Tensor]]) -> list[StepOutput]:
        """Those that must be waited for; the others come with the steps after them."""
        if not ready:
            return []
        sequences = [sequence for sequence, _ in ready]
        states = torch.stack([state for _, state in ready])
        for sequence in sequences:
            sequence.decoding = True
        if self.prefixes is not None:
            self.prefixes.store({one.row: one.prompt for one in sequences}, self.slots)
        if self.steps.captured and all(sequence.can_run_ahead for sequence in sequences):
            self.in_flight.append(self.steps.submit_first(sequences, states))
            return []
        written = self.selector.select(sequences, states)
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
        first = prompt[:BLOCK_TOKENS]
        alike = [other.prompt for other in readers if other.prompt[:BLOCK_TOKENS] == first]
        shared = max((common_prefix_length(prompt, other) for other in alike), default=0)
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
        self.in_flight = []
        used = self._close_gaps() if sequences else 0
        if sequences and self.steps.captured and all(one.can_run_ahead for one in sequences):
            # one step at a time while prompts wait to be read
            ahead = STEPS_AHEAD if all(one.decoding for one in self.sequences) else 1
            self.in_flight = [self.steps.submit(sequences, used, ahead)]
            sequences = []
        written = [one for steps in before for one in steps.collect()]
        return written + (self.steps.run_one(sequences, used) if sequences else [])

    # ------------------------------------------------------------------ reuse

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether it is large enough and the weights are where its graphs expect them."""
        large = self.rows >= rows and self.slots.capacity >= capacity
        return large and self.weights == _places(self.network)

    def clear(self) -> None:
        """Removes all requests."""
        self.sequences = []
        self.in_flight = []


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
