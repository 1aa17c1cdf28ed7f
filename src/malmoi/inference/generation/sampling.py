"""The next token of each request: rules of sampling, constraints, and a batch with both.

Each rule is a function logits → logits, applied in the order of `SAMPLING_RULES`. The rules and
their order are those of `transformers`' logits processors, so the same settings give the same
distribution. B batch, M requests, D width, V vocabulary.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.inference.batches import rows_by
from malmoi.inference.generation.constraints import Constraint
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.prompt import check_prompt_length
from malmoi.kernels.fast_argmax import FastArgmax, greedy_tokens
from malmoi.model import Network
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


PENALTIES = (logit_bias, frequency_penalty, presence_penalty, repetition_penalty)
NARROWING = (temperature, top_k, top_p, min_p)  # never changes which token is the best
SAMPLING_RULES: dict[str, SamplingRule] = {rule.__name__: rule for rule in PENALTIES + NARROWING}


def apply_rules(sampling: Sampling, logits: Tensor, history: TokenHistory | None = None) -> Tensor:
    """Applies all active rules, in fp32: low temperatures overflow half precision."""
    logits = logits.float()
    for name, rule in SAMPLING_RULES.items():
        value = getattr(sampling, name)
        skipped = sampling.greedy and rule in NARROWING
        if value != getattr(Sampling, name) and not skipped:  # its default changes nothing
            logits = rule(logits, value, history)
    return logits


def sample_token(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Samples each row's token [B] from softmax(logits) with the next number of its generator."""
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


# ------------------------------------------------------------------ requests


class Logprob(NamedTuple):
    """A token's log-probability under the model, before any rule, and the most likely tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class SequenceState:
    """The state of a request being decoded: settings, cache row, progress."""

    prompt: tuple[int, ...]
    generator: torch.Generator
    limit: int  # maximum number of new tokens
    sampling: Sampling
    constraint_state: Constraint | None = None
    top: int = 0  # log-probabilities returned with each token
    echo: bool = False  # also return the prompt's log-probabilities
    row: int = -1
    tokens_read: int = 0  # tokens in the cache
    decoding: bool = False  # the prompt has been read
    tokens: list[int] = field(default_factory=list)  # the prompt and the generated tokens
    echoed: list[Logprob] = field(default_factory=list)  # for the prompt's tokens after the first
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def unread(self) -> list[int]:
        return self.tokens[self.tokens_read :]

    @property
    def tokens_left(self) -> int:
        """How many tokens it may still generate, not counting those in flight."""
        return self.limit - (self.tokens_read - len(self.prompt) + 1)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next token depends on the logits alone, so steps can be submitted ahead."""
        return self.constraint_state is None and not self.top and not self.sampling.changes_best

    @property
    def plain(self) -> bool:
        return self.can_run_ahead and self.sampling.greedy


def new_sequences(
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    context: int,
    *,
    logprobs: int = 0,
    echo: bool = False,
) -> list[SequenceState]:
    """One sequence per sample of every prompt; generation stops at the end of the context."""
    for prompt in prompts:
        check_prompt_length(prompt, context)
    return [
        SequenceState(
            tuple(prompt),
            generator,
            limit := min(config.max_new_tokens, context - len(prompt)),
            config.sampling,
            constraint_state=config.constraint and config.constraint.new_state(limit),
            top=logprobs,
            echo=echo,
        )
        for prompt in prompts
        for generator in random_generators(config.seed, config.n)
    ]


class StepOutput(NamedTuple):
    """What one decoding step produced for a request."""

    sequence: SequenceState
    tokens: list[int]
    logprobs: list[Logprob]


@dataclass(frozen=True)
class TokenSelector:
    """Selects the next tokens from hidden states."""

    network: Network
    fast_argmax: FastArgmax | None

    def select(self, sequences: Sequence[SequenceState], hidden: Tensor) -> list[StepOutput]:
        """Selects the next token of each sequence from its hidden state [M, D]."""
        if all(sequence.plain for sequence in sequences):
            _fail_without_scores(sequences, hidden)
            best = greedy_tokens(self.network, self.fast_argmax, hidden)
            pairs = zip(sequences, best, strict=True)
            return [_write(one, [token], []) for one, token in pairs if one.error is None]
        return self.select_from_logits(sequences, self.network.read("lm", hidden))

    def select_from_logits(
        self, sequences: Sequence[SequenceState], logits: Tensor
    ) -> list[StepOutput]:
        """Selects the next tokens from logits [M, V]; none where a constraint raises."""
        _fail_without_scores(sequences, logits)
        allowed = apply_constraints(sequences, logits)
        chosen = torch.empty(len(sequences), dtype=torch.long, device=logits.device)
        for sampling, members in rows_by(one.sampling for one in sequences).items():
            at = torch.tensor(members, device=logits.device)
            some = [sequences[i] for i in members]
            found = apply_rules(sampling, allowed[at], _history(some, sampling, logits))
            drawn = [] if sampling.greedy else [one.generator for one in some]
            chosen[at] = sample_token(found, drawn) if drawn else found.argmax(-1)
        logprobs = logprobs_with_top(logits, chosen, max(sequence.top for sequence in sequences))
        return [
            _write(one, [token], [likely._replace(top=likely.top[: one.top])] if one.top else [])
            for one, token, likely in zip(sequences, chosen.tolist(), logprobs, strict=True)
            if one.error is None
        ]


