"""The bytes of every token of a vocabulary."""

import re
from collections.abc import Callable
from functools import cache, lru_cache, partial

from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.pipeline import byte_alphabet

# a byte-fallback token of a SentencePiece vocabulary
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes of each token, computed on first use; empty for special tokens."""
    return cache(partial(_bytes_of_token, tokenizer))


def _bytes_of_token(tokenizer: Tokenizer, id: int) -> bytes:
    text = tokenizer.decode([id])
    if not text:
        return b""
    token = tokenizer.token(id)
    if tokenizer.kind == "byte-bpe":
        alphabet = byte_alphabet()
        known = all(c in alphabet for c in token)
        # otherwise an added token, stored as plain text
        return bytes(alphabet[c] for c in token) if known else token.encode()
    if found := BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    if token.endswith("</w>"):  # GPT-1's end-of-word marker
        return token.removesuffix("</w>").encode() + b" "
    # decoded after another token, so that spaces and "##" come out right
    return tokenizer.decode([id, id])[len(text) :].encode()


@lru_cache(maxsize=8)
def all_token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """The bytes of every token; empty for unused ids."""
    known = set(tokenizer.vocab().values())
    written = token_bytes(tokenizer)
    return tuple(written(id) if id in known else b"" for id in range(tokenizer.vocab_size))
