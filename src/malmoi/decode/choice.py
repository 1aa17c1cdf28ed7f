"""Choosing the next token of requests that each have rules of their own.

M requests, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from malmoi.decode.constrain import Walk
from malmoi.decode.fast import ROWS, Screen
from malmoi.decode.sample import NEVER, Sampling, choose, invert
from malmoi.decode.wish import Request
from malmoi.errors import MalmoiError
from malmoi.model import Network


class Logprob(NamedTuple):
    """The log-probability of a token under the model itself, before any rule, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Seat:
    """A request that is being served: its rules, its row of the cache, and how far it has come."""

    request: Request
    sampling: Sampling
    walk: Walk | None = None
    top: int = 0  # how many log-probabilities a token comes with
    echo: bool = False  # log-probabilities of the prompt too
    row: int = -1
    read: int = 0  # tokens in the cache
    live: bool = False  # the prompt has been read
    tokens: list[int] = field(default_factory=list)  # the prompt and what was written
    echoed: list[Logprob] = field(default_factory=list)  # of the prompt's tokens after the first
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def unread(self) -> list[int]:
        return self.tokens[self.read :]

    @property
    def left(self) -> int:
        """How many tokens it may still write, those under way counted as written."""
        return self.request.limit - (self.read - len(self.request.prompt) + 1)

    @property
    def free(self) -> bool:
        """Whether the next token depends on the scores alone, so that steps need not wait for one another."""
        return self.walk is None and not self.top and not self.sampling.remembers

    @property
    def plain(self) -> bool:
        return self.free and self.sampling.greedy


class Written(NamedTuple):
    """What a step gave a request."""

    seat: Seat
    tokens: list[int]
    logprobs: list[Logprob]


class Chooser:
    """Reads hidden states as tokens."""

    def __init__(self, network: Network, screen: Screen | None) -> None:
        self.network, self.screen = network, screen

    def choose(self, seats: Sequence[Seat], hidden: Tensor) -> list[Written]:
        """The next token of each, from its hidden state [M, D]."""
        quick = self.screen is not None and self.screen.fresh and len(seats) <= ROWS
        if quick and self.screen is not None and all(seat.plain for seat in seats):
            best = self.screen.best(self.screen.head.features(hidden)).tolist()
            return [_write(seat, [token], []) for seat, token in zip(seats, best, strict=True)]
        return self.from_logits(seats, self.network.read("lm", hidden))

    def from_logits(self, seats: Sequence[Seat], logits: Tensor) -> list[Written]:
        """The next token of each from its scores [M, V]; one whose constraint fails is marked and gets none."""
        allowed = constrained(seats, logits)
        chosen = torch.empty(len(seats), dtype=torch.long, device=logits.device)
        for sampling, members in by_sampling(seats).items():
            at = torch.tensor(members, device=logits.device)
            some = [seats[i] for i in members]
            drawing = [seat.request.generator for seat in some]
            chosen[at] = choose(allowed[at], sampling, _seen(some, sampling, logits), drawing)
        said = logprobs(logits, chosen, max(seat.top for seat in seats))
        return [
            _write(seat, [token], [_cut(one, seat.top)] if seat.top else [])
            for seat, token, one in zip(seats, chosen.tolist(), said, strict=True)
            if seat.error is None
        ]


def by_sampling(seats: Sequence[Seat]) -> dict[Sampling, list[int]]:
    """Which of the requests choose alike."""
    groups: dict[Sampling, list[int]] = {}
    for i, seat in enumerate(seats):
        groups.setdefault(seat.sampling, []).append(i)
    return groups


class Dice:
    """Chooses for free requests several steps ahead: the random numbers of all steps go to the device at once."""

    def __init__(self, seats: Sequence[Seat], steps: int, device: torch.device) -> None:
        self.groups = [
            (sampling, _rows([seats[i] for i in members], device), _chances([seats[i] for i in members], steps, device))
            for sampling, members in by_sampling(seats).items()
            if not sampling.greedy
        ]

    def throw(self, step: int, logits: Tensor, tokens: Tensor) -> None:
        """Puts the tokens of those that draw into `tokens` [S]; greedy ones have the best there already."""
        for sampling, rows, chances in self.groups:
            tokens[rows] = invert(sampling.apply(logits[rows], logits), chances[step])


def _rows(seats: Sequence[Seat], device: torch.device) -> Tensor:
    return torch.tensor([seat.row for seat in seats], device=device)


def _chances(seats: Sequence[Seat], steps: int, device: torch.device) -> Tensor:
    """Uniform numbers [steps, M, 1], of each request those that one step at a time would draw."""
    drawn = [torch.rand(steps, generator=seat.request.generator, dtype=torch.float64) for seat in seats]
    return torch.stack(drawn, dim=1)[..., None].to(device)


def constrained(seats: Sequence[Seat], logits: Tensor) -> Tensor:
    """The scores with −∞ for what the requests' constraints forbid."""
    if all(seat.walk is None for seat in seats):
        return logits
    logits = logits.clone()
    for row, seat in zip(logits, seats, strict=True):
        if seat.walk is not None:
            _forbid(row, seat, seat.walk)
    return logits


def _forbid(row: Tensor, seat: Seat, walk: Walk) -> None:
    try:
        allowed = walk.allowed(len(row))
    except Exception as error:  # a user's function: its failure is this request's alone
        seat.error = error if isinstance(error, MalmoiError) else MalmoiError(f"The constraint failed: {error!r}.")
        return
    row.masked_fill_(~allowed.to(row.device), NEVER)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[Logprob]:
    """The log-probability of each token [M] under its scores [M, V], with the `top` likeliest ones."""
    if not top:
        return [Logprob(token, 0.0, ()) for token in tokens.tolist()]
    whole = logits.float().log_softmax(-1)
    best = whole.topk(min(top, whole.size(-1)))
    chosen = whole.gather(1, tokens[:, None]).squeeze(1).tolist()
    rows = zip(tokens.tolist(), chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Logprob(token, value, tuple(zip(ids, values, strict=True))) for token, value, ids, values in rows]


def _cut(one: Logprob, top: int) -> Logprob:
    return one._replace(top=one.top[:top])


def _seen(seats: Sequence[Seat], sampling: Sampling, logits: Tensor) -> Tensor:
    """Which tokens stand in each text [M, V], where a rule wants to know."""
    seen = torch.zeros(len(seats), logits.size(1) if sampling.remembers else 0, dtype=torch.bool, device=logits.device)
    for row, seat in zip(seen, seats if sampling.remembers else [], strict=False):
        row[torch.tensor(seat.tokens, device=row.device)] = True
    return seen


def _write(seat: Seat, tokens: list[int], said: list[Logprob]) -> Written:
    seat.tokens += tokens
    if seat.walk is not None:
        for token in tokens:
            seat.walk.push(token)
    return Written(seat, tokens, said)
