"""Requests decoded together over one static cache: each joins when there is a row for it and leaves when it is over.

The rows in use are always the first ones: who leaves is replaced by the last, so that a step is one product over as
many rows as there are requests. S rows, B rows of a pass, D width, V vocabulary.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from malmoi.decode.batch import ROWS
from malmoi.decode.choice import Chooser, Seat, Written, logprobs
from malmoi.decode.fast import Screen
from malmoi.decode.graph import bucket_rows, bucket_width
from malmoi.decode.prefix import BLOCK, Prefixes
from malmoi.decode.slots import Slots, alike, read_rows
from malmoi.decode.steps import BURST, Flight, Mode, Steps
from malmoi.machine import per_device
from malmoi.model import Network

CHUNK = {"cpu": 128, "cuda": 4096}  # tokens of prompts read between two steps, so that a long one stalls nobody
LONGEST = {"cpu": 512, "cuda": 4096}  # tokens of one prompt in a pass
ALONE = 4  # times as many where nobody waits for the next step


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
        mode: Mode | None = None,
    ) -> None:
        """`mode` says how steps are taken: "captured" on a GPU and "plain" elsewhere, unless it is named."""
        self.network, self.prefixes = network, prefixes
        self.slots = Slots(network, rows, capacity)
        self.rows, self.device = rows, self.slots.device
        self.chunk = per_device(CHUNK, self.device.type)
        self.longest = per_device(LONGEST, self.device.type)
        self.chooser = Chooser(network, screen)
        usual: Mode = "captured" if self.device.type == "cuda" else "plain"
        self.steps = Steps(network, self.slots, self.chooser, mode or usual)
        self.flight: Flight | None = None
        self.seats: list[Seat] = []  # the i-th has row i
        self.shared = 0  # tokens of prompts that did not have to be read
        self.weights = _places(network)

    # ------------------------------------------------------------------ joining and leaving

    @property
    def full(self) -> bool:
        return len(self.seats) == self.rows

    @torch.inference_mode()
    def join(self, seat: Seat) -> None:
        """Gives a request the next row; `read` will show the network its prompt."""
        seat.row = len(self.seats)
        self.seats.append(seat)

    @torch.inference_mode()
    def leave(self, seat: Seat) -> None:
        """Frees a row at once; the last request moves into it."""
        mover = self.seats.pop()
        if mover is not seat:
            self.slots.copy(mover.row, seat.row, mover.read)
            self.steps.move(mover.row, seat.row)
            self.seats[seat.row] = mover
        self.steps.live[mover.row] = False
        mover.row = seat.row

    # ------------------------------------------------------------------ reading prompts

    @torch.inference_mode()
    def read(self) -> list[Written]:
        """Shows the network the next part of the prompts; those that are complete get their first token."""
        readers = self._readers()
        if not readers:
            return []
        size = min(self._chunk() // len(readers), self.longest)
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
        self.steps.start(seats)
        self.steps.show(written)
        return written

    def _chunk(self) -> int:
        return self.chunk if any(seat.live for seat in self.seats) else self.chunk * ALONE

    def _readers(self) -> list[Seat]:
        """The requests whose prompts are read next, in the order they came, as many as fit into a chunk."""
        readers: list[Seat] = []
        longest, chunk = 0, self._chunk()
        for seat in self.seats:
            if seat.live or self._profits(seat, readers):
                continue
            self._recall(seat)
            longest = max(longest, min(len(seat.unread), chunk, self.longest))
            if readers and (len(readers) + 1) * longest > chunk:
                break
            readers.append(seat)
        return readers

    def _profits(self, seat: Seat, readers: Sequence[Seat]) -> bool:
        """Whether another is about to read the same beginning, so that waiting for it saves reading."""
        if self.prefixes is None or seat.read or seat.echo:
            return False
        prompt = seat.request.prompt[:-1]
        common = max((alike(prompt, other.request.prompt) for other in readers), default=0) // BLOCK * BLOCK
        return common > 0 and common > self.prefixes.known(prompt)

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
        """The next token of every request whose prompt has been read; on a GPU some of them, which were under way."""
        seats = [seat for seat in self.seats if seat.live and seat.left > 0]
        before, self.flight = self.flight, None
        if seats and self.steps.captured and all(seat.free for seat in seats):
            ahead = BURST if all(seat.live for seat in self.seats) else 1  # prompts wait to be read
            self.flight = self.steps.launch(seats, len(self.seats), ahead)
            seats = []
        landed = before.collect() if before is not None else []
        return landed + (self.steps.look(seats, len(self.seats)) if seats else [])

    # ------------------------------------------------------------------ used again

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether it is large enough, and the weights lie where its graphs read them."""
        return self.rows >= rows and self.slots.capacity >= capacity and self.weights == _places(self.network)

    def clear(self) -> None:
        """Everyone leaves."""
        for seat in reversed(list(self.seats)):
            self.leave(seat)
        self.flight = None


class Cohorts:
    """Keeps a cohort from one call to the next where that pays: on a GPU its graphs are recorded but once."""

    def __init__(self) -> None:
        self.kept: Cohort | None = None
        self.lock = threading.Lock()

    def take(self, network: Network, rows: int, capacity: int, screen: Screen | None) -> Cohort:
        with self.lock:
            kept, self.kept = self.kept, None  # whoever comes meanwhile makes another
        if kept is not None and kept.fits(rows, capacity):
            return kept
        if network.trunk.embed.token.weight.device.type != "cuda":
            return Cohort(network, rows, capacity, screen=screen)
        width = bucket_width(capacity, network.config.context)
        return Cohort(network, bucket_rows(rows, ROWS), width, screen=screen)

    def give(self, cohort: Cohort) -> None:
        cohort.clear()
        with self.lock:
            self.kept = cohort if cohort.steps.captured else None


def _places(network: Network) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in network.parameters())
