"""Decoding steps: one token through the network for all rows of a cache.

Steps read and write fixed tensors, so that a CUDA graph can repeat them. On a GPU, requests whose
next token depends only on the logits run several steps ahead, and their tokens are read while the
next ones are computed: the GPU never waits for Python. S rows, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from malmoi.inference.generation.token_selection import (
    BatchSampler,
    SequenceState,
    StepOutput,
    TokenSelector,
)
from malmoi.kernels.cuda_graphs import GraphPool, bucket_rows, bucket_width
from malmoi.kernels.decode_step import MAX_FUSED_ROWS, fused_step
from malmoi.kernels.kv_slots import FusedSlotView, KVSlots, SlotView, has_decode_kernel
from malmoi.model import Network
from malmoi.system.machine import this_machine

STEPS_AHEAD = 8  # steps submitted together

# plain: one step at a time. captured: fixed shapes, CUDA graphs on a GPU, several steps ahead.
# compiled: the same with compiled code, which takes up to a minute for each shape.
StepMode = Literal["plain", "captured", "compiled"]
# Each row adds its own arithmetic: on an H200 one row takes 0.39 to 0.51 of the modules' time and
# eight take 1.3 to 1.9, which puts the break-even at three to five.
MAX_GPU_FUSED_ROWS = 2


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
        self.hidden = torch.zeros(
            self.rows, network.config.width, dtype=network.dtype, device=self.device
        )
        self.logits = self.hidden.new_zeros(self.rows if self.captured else 0, network.config.vocab)
        step = torch.compile(self._pass, dynamic=False) if mode == "compiled" else self._pass
        self.graphs = GraphPool(step, (self.last, self.at))

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
        self._run(*self._shape(used, max(sequence.tokens_read for sequence in sequences) + 1))
        for sequence in sequences:
            sequence.tokens_read += 1
        rows = self._numbers([sequence.row for sequence in sequences])
        choose = self.selector.select_from_logits if self.captured else self.selector.select
        written = choose(sequences, self.logits[rows] if self.captured else self.hidden[rows])
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
            self._run(*shape)
            dice.sample(step, self.logits, self.last)
            out[step] = self.last
        for sequence in sequences:
            sequence.tokens_read += count
        return self._send_tokens([(sequence, sequence.row) for sequence in sequences], out)

    def _send_tokens(
        self, sequences: list[tuple[SequenceState, int]], out: Tensor
    ) -> InFlightSteps:
        if self.device.type != "cuda":
            return InFlightSteps(sequences, out, None)
        landing = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        landing.copy_(out, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return InFlightSteps(sequences, landing, landed)

    def _run(self, rows: int, width: int) -> None:
        self.graphs.run(rows, width) if self.captured else self._pass(rows, width)

    def _shape(self, used: int, width: int) -> tuple[int, int]:
        if self.captured:
            most = self.slots.capacity
            return bucket_rows(used, self.rows), most if self.kernel else bucket_width(width, most)
        return used, min(width, self.slots.capacity)

    def _pass(self, rows: int, width: int) -> None:
        """Runs one token of each of the first rows through the network; idle rows store no key."""
        live = self.decoding[:rows]
        at = self.at[:rows]
        # a finished row keeps running until the submitted steps end
        positions = at.clamp(max=self.slots.capacity - 1)
        if self.gpu_fused is not None and rows <= MAX_GPU_FUSED_ROWS:
            self._write_logits(self.gpu_fused(self.last[:rows], positions, live))
        else:
            hidden = self._hidden(rows, width, positions, live)
            if self.captured:
                self._write_logits(self.network.read("lm", hidden))
            else:
                self.hidden[:rows] = hidden
        at += live

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

    def _write_logits(self, logits: Tensor) -> None:
        rows = len(logits)
        self.logits[:rows] = logits
        self.last[:rows] = self.logits[:rows].argmax(-1)

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def gpu_fused_step(
    network: Network, slots: KVSlots
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """tokens, positions, live [B] → logits [B, V] in few kernels; None: torch's modules."""
    if not this_machine().fused or not has_decode_kernel(network, slots.device):
        return None
    from malmoi.kernels.triton_step import FusedStep, supports

    return FusedStep(network, slots) if supports(network) else None
