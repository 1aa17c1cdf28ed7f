"""One token at a time through the network, for all rows of a cache at once.

What a step reads and writes are always the same tensors, so that a CUDA graph can repeat it. On a GPU requests whose
next token depends on nothing but the scores go several steps ahead, and their tokens are looked at while the next ones
are being computed: the GPU never waits for Python. S rows, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from malmoi.decode.choice import Chooser, Dice, Seat, Written
from malmoi.decode.graph import Graphs, bucket_rows, bucket_width
from malmoi.decode.slots import Newest, Slots, Window, has_kernel
from malmoi.model import Network

BURST = 8  # steps that go ahead together

# plain: one step, then a look at it. captured: fixed shapes, recorded on a GPU, several steps ahead. compiled: the
# same, the code compiled as well, which takes up to a minute for each shape.
Mode = Literal["plain", "captured", "compiled"]


@dataclass(frozen=True)
class Flight:
    """Steps under way: whose they are, in which row they began, and where their tokens arrive [steps, S]."""

    seats: list[tuple[Seat, int]]
    tokens: Tensor
    landed: torch.cuda.Event | None

    def collect(self) -> list[Written]:
        """Waits for these steps, and no longer, and hands out their tokens."""
        if self.landed is not None:
            self.landed.synchronize()
        columns = self.tokens.t().tolist()
        for seat, row in self.seats:
            seat.tokens += columns[row]
        return [Written(seat, columns[row], []) for seat, row in self.seats]


class Steps:
    """The state of all rows, and the step that moves them on."""

    @torch.inference_mode()
    def __init__(self, network: Network, slots: Slots, chooser: Chooser, mode: Mode) -> None:
        self.network, self.slots, self.chooser = network, slots, chooser
        self.captured = mode != "plain"
        self.kernel = self.captured and has_kernel(network, slots.device)
        self.rows, self.device = len(slots.numbers), slots.device
        weight = network.trunk.embed.token.weight
        self.last = torch.zeros(self.rows, dtype=torch.long, device=self.device)  # token not yet shown to the network
        self.at = torch.zeros_like(self.last)  # its position
        self.live = torch.zeros_like(self.last, dtype=torch.bool)  # whether the row writes
        self.hidden = torch.zeros(self.rows, network.config.width, dtype=weight.dtype, device=self.device)
        self.logits = self.hidden.new_zeros(self.rows if self.captured else 0, network.config.vocab)
        step = torch.compile(self._pass, dynamic=False) if mode == "compiled" else self._pass
        self.graphs = Graphs(step, (self.last, self.at))

    def start(self, seats: Sequence[Seat]) -> None:
        """These have read their prompts and write from now on."""
        rows = self._numbers([seat.row for seat in seats])
        self.at[rows] = self._numbers([seat.read for seat in seats])
        self.live[rows] = True

    def move(self, source: int, target: int) -> None:
        for state in (self.last, self.at, self.live):
            state[target] = state[source]

    def look(self, seats: Sequence[Seat], used: int) -> list[Written]:
        """One step of the first `used` rows, and the tokens that it gives."""
        self._run(*self._shape(used, max(seat.read for seat in seats) + 1))
        for seat in seats:
            seat.read += 1
        rows = self._numbers([seat.row for seat in seats])
        choose = self.chooser.from_logits if self.captured else self.chooser.choose
        written = choose(seats, self.logits[rows] if self.captured else self.hidden[rows])
        self.show(written)
        return written

    def show(self, written: Sequence[Written]) -> None:
        """What was chosen is what the network sees next."""
        rows = self._numbers([one.seat.row for one in written])
        self.last[rows] = self._numbers([one.tokens[-1] for one in written])

    def launch(self, seats: Sequence[Seat], used: int, most: int = BURST) -> Flight:
        """Several steps, without waiting for any of them."""
        count = min(most, max(seat.left for seat in seats))
        shape = self._shape(used, max(seat.read for seat in seats) + count)
        dice = Dice(seats, count, self.device)
        out = self.last.new_empty(count, self.rows)
        for step in range(count):
            self._run(*shape)
            dice.throw(step, self.logits, self.last)
            out[step] = self.last
        for seat in seats:
            seat.read += count
        return self._depart([(seat, seat.row) for seat in seats], out)

    def _depart(self, seats: list[tuple[Seat, int]], out: Tensor) -> Flight:
        if self.device.type != "cuda":
            return Flight(seats, out, None)
        landing = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        landing.copy_(out, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return Flight(seats, landing, landed)

    def _run(self, rows: int, width: int) -> None:
        self.graphs.run(rows, width) if self.captured else self._pass(rows, width)

    def _shape(self, used: int, width: int) -> tuple[int, int]:
        if self.captured:
            most = self.slots.capacity
            return bucket_rows(used, self.rows), most if self.kernel else bucket_width(width, most)
        return used, min(width, self.slots.capacity)

    def _pass(self, rows: int, width: int) -> None:
        """One token of the first rows through the network; a row that does not write leaves no key behind."""
        live, at = self.live[:rows], self.at[:rows]
        hidden = self.network.trunk(
            self.last[:rows, None],
            keep=live[:, None],
            positions=at[:, None].clamp(max=self.slots.capacity - 1),  # who is over runs on to the end of a burst
            cache=Newest(self.slots, rows) if self.kernel else Window(self.slots, rows, width),
        )[:, -1]
        at += live
        if not self.captured:
            self.hidden[:rows] = hidden
            return
        self.logits[:rows] = self.network.read("lm", hidden)
        self.last[:rows] = self.logits[:rows].argmax(-1)

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)
