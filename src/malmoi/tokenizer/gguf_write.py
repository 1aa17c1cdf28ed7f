"""Writes a tokenizer as GGUF metadata, if llama.cpp tokenizes exactly alike; otherwise refuses.

llama.cpp has no NFC, so decomposed text (NFD) gets other tokens there: normalise it first.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Rust
from tokenizers import models, normalizers

from malmoi.errors import UsageError
from malmoi.tokenizer import pipeline
from malmoi.tokenizer.core import Tokenizer
from malmoi.tokenizer.gguf_read import CONTROL, DEFINED, NORMAL, PRE_TOKENIZERS, UNKNOWN
from malmoi.tokenizer.pipeline import SPACE, State

# more of llama.cpp's token types
UNUSED = 5
BYTE = 6
GGUF_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}


def gguf_vocabulary(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    """All of `tokenizer.*` for a network of `size` tokens; ids the tokenizer lacks are unused."""
    state = pipeline.parse_pipeline(tokenizer._rust)
    kind, described = _described(tokenizer, state)
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [UNUSED] * size
    for token, id in tokenizer._vocab.items():
        tokens[id], types[id] = token, BYTE if kind == "llama" and _is_byte(token) else NORMAL
    for token in state["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else DEFINED
    if kind == "llama" and tokenizer.specials.unk is not None:
        types[tokenizer.specials.unk] = UNKNOWN
    values = {"model": kind, "tokens": tokens, "token_type": types, **described}
    values |= _ids(tokenizer, kind)
    if kind == "llama":
        values["scores"] = _scores(state, tokens)
    named = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    template = tokenizer.chat_template
    return named | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _described(tokenizer: Tokenizer, state: State) -> tuple[str, dict[str, Any]]:
    """llama.cpp's tokenizer model, and the metadata of its splitting or joining."""
    model = state["model"]
    if tokenizer.kind == "byte-bpe" and pipeline.normalizer_of(state) is None:
        cut = next(
            (name for name in PRE_TOKENIZERS if _same(state["pre_tokenizer"], _cut(name))), None
        )
        if cut is not None and model.get("ignore_merges", False) == (cut == "llama-bpe"):
            return "gpt2", {"pre": cut, "merges": [" ".join(pair) for pair in model["merges"]]}
    if model["type"] == "BPE" and model.get("byte_fallback") and state["pre_tokenizer"] is None:
        for front in (True, False):
            if state["normalizer"] == _spaces(front=front):
                return "llama", {"pre": "default", "add_space_prefix": front}
    raise UsageError(
        "llama.cpp does not split text as this tokenizer ({kind}) does: it supports "
        "byte-level BPE as in {tokenizers}, without lowercasing, and SentencePiece's BPE.",
        kind=tokenizer.kind,
        tokenizers=", ".join(PRE_TOKENIZERS),
    )


def _ids(tokenizer: Tokenizer, kind: str) -> dict[str, Any]:
    specials = tokenizer.specials
    marks = tokenizer.encode("").tokens
    roles = GGUF_ROLES | ({"unk": "unknown"} if kind == "llama" else {})
    ids = {f"{theirs}_token_id": getattr(specials, ours) for ours, theirs in roles.items()}
    first, last = (
        id is not None and marks[place : place + 1 or None] == [id]
        for id, place in ((specials.bos, 0), (specials.eos, -1))
    )
    known = {name: id for name, id in ids.items() if id is not None}
    return known | {"add_bos_token": first, "add_eos_token": last and len(marks) > first}


def _scores(state: State, tokens: list[str]) -> list[float]:
    """SentencePiece merges the best score first, so earlier merges get higher scores."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(state["model"]["merges"]):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _cut(name: str) -> Any:
    rust = Rust(models.BPE())
    rust.pre_tokenizer = PRE_TOKENIZERS[name]()
    return pipeline.parse_pipeline(rust)["pre_tokenizer"]


def _spaces(*, front: bool) -> Any:
    rust = Rust(models.BPE())
    first = [normalizers.Prepend(SPACE)] if front else []
    rust.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    return pipeline.parse_pipeline(rust)["normalizer"]


def _same(one: Any, other: Any) -> bool:
    """Whether two pre-tokenizers are equal except for `trim_offsets`, which does not affect ids."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = (one.keys() | other.keys()) - {"trim_offsets"}
        return all(_same(one.get(name), other.get(name)) for name in names)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
