"""The config of `generate` from its keyword options."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from malmoi.errors import UsageError, nearest
from malmoi.inference.generation.constraints import (
    AllConstraints,
    AllowedTokens,
    BannedWords,
    Constraint,
    MinTokens,
)
from malmoi.inference.generation.keywords import GenerationSettings
from malmoi.inference.generation.options import (
    ConstraintOptions,
    GenerationConfig,
    Sampling,
    stop_strings,
)
from malmoi.settings import settings_of
from malmoi.tokenizer import Tokenizer


def generation_config(
    tokenizer: Tokenizer, ends: frozenset[int], vocab: int, options: GenerationSettings
) -> GenerationConfig:
    """The config of these options, for a model whose texts end with one of `ends`."""
    known = settings_of(GenerationConfig, ConstraintOptions)
    values: dict[str, Any] = dict(options)
    for name in values:
        if name not in known:
            raise UsageError(
                "generate has no setting {name!r}.{hint}", name=name, hint=nearest(name, known)
            )
    if values.get("speculate") or values.get("beams", 1) > 1:
        values.setdefault("temperature", 0.0)
    sampling = Sampling(**_take(values, Sampling))
    if wrong := [token for token, _ in sampling.logit_bias if token >= vocab]:
        raise UsageError(
            "logit_bias has the token {wrong}, which is not in this model's vocabulary.",
            wrong=wrong[0],
        )
    rules = ConstraintOptions(**_take(values, ConstraintOptions))
    # special tokens decode to no text, so they match by id
    ids = tokenizer.control_tokens
    stops = (ids[text] for text in stop_strings(values.get("stop", ())) if text in ids)
    return GenerationConfig(
        sampling=sampling,
        end_tokens=ends.union(stops),
        constraint=build_constraint(tokenizer, ends, rules),
        **values,
    )


def build_constraint(
    tokenizer: Tokenizer, ends: frozenset[int], options: ConstraintOptions
) -> Constraint | None:
    """Combines the constraining options of `generate` into one constraint."""
    parts: list[Constraint] = []
    if options.allowed is not None:
        parts.append(AllowedTokens(options.allowed))
    if options.banned is not None:
        words = options.banned
        parts.append(BannedWords([words] if isinstance(words, str) else words, tokenizer))
    if options.min_tokens is not None:
        parts.append(MinTokens(options.min_tokens, ends))
    # last, since near the limit they choose among the tokens that the others leave
    for name in ("choices", "regex", "json_schema", "grammar"):
        value = getattr(options, name)
        if value is not None:
            from malmoi.inference.generation.grammar_constraint import grammar_constraint

            parts.append(grammar_constraint(name, value, tokenizer, ends))
    return AllConstraints(parts) if len(parts) > 1 else next(iter(parts), None)


def _take(values: dict[str, Any], record: type) -> dict[str, Any]:
    """Removes and returns the values of a record's fields."""
    names = [one.name for one in fields(record)]
    return {name: values.pop(name) for name in names if name in values}


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
