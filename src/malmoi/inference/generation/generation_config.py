"""The options of `generate`, and their validated form."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

from malmoi.errors import UsageError, nearest
from malmoi.inference.generation.constraints import (
    AllConstraints,
    AllowedTokens,
    BannedWords,
    Constraint,
    MinTokens,
)
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
from malmoi.tokenizer import Tokenizer


class ConstraintOptions(TypedDict, total=False):
    """The options of `generate` that constrain the text."""

    choices: Sequence[str]  # one of these
    regex: str  # the whole text must match
    json_schema: Mapping[str, Any] | Literal[True]  # JSON of this schema; True: any object
    # token ids, or a function of the tokens generated so far
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]]
    banned: Sequence[str]  # words that must not appear
    min_tokens: int  # at least this many before the end


class GenerationOptions(ConstraintOptions, total=False):
    """Options that control how text is generated.

    Examples:
        >>> options: malmoi.GenerationOptions = {"max_new_tokens": 20, "temperature": 0.7}
    """

    max_new_tokens: int  # 40
    temperature: float  # 1.0; 0 is greedy
    top_k: int | None
    top_p: float | None
    repetition_penalty: float  # 1.0
    frequency_penalty: float  # 0.0: subtracted once per earlier occurrence of a generated token
    presence_penalty: float  # 0.0: subtracted from every token generated before
    min_p: float | None  # keep tokens at least this fraction as likely as the best
    logit_bias: Mapping[int, float]  # added to the logits of these tokens
    ignore_eos: bool  # False; True: keep generating after the end-of-text token
    stop: str | Sequence[str]  # stop before any of these strings
    seed: int | None  # the same seed gives the same text, alone or in a batch
    beams: int  # 1; more: beam search, with temperature=0
    length_penalty: float  # 1.0: beams are scored by log p / length^penalty
    early_stopping: bool | Literal["never"]  # False: when beam search ends
    # False; True: prompt-lookup drafts, with temperature=0; the same text, faster
    speculate: bool


class GenerationSettings(GenerationOptions, total=False):
    """`GenerationOptions` and the number of continuations."""

    n: int  # 1: continuations per prompt


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
        for name, limit in limits.items():
            check_whole_number(name, getattr(self, name), 1, limit)
        if self.seed is not None:
            check_whole_number("seed", self.seed, MIN_SEED, MAX_SEED)
        plain = self.sampling.greedy and not self.sampling.changes_best and self.n == 1
        for name, enabled in (("beams", self.beams > 1), ("speculate", self.speculate)):
            if enabled and not (plain and self.constraint is None):
                raise UsageError(
                    "{name} is deterministic and works only with temperature=0, n=1, no "
                    "penalties, logit_bias or constraint.",
                    name=name,
                )
        if self.beams > 1 and self.speculate:
            raise UsageError("beams and speculate cannot be combined: choose one.")
        if self.early_stopping not in (True, False, "never"):
            raise UsageError(
                "early_stopping must be True, False or 'never', not {stopping!r}.",
                stopping=self.early_stopping,
            )


def generation_config(
    tokenizer: Tokenizer, ends: frozenset[int], vocab: int, options: GenerationSettings
) -> GenerationConfig:
    """The config of these options, for a model whose texts end with one of `ends`."""
    given: dict[str, Any] = dict(options)
    for name in given:
        if name not in GenerationSettings.__annotations__:
            raise UsageError(
                "generate has no setting {name!r}.{hint}",
                name=name,
                hint=nearest(name, GenerationSettings.__annotations__),
            )
    sampling = Sampling(**_take(given, Sampling.__dataclass_fields__))
    if wrong := [token for token, _ in sampling.logit_bias if token >= vocab]:
        raise UsageError(
            "logit_bias has the token {wrong}, which is not in this model's vocabulary.",
            wrong=wrong[0],
        )
    rules = _take(given, ConstraintOptions.__annotations__)
    rules = {name: value for name, value in rules.items() if value is not None}
    constraint = build_constraint(tokenizer, ends, **rules) if rules else None
    # special tokens decode to no text, so they match by id
    known = tokenizer.control_tokens
    stops = (known[one] for one in stop_strings(given.get("stop", ())) if one in known)
    ends = frozenset() if given.pop("ignore_eos", False) else ends.union(stops)
    return GenerationConfig(sampling=sampling, end_tokens=ends, constraint=constraint, **given)


def build_constraint(
    tokenizer: Tokenizer, ends: frozenset[int], **options: Unpack[ConstraintOptions]
) -> Constraint:
    """Combines the constraining options of `generate` into one constraint."""
    parts: list[Constraint] = []
    if "allowed" in options:
        parts.append(AllowedTokens(options["allowed"]))
    if "banned" in options:
        words = options["banned"]
        parts.append(BannedWords([words] if isinstance(words, str) else words, tokenizer))
    if "min_tokens" in options:
        parts.append(MinTokens(options["min_tokens"], ends))
    # last, since near the limit they choose among the tokens that the others leave
    for name in ("choices", "regex", "json_schema"):
        if name in options:
            from malmoi.inference.generation.grammar_constraint import grammar_constraint

            parts.append(grammar_constraint(name, options[name], tokenizer, ends))
    return parts[0] if len(parts) == 1 else AllConstraints(parts)


def _take(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}


def check_prompt_length(prompt: Sequence[int], context: int) -> None:
    """Raises an error if a prompt leaves no room for a new token."""
    if len(prompt) >= context:
        raise UsageError(
            "The prompt has {prompt} tokens and leaves no room in this model's context of "
            "{context}; shorten it to {context2} or fewer.",
            code="context_length_exceeded",
            prompt=len(prompt),
            context=context,
            context2=context - 1,
        )
