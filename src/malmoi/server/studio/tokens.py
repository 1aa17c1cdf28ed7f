"""Tokens as people can read them, and back: vocabularies write "Ġthe" and "ìĸ´" where the text
has " the" and bytes.
"""

from collections.abc import Sequence
from functools import lru_cache

from pydantic import BaseModel

from malmoi.errors import UsageError
from malmoi.inference import Model
from malmoi.inference.prompt import encode_prompt
from malmoi.server.api.logprobs import token_name
from malmoi.tokenizer import Tokenizer


class PromptBranch(BaseModel):
    """A prompt as tokens: what was given, and what was written after it token by token."""

    tokens: list[int]


def readable_token(tokenizer: Tokenizer, token: str) -> str:
    """What a token of the vocabulary writes; WordPiece is readable as it is."""
    id = tokenizer.id(token)
    return token if id is None or tokenizer.kind == "wordpiece" else token_name(tokenizer, id)


def prompt_branch(model: Model, prompt: str | list[int], written: Sequence[str]) -> PromptBranch:
    """The tokens to go on from: those that were written stay as they were, however the text
    would be cut anew.
    """
    known = _by_name(model.tokenizer)
    unknown = next((one for one in written if one not in known), None)
    if unknown is not None:
        raise UsageError(f"This model writes no token {unknown!r:.60}.")
    before = encode_prompt(model.tokenizer, prompt).tokens if isinstance(prompt, str) else prompt
    return PromptBranch(tokens=[*before, *(known[one] for one in written)])


@lru_cache(maxsize=8)
def _by_name(tokenizer: Tokenizer) -> dict[str, int]:
    """Every token by the name that /v1/completions gives it; of two alike the first."""
    return {
        token_name(tokenizer, id): id for id in sorted(tokenizer.vocab().values(), reverse=True)
    }