def _fail_without_scores(sequences: Sequence[SequenceState], values: Tensor) -> None:
    """Fails the requests whose hidden states or logits [M, …] are no numbers."""
    for sequence, there in zip(sequences, values.amax(-1).isfinite().tolist(), strict=True):
        if not there:
            sequence.error = without_scores()


def without_scores() -> MalmoiError:
    return MalmoiError(
        "The model's scores are not numbers: its training diverged, or its weights are damaged."
    )


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device, without waiting for what it still computes."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class BatchSampler:
    """Samples for several steps ahead: all random numbers are sent to the device at once.

    `places` are the sequences' rows in logits and tokens.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        steps: int,
        device: torch.device,
        places: Sequence[int],
    ) -> None:
        self.groups = []
        for sampling, members in rows_by(one.sampling for one in sequences).items():
            if sampling.greedy:
                continue
            some = [sequences[i] for i in members]
            rows = sent(torch.tensor([places[i] for i in members]), device)
            # uniform random numbers [steps, M, 1]: the same ones that single steps would draw
            drawn = [torch.rand(steps, generator=s.generator, dtype=torch.float64) for s in some]
            chances = sent(torch.stack(drawn, dim=1)[..., None], device)
            self.groups.append((sampling, rows, chances))

    def sample(self, step: int, logits: Tensor, tokens: Tensor) -> None:
        """Writes sampled tokens into `tokens` [S], which already holds the greedy ones."""
        for sampling, rows, chances in self.groups:
            tokens[rows] = inverse_cdf(apply_rules(sampling, logits[rows]), chances[step])


def apply_constraints(sequences: Sequence[SequenceState], logits: Tensor) -> Tensor:
    """Sets the logits of tokens that constraints forbid to −∞."""
    if all(sequence.constraint_state is None for sequence in sequences):
        return logits
    logits = logits.clone()
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.constraint_state is None:
            continue
        try:
            allowed = sequence.constraint_state.allowed(row)
        except Exception as error:  # a user's function may raise anything; only its request fails
            failed = MalmoiError("The constraint failed: {error}.", error=repr(error))
            sequence.error = error if isinstance(error, MalmoiError) else failed
        else:
            row.masked_fill_(~allowed.to(row.device), NEGATIVE_INFINITY)
    return logits


def logprobs_with_top(logits: Tensor, tokens: Tensor, top: int) -> list[Logprob]:
    """The log-probability of each token [M] under logits [M, V], with the `top` most likely."""
    if not top:
        return [Logprob(token, 0.0, ()) for token in tokens.tolist()]
    whole = logits.float().log_softmax(-1)
    best = whole.topk(min(top, whole.size(-1)))
    chosen = whole.gather(1, tokens[:, None]).squeeze(1).tolist()
    rows = zip(tokens.tolist(), chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Logprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, ids, values in rows
    ]


def _history(
    sequences: Sequence[SequenceState], sampling: Sampling, logits: Tensor
) -> TokenHistory | None:
    """The tokens that each text contains, if a rule needs them."""
    if not sampling.needs_history:
        return None
    seen = torch.zeros(len(sequences), logits.size(1), dtype=torch.bool, device=logits.device)
    written = torch.zeros_like(seen, dtype=torch.float32)
    for row, counts, sequence in zip(seen, written, sequences, strict=True):
        tokens = torch.tensor(sequence.tokens, device=row.device)
        row[tokens] = True
        new = tokens[len(sequence.prompt) :]
        counts.scatter_add_(0, new, torch.ones_like(new, dtype=counts.dtype))
    return TokenHistory(seen, written)


def _write(sequence: SequenceState, tokens: list[int], logprobs: list[Logprob]) -> StepOutput:
    sequence.tokens += tokens
    if sequence.constraint_state is not None:
        for token in tokens:
            sequence.constraint_state.push(token)
    return StepOutput(sequence, tokens, logprobs)
