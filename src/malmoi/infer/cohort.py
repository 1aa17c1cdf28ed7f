"""Requests decoded together over one static cache: each joins when there is a row for it and leaves when it is over.

The rows in use are always the first ones: who leaves is replaced by the last, so that a step is one product over as
many rows as there are requests. S rows, B rows of a pass, D width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from malmoi.infer.choice import Chooser, Dice, Seat, Written, logprobs
from malmoi.infer.fast import Screen
from malmoi.infer.graph import Graphs, bucket_rows, bucket_width
from malmoi.infer.prefix import BLOCK, Prefixes
from malmoi.infer.slots import Slots, Window, alike, read_rows
from malmoi.model import Network

CHUNK = {"cpu": 128, "cuda": 512}  # tokens of prompts read between two steps, so that a long one stalls nobody
ALONE = 4  # times as many where nobody waits for the next step
BURST = 8  # steps on a GPU before their tokens are looked at


class Cohort:
    """A network, a cache of `rows` rows, and the requests in them."""

    def __init__(
        self,
        network: Network,
        rows: int,
        capacity: int,
        *,
        screen: Screen | None = None,
        prefixes: Prefixes | None = None,
        captured: bool | None = None,
    ) -> None:
        """`captured`: steps are fixed in shape and chosen ahead, as a CUDA graph wants; by default on a GPU."""
        self.network, self.prefixes = network, prefixes
        self.slots = Slots(network, rows, capacity)
        self.chooser = Chooser(network, screen)
        self.seats: list[Seat] = []  # the i-th has row i
        self.rows, self.device = rows, self.slots.device
        self.shared = 0  # tokens of prompts that did not have to be read
        self.captured = self.device.type == "cuda" if captured is None else captured
        self._make_state()

    @torch.inference_mode()
    def _make_state(self) -> None:
        """The tensors that a step reads and writes, always the same ones."""
        c, weight = self.network.config, self.network.trunk.embed.token.weight
        self.last = torch.zeros(self.rows, dtype=torch.long, device=self.device)  # token not yet shown to the network
        self.at = torch.zeros_like(self.last)  # its position
        self.live = torch.zeros_like(self.last, dtype=torch.bool)
        self.hidden = torch.zeros(self.rows, c.width, dtype=weight.dtype, device=self.device)
        self.logits = self.hidden.new_zeros(self.rows if self.captured else 0, c.vocab)
        self.graphs = Graphs(self._pass, (self.last, self.at))

    # ------------------------------------------------------------------ joining and leaving

    @property
    def full(self) -> bool:
        return len(self.seats) == self.rows

    @torch.inference_mode()
    def join(self, seat: Seat) -> None:
        """Gives a request the next row; `read` will show the network its prompt."""
        seat.row = len(self.seats)
        self.seats.append(seat)
        self.live[seat.row] = False

    @torch.inference_mode()
    def leave(self, seat: Seat) -> None:
        """Frees a row at once; the last request moves into it."""
        mover = self.seats.pop()
        self.live[mover.row] = False
        if mover is seat:
            return
        self.slots.copy(mover.row, seat.row, mover.read)
        self.last[seat.row], self.at[seat.row] = self.last[mover.row], self.at[mover.row]
        self.live[seat.row] = mover.live
        mover.row = seat.row
        self.seats[mover.row] = mover

    # ------------------------------------------------------------------ reading prompts

    @torch.inference_mode()
    def read(self) -> list[Written]:
        """Shows the network the next part of the prompts; those that are complete get their first token."""
        readers = self._readers()
        if not readers:
            return []
        size = self._chunk() // len(readers) if len(readers) > 1 else self._chunk()
        parts = [seat.unread[:size] for seat in readers]
        hidden = read_rows(self.network, self.slots, [s.row for s in readers], parts, [seat.read for seat in readers])
        for seat, part, states in zip(readers, parts, hidden, strict=True):
            self._echo(seat, states[: len(part)])
            seat.read += len(part)
        done = [(seat, states[len(part) - 1]) for seat, part, states in zip(readers, parts, hidden, strict=True)]
        return self._begin([(seat, state) for seat, state in done if not seat.unread])

    def _begin(self, ready: list[tuple[Seat, Tensor]]) -> list[Written]:
        if not ready:
            return []
        seats = [seat for seat, _ in ready]
        for seat in seats:
            seat.live = True
            if self.prefixes is not None:
                self.prefixes.store(seat.request.prompt, self.slots, seat.row)
        written = self.chooser.choose(seats, torch.stack([state for _, state in ready]))
        rows = torch.tensor([seat.row for seat in seats], device=self.device)
        self.at[rows] = torch.tensor([seat.read for seat in seats], device=self.device)
        self.live[rows] = True
        self._show(written)
        return written

    def _chunk(self) -> int:
        size = CHUNK.get(self.device.type, CHUNK["cpu"])
        return size if any(seat.live for seat in self.seats) else size * ALONE if self.device.type == "cpu" else size

    def _readers(self) -> list[Seat]:
        """The requests whose prompts are read next, in the order they came, as many as fit into a chunk."""
        readers: list[Seat] = []
        longest, chunk = 0, self._chunk()
        for seat in self.seats:
            if seat.live or self._profits(seat, readers):
                continue
            self._recall(seat)
            longest = max(longest, min(len(seat.unread), chunk))
            if readers and (len(readers) + 1) * longest > chunk:
                break
            readers.append(seat)
        return readers

    def _profits(self, seat: Seat, readers: Sequence[Seat]) -> bool:
        """Whether another is about to read the same beginning, so that waiting for it saves reading."""
        if self.prefixes is None or seat.read or seat.echo:
            return False
        prompt = seat.request.prompt[:-1]
        common = max((alike(prompt, other.request.prompt) for other in readers), default=0)
        return common // BLOCK * BLOCK > self.prefixes.known(prompt)

    def _recall(self, seat: Seat) -> None:
        """Starts a prompt from what is known of its beginning; its last token is read anyway, to go on from."""
        if self.prefixes is not None and not seat.read and not seat.echo:
            seat.read = self.prefixes.load(seat.request.prompt[:-1], self.slots, seat.row)
            self.shared += seat.read

    def _echo(self, seat: Seat, states: Tensor) -> None:
        if seat.echo and seat.top:
            targets = seat.tokens[seat.read + 1 : seat.read + 1 + len(states)]
            logits = self.network.read("lm", states[: len(targets)])
            seat.echoed += logprobs(logits, torch.tensor(targets, dtype=torch.long, device=self.device), seat.top)

    # ------------------------------------------------------------------ writing

    @torch.inference_mode()
    def step(self) -> list[Written]:
        """The next token of every request whose prompt has been read; on a GPU the next few."""
        seats = [seat for seat in self.seats if seat.live]
        if not seats:
            return []
        steps = BURST if self.captured and all(seat.free for seat in seats) else 1
        steps = min(steps, max(seat.request.limit - (len(seat.tokens) - len(seat.request.prompt)) for seat in seats))
        rows, width = self._shape(max(seat.read for seat in seats) + steps)
        ahead = self.captured and all(seat.free for seat in seats)
        return self._burst(seats, steps, rows, width) if ahead else self._look(seats, rows, width)

    def _shape(self, width: int) -> tuple[int, int]:
        if self.captured:
            return bucket_rows(len(self.seats), self.rows), bucket_width(width, self.slots.capacity)
        return len(self.seats), min(width, self.slots.capacity)

    def _pass(self, rows: int, width: int) -> None:
        """One token through the network for the first rows. Those that do not write keep their keys to themselves."""
        live, at = self.live[:rows], self.at[:rows]
        hidden = self.network.trunk(
            self.last[:rows, None],
            keep=live[:, None],
            positions=at[:, None].clamp(max=self.slots.capacity - 1),  # who is over runs on to the end of a burst
            cache=Window(self.slots, rows, width),
        )[:, -1]
        at += live
        self.hidden[:rows] = hidden
        if self.captured:
            self.logits[:rows] = self.network.read("lm", hidden)
            self.last[:rows] = self.logits[:rows].argmax(-1)

    def _look(self, seats: list[Seat], rows: int, width: int) -> list[Written]:
        """One step, and a look at what it gives."""
        self._pass(rows, width) if not self.captured else self.graphs.run(rows, width)
        for seat in seats:
            seat.read += 1
        at = torch.tensor([seat.row for seat in seats], device=self.device)
        if self.captured:
            written = self.chooser.from_logits(seats, self.logits[at])
        else:
            written = self.chooser.choose(seats, self.hidden[at])
        self._show(written)
        return written

    def _show(self, written: Sequence[Written]) -> None:
        """What was chosen is what the network sees next."""
        rows = torch.tensor([one.seat.row for one in written], dtype=torch.long, device=self.device)
        self.last[rows] = torch.tensor([one.tokens[-1] for one in written], dtype=torch.long, device=self.device)

    def _burst(self, seats: list[Seat], steps: int, rows: int, width: int) -> list[Written]:
        """Several steps without a look in between; all that is copied from the device comes at the end."""
        dice = Dice(seats, steps, self.device)
        out = []
        for step in range(steps):
            self.graphs.run(rows, width)
            dice.throw(step, self.logits, self.last)
            out.append(self.last.clone())
        columns = torch.stack(out, dim=1).tolist()
        for seat in seats:
            seat.read += steps
            seat.tokens += columns[seat.row]
        return [Written(seat, columns[seat.row], []) for seat in seats]
