"""Beam search, as in `transformers`. N beams, V vocabulary, C candidates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from malmoi.inference.generation.config import GenerationConfig
from malmoi.inference.generation.kv_slots import check_causal
from malmoi.model import KVCache, Network


@dataclass(frozen=True)
class Beam:
    """A partial text: tokens, log-probability, and the cache row that holds all but the newest."""

    tokens: tuple[int, ...]
    logprob: float
    row: int = 0


class FinishedBeams:
    """The best finished texts so far, best first, as many as there are beams.

    A text's score is log p / length^length_penalty (Wu et al. 2016 §7, without its constant).
    early_stopping: True ends with as many finished texts as beams; False once the best beam, scored
    at its present length, is worse than all of them; "never" once no beam can catch up.
    """

    def __init__(self, limit: int, config: GenerationConfig) -> None:
        self.limit = limit
        self.config = config
        self.best: list[tuple[float, tuple[int, ...]]] = []

    @property
    def full(self) -> bool:
        return len(self.best) == self.config.beams

    def add(self, beam: Beam) -> None:
        score = beam.logprob / len(beam.tokens) ** self.config.length_penalty
        self.best.append((score, beam.tokens))
        # stable: among ties, the first to finish stays first
        self.best.sort(key=lambda item: -item[0])
        del self.best[self.config.beams :]

    def is_decided(self, leader: Beam) -> bool:
        """Whether the search can stop, given the likeliest running beam."""
        if not self.full:
            return False
        early = self.config.early_stopping
        penalty = self.config.length_penalty
        if early is True:
            return True
        length = self.limit if early == "never" and penalty > 0 else len(leader.tokens)
        return bool(leader.logprob / length**penalty <= self.best[-1][0])


@torch.inference_mode()
def beam_search(
    network: Network, prompt: Sequence[int], limit: int, config: GenerationConfig
) -> tuple[int, ...]:
    """Returns the continuation with the best score."""
    check_causal(network)
    size = len(prompt) + limit
    cache = KVCache(network.config, 1, size, dtype=network.dtype, device=network.device)
    hidden = network.trunk(torch.tensor([prompt], device=network.device), cache=cache)[:, -1]
    beams = [Beam((), 0.0)]
    finished = FinishedBeams(limit, config)
    for length in range(1, limit + 1):
        running = []
        for place, beam in enumerate(_candidates(network, hidden, beams, config)):
            if beam.tokens[-1] not in config.end_tokens and length < limit:
                running.append(beam)
            elif place < config.beams:  # lower-ranked candidates only replace finished beams
                finished.add(beam)
        beams = running[: config.beams]
        if not beams or finished.is_decided(beams[0]):
            break
        hidden = _forward(network, cache, beams)
    return finished.best[0][1]


def _candidates(
    network: Network, hidden: Tensor, beams: list[Beam], config: GenerationConfig
) -> list[Beam]:
    """The likeliest one-token continuations of all beams, enough to keep N running if some end."""
    logprobs = network.read("lm", hidden).float().log_softmax(-1)
    total = logprobs + torch.tensor([[beam.logprob] for beam in beams], device=hidden.device)
    count = max(2, 1 + len(config.end_tokens)) * config.beams
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
