"""Generation config."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from malmoi.errors import UsageError
from malmoi.inference.generation.constraints import Constraint
from malmoi.inference.generation.detokenize import stop_strings
from malmoi.inference.generation.sampling import Sampling
from malmoi.system.limits import (
    MAX_BEAMS,
    MAX_CONTINUATIONS,
    MAX_SEED,
    MAX_SIZE,
    MIN_SEED,
    check_whole_number,
)


@dataclass(frozen=True)
class GenerationConfig:
    """How a continuation is generated: the validated options of `generate`.

    Examples:
        >>> malmoi.GenerationConfig(max_new_tokens=8, stop="\\n").stop
        ('\\n',)
    """

    max_new_tokens: int = 40
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()  # tokens that end a text
    seed: int | None = None
    n: int = 1
    constraint: Constraint | None = None
    beams: int = 1  # more than one: beam search
    length_penalty: float = 1.0  # above 0 favours longer texts, below 0 shorter ones
    early_stopping: bool | Literal["never"] = False
    speculate: bool = False  # prompt lookup, greedy only

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", stop_strings(self.stop))
        limits = {"max_new_tokens": MAX_SIZE, "n": MAX_CONTINUATIONS, "beams": MAX_BEAMS}
        for name, most in limits.items():
            check_whole_number(name, getattr(self, name), 1, most)
        if self.seed is not None:
            check_whole_number("seed", self.seed, MIN_SEED, MAX_SEED)
        plain = self.sampling.greedy and not self.sampling.changes_best and self.n == 1
        for name, asked in (("beams", self.beams > 1), ("speculate", self.speculate)):
            if asked and not (plain and self.constraint is None):
                raise UsageError(
                    f"{name} is deterministic and works only with temperature=0, n=1, no "
                    "penalties, logit_bias or constraint."
                )
        if self.beams > 1 and self.speculate:
            raise UsageError("beams and speculate cannot be combined: choose one.")
        if self.early_stopping not in (True, False, "never"):
            raise UsageError(
                f"early_stopping must be True, False or 'never', not {self.early_stopping!r}."
            )


def check_prompt_length(prompt: Sequence[int], context: int) -> None:
    """Raises an error if a prompt leaves no room for a new token."""
    if len(prompt) >= context:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens and leaves no room in this model's context of "
            f"{context}; shorten it to {context - 1} or fewer.",
            code="context_length_exceeded",
        )
