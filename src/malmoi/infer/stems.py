"""Scoring continuations whose contexts begin alike: a beginning is read once, and what differs branches off it.

Few-shot prompts share their examples, and the choices of a question share the question: a context of 500 tokens with
four choices of five is 520 tokens to read, not 2,020, and the next question's examples are there already.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from malmoi.decode.batch import Room, batches, pad, room
from malmoi.decode.prefix import BLOCK, Prefixes
from malmoi.decode.slots import Branches, Slots, alike, read_rows
from malmoi.infer.likelihood import Found, Row, each_alone, predicted
from malmoi.model import Network

WORTH = 0.8  # of the tokens that reading each row alone would take; above it, sharing costs more than it saves


@dataclass(frozen=True)
class Stem:
    """A context, and the rows that go on from it."""

    tokens: tuple[int, ...]
    rows: list[int]


@torch.inference_mode()
def token_logprobs(network: Network, rows: Sequence[Row], prefixes: Prefixes | None = None) -> list[Found]:
    """Of each row: the log-probability of every scored token, and whether each was the most likely one.

    With `prefixes`, contexts go on from what earlier calls have read.
    """
    results: list[Found] = [([], True)] * len(rows)
    alone: list[int] = []
    for group in _groups(rows, room(network.trunk.embed.token.weight.device)):
        reading = _Reading(network, rows, group, prefixes) if network.trunk.is_causal else None
        if reading is None or not reading.pays:
            alone += [i for stem in group for i in stem.rows]
            continue
        for i, found in reading.run():
            results[i] = found
    for i, found in zip(alone, each_alone(network, [rows[i] for i in alone]), strict=True):
        results[i] = found
    return results


def _groups(rows: Sequence[Row], most: Room) -> Iterator[list[Stem]]:
    """The contexts in order, so that those that begin alike stand together, as many as are read at once."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.stem, []).append(i)
    group: list[Stem] = []
    longest = 0
    for tokens in sorted(found):
        longest = max(longest, len(tokens))
        if group and (len(group) == most.rows or (len(group) + 1) * longest > most.tokens):
            yield group
            group, longest = [], len(tokens)
        group.append(Stem(tokens, found[tokens]))
    if group:
        yield group


class _Reading:
    """Some contexts side by side in the rows of one cache, and the branches off them."""

    def __init__(self, network: Network, rows: Sequence[Row], stems: Sequence[Stem], prefixes: Prefixes | None) -> None:
        self.network, self.rows, self.stems, self.prefixes = network, rows, stems, prefixes
        first, last = stems[0].tokens, stems[-1].tokens
        self.common = first[: alike(first, last)] if len(stems) > 1 else first  # in order: so the ends tell for all

    @property
    def pays(self) -> bool:
        alone = sum(len(self.rows[i].tokens) - 1 for stem in self.stems for i in stem.rows)
        branches = sum(len(self.rows[i].branch) for stem in self.stems for i in stem.rows)
        known = self.prefixes.known(self.common) if self.prefixes is not None else 0
        read = len(self.common) - known + sum(len(stem.tokens) - len(self.common) for stem in self.stems)
        return bool(self.stems[-1].tokens) and read + branches < WORTH * alone

    def run(self) -> Iterator[tuple[int, Found]]:
        self.slots = Slots(self.network, len(self.stems), max(len(stem.tokens) for stem in self.stems))
        self._read_common()
        self._read_rests()
        pairs = [(row, i) for row, stem in enumerate(self.stems) for i in stem.rows]
        for group in batches([len(self.rows[i].branch) for _, i in pairs], self._room(pairs)):
            some = [pairs[k] for k in group]
            yield from zip([i for _, i in some], self._branch(some), strict=True)

    def _room(self, pairs: Sequence[tuple[int, int]]) -> Room:
        """For branches, each of which has its stem's keys and values beside it."""
        most = room(self.slots.device)
        longest = max(len(self.rows[i].tokens) for _, i in pairs)
        return replace(most, rows=min(most.rows, max(1, most.tokens // longest)))

    def _read_common(self) -> None:
        """What all begin with goes into the first row, from an earlier reading where there was one, then into all."""
        common = self.common
        known = self.prefixes.load(common, self.slots, 0) if self.prefixes is not None else 0
        if known < len(common):
            read_rows(self.network, self.slots, [0], [list(common[known:])], [known])
        if self.prefixes is not None and len(common) - known >= BLOCK:
            self.prefixes.store(common, self.slots, 0)
        for row in range(1, len(self.stems)):
            self.slots.copy(0, row, len(common))

    def _read_rests(self) -> None:
        start = len(self.common)
        rests = [(row, list(stem.tokens[start:])) for row, stem in enumerate(self.stems) if len(stem.tokens) > start]
        for group in batches([len(rest) for _, rest in rests], room(self.slots.device)):
            some = [rests[k] for k in group]
            read_rows(self.network, self.slots, [r for r, _ in some], [rest for _, rest in some], [start] * len(some))

    def _branch(self, some: Sequence[tuple[int, int]]) -> list[Found]:
        device, rows = self.slots.device, [self.rows[i] for _, i in some]
        tokens = pad([row.branch for row in rows], device=device)
        lengths = torch.tensor([row.first - 1 for row in rows], device=device)
        cache = Branches(self.slots, torch.tensor([row for row, _ in some], device=device), lengths)
        steps = torch.arange(tokens.size(1), device=device).expand_as(tokens)
        sizes = torch.tensor([[len(row.branch)] for row in rows], device=device)
        where = lengths[:, None] + steps.minimum(sizes - 1)
        hidden = self.network.trunk(tokens, keep=steps < sizes, positions=where, cache=cache)
        return predicted(self.network, hidden, rows, [0] * len(rows))
