"""Token selection for a batch of requests with different sampling settings.

M requests, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.inference.generation.constraints import Constraint
from malmoi.inference.generation.generation_config import check_prompt_length
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.sampling import (
    NEGATIVE_INFINITY,
    TokenHistory,
    apply_rules,
    inverse_cdf,
    random_generators,
    sample_next,
)
from malmoi.kernels.fast_argmax import FastArgmax, greedy_tokens
from malmoi.model import Network


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


class TokenSelector:
    """Selects the next tokens from hidden states."""

    def __init__(self, network: Network, fast_argmax: FastArgmax | None) -> None:
        self.network = network
        self.fast_argmax = fast_argmax

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
        for sampling, members in group_by_sampling(sequences).items():
            at = torch.tensor(members, device=logits.device)
            some = [sequences[i] for i in members]
            drawing = [sequence.generator for sequence in some]
            chosen[at] = sample_next(
                allowed[at], sampling, _history(some, sampling, logits), drawing
            )
        logprobs = logprobs_with_top(logits, chosen, max(sequence.top for sequence in sequences))
        return [
            _write(sequence, [token], [_cut(one, sequence.top)] if sequence.top else [])
            for sequence, token, one in zip(sequences, chosen.tolist(), logprobs, strict=True)
            if sequence.error is None
        ]


def _fail_without_scores(sequences: Sequence[SequenceState], values: Tensor) -> None:
    """Fails the requests whose hidden states or logits [M, …] are no numbers."""
    for sequence, there in zip(sequences, values.amax(-1).isfinite().tolist(), strict=True):
        if not there:
            sequence.error = MalmoiError(
                "The model's scores of the next token are not numbers: its training diverged, or "
                "its weights are damaged."
            )


def group_by_sampling(sequences: Sequence[SequenceState]) -> dict[Sampling, list[int]]:
    """Groups sequence indices by sampling settings."""
    groups: dict[Sampling, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.sampling, []).append(i)
    return groups


class BatchSampler:
    """Samples for several steps ahead: all random numbers are sent to the device at once."""

    def __init__(
        self, sequences: Sequence[SequenceState], steps: int, device: torch.device
    ) -> None:
        self.groups = []
        for sampling, members in group_by_sampling(sequences).items():
            if sampling.greedy:
                continue
            some = [sequences[i] for i in members]
            rows = torch.tensor([sequence.row for sequence in some], device=device)
            # uniform random numbers [steps, M, 1]: the same ones that single steps would draw
            drawn = [torch.rand(steps, generator=s.generator, dtype=torch.float64) for s in some]
            chances = torch.stack(drawn, dim=1)[..., None].to(device)
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
        if sequence.constraint_state is not None:
            _forbid(row, sequence, sequence.constraint_state)
    return logits


def _forbid(row: Tensor, sequence: SequenceState, state: Constraint) -> None:
    try:
        allowed = state.allowed(row)
    except Exception as error:  # a user's function may raise anything; only its own request fails
        ours = isinstance(error, MalmoiError)
        sequence.error = (
            error if ours else MalmoiError("The constraint failed: {error}.", error=repr(error))
        )
        return
    row.masked_fill_(~allowed.to(row.device), NEGATIVE_INFINITY)


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


def _cut(one: Logprob, top: int) -> Logprob:
    return one._replace(top=one.top[:top])


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
