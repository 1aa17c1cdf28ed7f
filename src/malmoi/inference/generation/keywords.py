"""The keywords of `generate`. Written by tools/keywords.py; do not edit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict


class GenerationOptions(TypedDict, total=False):
    """Options that control how text is generated.

    Examples:
        >>> options: malmoi.GenerationOptions = {"max_new_tokens": 20, "temperature": 0.7}
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    repetition_penalty: float
    min_p: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    seed: int | None
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    speculate: bool
    ignore_eos: bool
    min_tokens: int | None
    choices: Sequence[str] | None
    regex: str | None
    json_schema: Mapping[str, Any] | Literal[True] | None
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]] | None
    banned: Sequence[str] | None


class GenerationSettings(GenerationOptions, total=False):
    """`GenerationOptions` and the number of continuations."""

    n: int
