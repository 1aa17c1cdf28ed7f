"""Beam search: the likeliest text among those that several beginnings at a time lead to, as
`transformers` does it.

N beams, V vocabulary, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from malmoi.inference.generation.kv_slots import check_causal
from malmoi.model import KVCache, Network


@dataclass(frozen=True)
class BeamSettings:
    """A finished text's score is log p / length^length_penalty (Wu et al. 2016 §7, without its
    constant).

    early_stopping: True ends with as many finished texts as there are beams; False where the best
    beam, scored at its present length, is worse than all of them; "never" only where no beam can
    catch up any more.
    """

    beams: int
    limit: int
    ends: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True)
class Beam:
    """A beginning: its tokens, their log-probability, and the cache's row that holds all but the
    newest.
    """

    tokens: tuple[int, ...]
    logprob: float
    row: int = 0


class FinishedBeams:
    """The best finished texts so far, as many as there are beams, the best first."""

    def __init__(self, search: BeamSettings) -> None:
        self.search = search
        self.best: list[tuple[float, tuple[int, ...]]] = []

    @property
    def full(self) -> bool:
        return len(self.best) == self.search.beams

    def add(self, beam: Beam) -> None:
        score = beam.logprob / len(beam.tokens) ** self.search.length_penalty
        self.best.append((score, beam.tokens))
        # stable: of equals the first to finish stays first
        self.best.sort(key=lambda item: -item[0])
        del self.best[self.search.beams :]

    def is_decided(self, leader: Beam) -> bool:
        """Whether the beams need not go on, given the likeliest of them."""
        if not self.full:
            return False
        search = self.search
        if search.early_stopping is True:
            return True
        hopeful = search.early_stopping == "never" and search.length_penalty > 0
        length = search.limit if hopeful else len(leader.tokens)
        return bool(leader.logprob / length**search.length_penalty <= self.best[-1][0])


@torch.inference_mode()
def beam_search(network: Network, prompt: Sequence[int], search: BeamSettings) -> tuple[int, ...]:
    """The continuation of a prompt with the best score."""
    check_causal(network)
    cache = KVCache(
        network.config, 1, len(prompt) + search.limit, dtype=network.dtype, device=network.device
    )
    hidden = network.trunk(torch.tensor([prompt], device=network.device), cache=cache)[:, -1]
    beams = [Beam((), 0.0)]
    finished = FinishedBeams(search)
    for length in range(1, search.limit + 1):
        running = []
        for place, beam in enumerate(_candidates(network, hidden, beams, search)):
            if beam.tokens[-1] not in search.ends and length < search.limit:
                running.append(beam)
            elif place < search.beams:  # those beyond only stand in for finished ones
                finished.add(beam)
        beams = running[: search.beams]
        if not beams or finished.is_decided(beams[0]):
            break
        hidden = _forward(network, cache, beams)
    return finished.best[0][1]


def _candidates(
    network: Network, hidden: Tensor, beams: list[Beam], search: BeamSettings
) -> list[Beam]:
    """The likeliest continuations of all beams by one token, enough that as many beams go on if
    some end.
    """
    logprobs = network.read("lm", hidden).float().log_softmax(-1)
    total = logprobs + torch.tensor([[beam.logprob] for beam in beams], device=hidden.device)
    count = max(2, 1 + len(search.ends)) * search.beams
    best = total.flatten().topk(min(count, total.numel()))
    vocab = logprobs.size(1)
    places = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [
        Beam((*beams[at // vocab].tokens, at % vocab), value, at // vocab) for value, at in places
    ]


def _forward(network: Network, cache: KVCache, beams: list[Beam]) -> Tensor:
    device = cache.keys.device
    cache.reorder(torch.tensor([beam.row for beam in beams], device=device))
    newest = torch.tensor([[beam.tokens[-1]] for beam in beams], device=device)
    hidden: Tensor = network.trunk(newest, cache=cache)[:, -1]
    return hidden
