# Written by tools/keywords.py from the records of settings; do not edit.

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

class GenerationOptions(TypedDict, total=False):
    """Keyword options, each with its type.

    Examples:
        >>> options: malmoi.GenerationOptions = {"max_new_tokens": 20, "temperature": 0.7}
    """

    max_new_tokens: int
    """Maximum new tokens."""
    temperature: float
    """0 is greedy; above 1 is more random."""
    top_k: int | None
    """Sample from the k most likely tokens only."""
    top_p: float | None
    """Sample from the smallest set of tokens whose probabilities reach p."""
    repetition_penalty: float
    """Above 1 makes repetition less likely."""
    min_p: float | None
    """Sample only from tokens at least this fraction as likely as the best."""
    frequency_penalty: float
    """Subtracted from a token's score each time it was generated."""
    presence_penalty: float
    """Subtracted from the score of every token generated before."""
    logit_bias: Mapping[int, float]
    """Added to a token's score; repeatable."""
    stop: str | Sequence[str]
    """Stop before this text; repeatable."""
    seed: int | None
    """Random seed."""
    beams: int
    """Number of beams; more than 1 enables beam search."""
    length_penalty: float
    """Beams are scored by log p / length^penalty."""
    early_stopping: bool | Literal["never"]
    """When beam search ends: with enough finished beams (True), when better ones are unlikely (False) or impossible ('never')."""
    speculate: bool
    """Prompt-lookup decoding: the same greedy text, faster."""
    ignore_eos: bool
    """Do not end at the end-of-text token."""
    min_tokens: int | None
    """Minimum new tokens."""
    choices: Sequence[str] | None
    """Generate exactly one of these; spaces are significant."""
    regex: str | None
    """Regular expression that the whole text must match."""
    json_schema: Mapping[str, Any] | Literal[True] | None
    """JSON schema that the text must follow."""
    grammar: str | None
    """Grammar of llguidance (Lark) that the text must follow."""
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]] | None
    """Token ids, or a function of the tokens generated so far that returns them."""
    banned: Sequence[str] | None
    """Text never to generate; repeatable."""

class GenerationSettings(GenerationOptions, total=False):
    """Keyword options, each with its type."""

    n: int
    """Continuations of each prompt."""
