"""Sampling: each rule is a function logits → logits, applied in the order of `SAMPLING_RULES`.

The rules and their order are those of `transformers`' logits processors, so the same settings give
the same distribution. B batch, V vocabulary.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from malmoi.inference.generation.options import Sampling
from malmoi.system.machine import float64_device

NEGATIVE_INFINITY = float("-inf")


class TokenHistory(NamedTuple):
    """The tokens that each text already contains."""

    seen: Tensor  # whether each token occurs, prompt included: bool [B, V]
    written: Tensor  # how often each was generated [B, V]


# (logits [B, V], the rule's setting, history) → logits
SamplingRule = Callable[[Tensor, Any, TokenHistory | None], Tensor]


def logit_bias(
    logits: Tensor, bias: Sequence[tuple[int, float]], history: TokenHistory | None
) -> Tensor:
    """Adds a bias to the logits of given tokens (OpenAI's API)."""
    tokens, values = zip(*bias, strict=True)
    added = torch.zeros_like(logits[0])
    added[list(tokens)] = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits + added


def frequency_penalty(logits: Tensor, penalty: float, history: TokenHistory | None) -> Tensor:
    """Subtracts the penalty once for each time a token was generated (OpenAI's API)."""
    return logits if history is None else logits - penalty * history.written


def presence_penalty(logits: Tensor, penalty: float, history: TokenHistory | None) -> Tensor:
    """Subtracts the penalty from every token generated before (OpenAI's API)."""
    return logits if history is None else logits - penalty * (history.written > 0)


def repetition_penalty(logits: Tensor, penalty: float, history: TokenHistory | None) -> Tensor:
    """Makes tokens already in the text less likely (Keskar et al. 2019 §4.1)."""
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return logits if history is None else torch.where(history.seen, penalised, logits)


def temperature(logits: Tensor, value: float, history: TokenHistory | None) -> Tensor:
    """Divides the logits: below 1 the distribution is sharper, above 1 flatter."""
    return logits / value


def top_k(logits: Tensor, k: float, history: TokenHistory | None) -> Tensor:
    """Keeps the k best tokens and ties (Fan et al. 2018)."""
    last = logits.topk(min(int(k), logits.size(-1))).values[..., -1:]
    return logits.masked_fill(logits < last, NEGATIVE_INFINITY)


def top_p(logits: Tensor, p: float, history: TokenHistory | None) -> Tensor:
    """Keeps the smallest set of best tokens whose probabilities reach p (Holtzman et al. 2020)."""
    ordered, places = logits.sort(dim=-1, descending=False)
    outside = ordered.softmax(-1).cumsum(-1) <= 1 - p
    outside[..., -1] = False
    return logits.masked_fill(
        torch.zeros_like(outside).scatter(-1, places, outside), NEGATIVE_INFINITY
    )


def min_p(logits: Tensor, p: float, history: TokenHistory | None) -> Tensor:
    """Keeps tokens at least p times as likely as the best one (Nguyen et al. 2024)."""
    chances = logits.softmax(-1)
    return logits.masked_fill(chances < p * chances.amax(-1, keepdim=True), NEGATIVE_INFINITY)


_RULES: tuple[SamplingRule, ...] = (
    logit_bias,
    frequency_penalty,
    presence_penalty,
    repetition_penalty,
    temperature,
    top_k,
    top_p,
    min_p,
)
SAMPLING_RULES = {rule.__name__: rule for rule in _RULES}


def apply_rules(sampling: Sampling, logits: Tensor, history: TokenHistory | None = None) -> Tensor:
    """Applies all active rules, in fp32: low temperatures overflow half precision."""
    logits = logits.float()
    for name, rule in SAMPLING_RULES.items():
        value = getattr(sampling, name)
        skipped = sampling.greedy and name in ("temperature", "top_k", "top_p", "min_p")
        if value != getattr(Sampling, name) and not skipped:  # its default changes nothing
            logits = rule(logits, value, history)
    return logits


def sample_next(
    logits: Tensor,
    sampling: Sampling,
    history: TokenHistory | None,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Samples each row's next token [B] with its own generator, independently of the batch."""
    logits = apply_rules(sampling, logits, history)
    return logits.argmax(-1) if sampling.greedy else sample_token(logits, generators)


def sample_token(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Samples from softmax(logits) with the next random number of each row's generator."""
    chance = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    where = float64_device(logits.device)
    return inverse_cdf(logits.to(where), chance.to(where)).to(logits.device)


def inverse_cdf(logits: Tensor, chance: Tensor) -> Tensor:
    """The token where the cumulative softmax reaches a uniform number [B, 1]: one draw per row."""
    total = logits.double().softmax(-1).cumsum(-1)
    # right=True: never selects a token of probability zero
    found = torch.searchsorted(total, chance * total[:, -1:], right=True).squeeze(-1)
    return found.clamp(max=logits.size(-1) - 1)  # NaN is found nowhere


def random_generators(seed: int | None, samples: int) -> list[torch.Generator]:
    """One generator per sample; the i-th sample of seed s is the first of seed s + i."""
    first = secrets.randbits(62) if seed is None else seed
    return [torch.Generator().manual_seed(first + i) for i in range(samples)]
