"""Checks a tokenizer.json first, since some sizes would make the Rust library abort the process.

A huge id makes it allocate every id below; normalizers that multiply a text's length exhaust
memory. The library treats neither as an error, so both are refused here.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from malmoi.errors import MalmoiError
from malmoi.messages import msg
from malmoi.system.limits import (
    MAX_TEXT_GROWTH,
    MAX_TOKEN_CHARACTERS,
    MAX_TOKENIZER_REGEX_CHARACTERS,
    MAX_VOCABULARY_HOLES,
    MAX_VOCABULARY_TOKENS,
    MAX_WORD_CHARACTERS,
)
from malmoi.system.untrusted import JsonObject

# keys that hold the parts of a Sequence
PARTS = ("normalizers", "pretokenizers", "processors", "decoders")


def check_state(state: JsonObject) -> None:
    """Refuses a tokenizer.json with unreasonable sizes."""
    model = state.object("model")
    vocab = model.get("vocab")
    if isinstance(vocab, Mapping):
        check_ids(vocab, state.where)
    elif isinstance(vocab, list) and len(vocab) > MAX_VOCABULARY_TOKENS:
        raise _too_many(state.where, len(vocab))
    model.whole("max_input_chars_per_word", default=0, high=MAX_WORD_CHARACTERS)
    for i, token in enumerate(state.list_of("added_tokens", dict, default=[])):
        check_added(JsonObject(token, f"{state.where}, added_tokens[{i}]"))
    for part in ("normalizer", "decoder"):
        growth = _growth(state.get(part), state.where)
        if growth > MAX_TEXT_GROWTH:
            raise MalmoiError(
                "{where}: its {part} may make a text {growth:,} times as long; up to {most} "
                "are allowed.",
                where=state.where,
                part=part,
                growth=growth,
                most=MAX_TEXT_GROWTH,
            )
    _check_patterns(dict(state), state.where)


def check_ids(vocab: Mapping[str, Any], where: str) -> None:
    """Requires a vocabulary's ids to be integers with few gaps."""
    if len(vocab) > MAX_VOCABULARY_TOKENS:
        raise _too_many(where, len(vocab))
    ids = vocab.values()
    if set(map(type, ids)) - {int}:
        # finds which one is wrong; slow for 250,000 tokens
        JsonObject({"vocab": vocab}, where).map_of("vocab", int)
    if len(set(ids)) < len(vocab):
        raise MalmoiError(
            "{where}: two tokens have the same id; a vocabulary has each id once.", where=where
        )
    largest = max(ids, default=-1)
    smallest = min(ids, default=0)
    if smallest < 0 or largest >= len(vocab) + MAX_VOCABULARY_HOLES:
        wrong = smallest if smallest < 0 else largest
        raise MalmoiError(
            "{where}: a token has the id {wrong:,} in a vocabulary of {vocab:,}; it is damaged.",
            where=where,
            wrong=wrong,
            vocab=len(vocab),
        )


def check_added(token: JsonObject) -> None:
    """Checks an added token."""
    token.whole("id", high=MAX_VOCABULARY_TOKENS)
    if len(token.text("content")) > MAX_TOKEN_CHARACTERS:
        raise token.wrong(
            "content", msg("a text of at most {most:,} characters", most=MAX_TOKEN_CHARACTERS)
        )


def _too_many(where: str, count: int) -> MalmoiError:
    return MalmoiError(
        "{where} has a vocabulary of {count:,} tokens; up to {most:,} are read.",
        where=where,
        count=count,
        most=MAX_VOCABULARY_TOKENS,
    )


def _growth(part: Any, where: str) -> int:
    """How many times longer this part of the pipeline can make a text."""
    if not isinstance(part, dict):
        return 1
    growth = 1
    for inner in (one for name in PARTS for one in _listed(part.get(name))):
        growth *= _growth(inner, where)
    if part.get("type") == "Replace":
        pattern = part.get("pattern")
        content = part.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        added = len(content) if isinstance(content, str) else 0
        # a regex may match the empty string before every character
        growth *= max(1, -(-added // len(text)) if isinstance(text, str) and text else added + 1)
    if part.get("type") == "Precompiled":
        growth *= _longest_replacement(part.get("precompiled_charsmap"), where)
    return growth


def _longest_replacement(charsmap: Any, where: str) -> int:
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise MalmoiError(
            "{where}: its precompiled_charsmap is not base64; it is damaged.", where=where
        ) from None
    return longest_replacement(data, where)


def longest_replacement(data: bytes, where: str) -> int:
    """The longest replacement in a SentencePiece charsmap, in bytes; refuses one that is damaged.

    Its layout is a 4-byte length, a trie, then NUL-separated texts. Unicode's longest replacement
    of one character has 33 bytes. The library follows the trie (a double array, as in Darts-clone)
    without looking whether it leaves it, so that is checked here.
    """
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    if size % 4 or len(data) < 4 + size:
        raise MalmoiError(
            "{where}: its precompiled_charsmap is truncated; it is damaged.", where=where
        )
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    leaves = units >> 31 == 1
    next_units = np.arange(len(units)) ^ units >> 10 << ((units & 512) >> 6) | 255
    beyond = np.where(leaves, (units & 0x7FFFFFFF) >= len(texts), next_units >= len(units))
    if beyond.any():
        raise MalmoiError(
            "{where}: its precompiled_charsmap points outside itself; it is damaged.", where=where
        )
    return max(1, max(map(len, texts.split(b"\0")), default=1))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_patterns(part: Any, where: str) -> None:
    """Checks regular expressions anywhere in the pipeline except the vocabulary."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(_listed(part)):
        if (
            key == "Regex"
            and isinstance(value, str)
            and len(value) > MAX_TOKENIZER_REGEX_CHARACTERS
        ):
            raise MalmoiError(
                "{where} has a regular expression of {value:,} characters; up to {most:,} are "
                "read.",
                where=where,
                value=len(value),
                most=MAX_TOKENIZER_REGEX_CHARACTERS,
            )
        if key not in ("model", "added_tokens") and isinstance(value, dict | list):
            _check_patterns(value, where)
