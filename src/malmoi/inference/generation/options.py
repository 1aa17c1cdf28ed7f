"""How text is generated, as records of settings. No torch here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from malmoi.errors import require, require_that
from malmoi.settings import option, require_bounds, setting
from malmoi.system.untrusted import MAX_BEAMS, MAX_CONTINUATIONS, MAX_SEED, MAX_SIZE, MIN_SEED

if TYPE_CHECKING:
    from malmoi.inference.generation.constraints import Constraint

_require = partial(require, "Invalid sampling settings")

MIN_TEMPERATURE = 1e-4  # lower values could overflow the logits
MAX_LOGIT_BIAS = 100.0
# limits: every token is checked against all of them
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000


@dataclass(frozen=True)
class Sampling:
    """How the next token is selected; a temperature of 0 is greedy."""

    temperature: float = option(
        1.0, "0 is greedy; above 1 is more random.", ge=0, shown="1; 0 with beams or speculate"
    )
    top_k: int | None = option(
        None, "Sample from the k most likely tokens only.", ge=1, le=MAX_SIZE
    )
    top_p: float | None = option(
        None, "Sample from the smallest set of tokens whose probabilities reach p.", gt=0, le=1
    )
    repetition_penalty: float = option(
        1.0, "Above 1 makes repetition less likely.", ge=0.01, le=100
    )
    min_p: float | None = option(
        None, "Sample only from tokens at least this fraction as likely as the best.", ge=0, le=1
    )
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's score each time it was generated.", ge=-2, le=2
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the score of every token generated before.", ge=-2, le=2
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (),
        "Added to a token's score; repeatable.",
        metavar="ID=BIAS",
        typed=list[str],
        accepts="Mapping[int, float]",
    )

    def __post_init__(self) -> None:
        bias = self.logit_bias
        pairs = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
        object.__setattr__(self, "logit_bias", pairs)
        for token, value in pairs:
            _require(
                isinstance(token, int) and token >= 0 and abs(value) <= MAX_LOGIT_BIAS,
                "logit_bias must map tokens to numbers within ±{most:g}, not {token!r} to {value}",
                most=MAX_LOGIT_BIAS,
                token=token,
                value=value,
            )
        require_bounds(self, "Invalid sampling settings")
        _require(
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            "temperature must be 0 (greedy) or {least:g} and more, not {temperature}",
            least=MIN_TEMPERATURE,
            temperature=self.temperature,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether a rule depends on the tokens already in the text."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def changes_best(self) -> bool:
        """Whether a rule may change which token is the most likely."""
        return self.needs_history or bool(self.logit_bias)


@dataclass(frozen=True)
class GenerationConfig:
    """How a continuation is generated: the validated options of `generate`.

    Examples:
        >>> malmoi.GenerationConfig(max_new_tokens=8, stop="\\n").stop
        ('\\n',)
    """

    max_new_tokens: int = option(40, "Maximum new tokens.", ge=1, le=MAX_SIZE)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = option(
        (), "Stop before this text; repeatable.", accepts="str | Sequence[str]"
    )
    end_tokens: frozenset[int] = frozenset()  # tokens that end a text
    seed: int | None = option(None, "Random seed.", ge=MIN_SEED, le=MAX_SEED, shown="random")
    n: int = option(
        1, "Continuations of each prompt.", ge=1, le=MAX_CONTINUATIONS, flags=("--samples", "-n")
    )
    constraint: "Constraint | None" = None
    beams: int = option(1, "Number of beams; more than 1 enables beam search.", ge=1, le=MAX_BEAMS)
    length_penalty: float = option(1.0, "Beams are scored by log p / length^penalty.")
    early_stopping: bool | Literal["never"] = setting(
        False,
        "When beam search ends: with enough finished beams (True), when better ones are "
        "unlikely (False) or impossible ('never').",
    )
    speculate: bool = option(False, "Prompt-lookup decoding: the same greedy text, faster.")
    ignore_eos: bool = option(False, "Do not end at the end-of-text token.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", stop_strings(self.stop))
        if self.ignore_eos:
            object.__setattr__(self, "end_tokens", frozenset())
        require_bounds(self)
        plain = self.sampling.greedy and not self.sampling.changes_best and self.n == 1
        for name, enabled in (("beams", self.beams > 1), ("speculate", self.speculate)):
            require_that(
                not enabled or (plain and self.constraint is None),
                "{name} needs temperature=0, n=1, no penalties, no logit_bias and no constraint.",
                name=name,
            )
        alone = self.beams <= 1 or not self.speculate
        require_that(alone, "beams and speculate cannot be combined: choose one.")
        known = self.early_stopping in (True, False, "never")
        require_that(known, "early_stopping must be True, False or 'never'.")


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """What the text must be; nothing that is None."""

    min_tokens: int | None = option(None, "Minimum new tokens.", ge=0, le=MAX_SIZE)
    choices: Sequence[str] | None = option(
        None, "Generate exactly one of these; spaces are significant.", metavar="A,B,…", typed=str
    )
    regex: str | None = option(
        None, "Regular expression that the whole text must match.", metavar="PATTERN"
    )
    json_schema: Mapping[str, Any] | Literal[True] | None = option(
        None, "JSON schema that the text must follow.", metavar="FILE", typed=Path
    )
    grammar: str | None = setting(None, "Grammar of llguidance (Lark) that the text must follow.")
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]] | None = setting(
        None, "Token ids, or a function of the tokens generated so far that returns them."
    )
    banned: Sequence[str] | None = option(
        None, "Text never to generate; repeatable.", typed=list[str]
    )


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    known = all(isinstance(s, str) and s for s in stops)
    require_that(known, "A stop string must be a text of at least one character.")
    require_that(
        len(stops) <= MAX_STOP_STRINGS and all(len(s) <= MAX_STOP_CHARACTERS for s in stops),
        "The limit is {most} stop strings of {longest} characters.",
        most=MAX_STOP_STRINGS,
        longest=MAX_STOP_CHARACTERS,
    )
    return stops
