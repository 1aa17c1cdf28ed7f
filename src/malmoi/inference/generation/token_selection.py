"""Token selection for a batch of requests with different sampling settings.

M requests, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from malmoi.errors import MalmoiError
from malmoi.inference.generation.config import GenerationRequest
from malmoi.inference.generation.constraints import ConstraintState
from malmoi.inference.generation.fast_argmax import MAX_SCREENED_ROWS, FastArgmax
from malmoi.inference.generation.sampling import (
    NEGATIVE_INFINITY,
    Sampling,
    inverse_cdf,
    sample_next,
)
from malmoi.model import Network


class Logprob(NamedTuple):
    """The log-probability of a token under the model itself, before any rule, and the likeliest
    tokens with theirs.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class SequenceState:
    """The state of a request being decoded: settings, cache row, progress."""

    request: GenerationRequest
    sampling: Sampling
    constraint_state: ConstraintState | None = None
    top: int = 0  # how many log-probabilities a token comes with
    echo: bool = False  # log-probabilities of the prompt too
    row: int = -1
    tokens_read: int = 0  # tokens in the cache
    decoding: bool = False  # the prompt has been read
    tokens: list[int] = field(default_factory=list)  # the prompt and what was written
    echoed: list[Logprob] = field(default_factory=list)  # of the prompt's tokens after the first
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def unread(self) -> list[int]:
        return self.tokens[self.tokens_read :]

    @property
    def tokens_left(self) -> int:
        """How many tokens it may still write, those under way counted as written."""
        return self.request.limit - (self.tokens_read - len(self.request.prompt) + 1)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next token depends on the scores alone, so that steps need not wait for
        one another.
        """
        return self.constraint_state is None and not self.top and not self.sampling.needs_history

    @property
    def plain(self) -> bool:
        return self.can_run_ahead and self.sampling.greedy


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
        """The next token of each, from its hidden state [M, D]."""
        quick = (
            self.fast_argmax is not None
            and self.fast_argmax.is_current
            and len(sequences) <= MAX_SCREENED_ROWS
        )
        if quick and self.fast_argmax is not None and all(sequence.plain for sequence in sequences):
            best = self.fast_argmax.argmax(self.fast_argmax.head.features(hidden)).tolist()
            return [
                _write(sequence, [token], [])
                for sequence, token in zip(sequences, best, strict=True)
            ]
        return self.select_from_logits(sequences, self.network.read("lm", hidden))

    def select_from_logits(
        self, sequences: Sequence[SequenceState], logits: Tensor
    ) -> list[StepOutput]:
        """The next token of each from its scores [M, V]; one whose constraint fails is marked
        and gets none.
        """
        allowed = apply_constraints(sequences, logits)
        chosen = torch.empty(len(sequences), dtype=torch.long, device=logits.device)
        for sampling, members in group_by_sampling(sequences).items():
            at = torch.tensor(members, device=logits.device)
            some = [sequences[i] for i in members]
            drawing = [sequence.request.generator for sequence in some]
            chosen[at] = sample_next(allowed[at], sampling, _seen(some, sampling, logits), drawing)
        said = logprobs_with_top(logits, chosen, max(sequence.top for sequence in sequences))
        return [
            _write(sequence, [token], [_cut(one, sequence.top)] if sequence.top else [])
            for sequence, token, one in zip(sequences, chosen.tolist(), said, strict=True)
            if sequence.error is None
        ]


def group_by_sampling(sequences: Sequence[SequenceState]) -> dict[Sampling, list[int]]:
    """Which of the requests choose alike."""
    groups: dict[Sampling, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.sampling, []).append(i)
    return groups


class BatchSampler:
    """Samples several steps ahead: the random numbers of all steps are sent to the device at
    once.
    """

    def __init__(
        self, sequences: Sequence[SequenceState], steps: int, device: torch.device
    ) -> None:
        self.groups = [
            (
                sampling,
                _rows([sequences[i] for i in members], device),
                _uniforms([sequences[i] for i in members], steps, device),
            )
            for sampling, members in group_by_sampling(sequences).items()
            if not sampling.greedy
        ]

    def sample(self, step: int, logits: Tensor, tokens: Tensor) -> None:
        """Puts the tokens of those that draw into `tokens` [S]; greedy ones have the best there
        already.
        """
        for sampling, rows, chances in self.groups:
            tokens[rows] = inverse_cdf(sampling.apply(logits[rows], logits), chances[step])


def _rows(sequences: Sequence[SequenceState], device: torch.device) -> Tensor:
    return torch.tensor([sequence.row for sequence in sequences], device=device)


def _uniforms(sequences: Sequence[SequenceState], steps: int, device: torch.device) -> Tensor:
    """Uniform numbers [steps, M, 1], of each request those that one step at a time would draw."""
    drawn = [
        torch.rand(steps, generator=sequence.request.generator, dtype=torch.float64)
        for sequence in sequences
    ]
    return torch.stack(drawn, dim=1)[..., None].to(device)


def apply_constraints(sequences: Sequence[SequenceState], logits: Tensor) -> Tensor:
    """The scores with −∞ for what the requests' constraints forbid."""
    if all(sequence.constraint_state is None for sequence in sequences):
        return logits
    logits = logits.clone()
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.constraint_state is not None:
            _forbid(row, sequence, sequence.constraint_state)
    return logits


def _forbid(row: Tensor, sequence: SequenceState, state: ConstraintState) -> None:
    try:
        allowed = state.allowed(len(row))
    except Exception as error:  # a user's function: its failure is this request's alone
        sequence.error = (
            error
            if isinstance(error, MalmoiError)
            else MalmoiError(f"The constraint failed: {error!r}.")
        )
        return
    row.masked_fill_(~allowed.to(row.device), NEGATIVE_INFINITY)


def logprobs_with_top(logits: Tensor, tokens: Tensor, top: int) -> list[Logprob]:
    """The log-probability of each token [M] under its scores [M, V], with the `top` likeliest
    ones.
    """
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


def _seen(sequences: Sequence[SequenceState], sampling: Sampling, logits: Tensor) -> Tensor:
    """Which tokens stand in each text [M, V], where a rule wants to know."""
    seen = torch.zeros(
        len(sequences),
        logits.size(1) if sampling.needs_history else 0,
        dtype=torch.bool,
        device=logits.device,
    )
    for row, sequence in zip(seen, sequences if sampling.needs_history else [], strict=False):
        row[torch.tensor(sequence.tokens, device=row.device)] = True
    return seen


def _write(sequence: SequenceState, tokens: list[int], said: list[Logprob]) -> StepOutput:
    sequence.tokens += tokens
    if sequence.constraint_state is not None:
        for token in tokens:
            sequence.constraint_state.push(token)
    return StepOutput(sequence, tokens, said)
